"""Logprobs against a float64 log-softmax: of given logits, and of a plain model's."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.logprobs import token_logprobs
from engine.request import Delta
from tests.engine import plain_model
from tests.helpers import TINY, RandomCheckpoint, greedy, random_prompt, run, tiny_core


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@given(
    st.lists(st.lists(st.integers(-12, 12), min_size=9, max_size=9), min_size=1, max_size=5),
    st.integers(0, 9),
    st.sampled_from([0.25, 1.0, 7.0]),
)
def test_logprobs_are_those_of_the_softmax_and_ties_go_by_id(rows: list[list[int]], num_top: int, scale: float) -> None:
    """Logits from few values, so that most rows have ties, at the edge of the top as well."""
    logits = torch.tensor(rows, dtype=torch.float32) * scale
    tokens = [sum(row) % 9 for row in rows]
    found = token_logprobs(logits, tokens, num_top)
    expected = log_softmax(logits.numpy())
    for row, one in enumerate(found):
        assert one is not None and one.token_id == tokens[row]
        assert one.logprob == pytest.approx(expected[row, tokens[row]], abs=1e-6)
        order = sorted(range(9), key=lambda token: (-rows[row][token], token))[:num_top]
        assert [token for token, _ in one.top] == order
        assert [value for _, value in one.top] == pytest.approx(expected[row, order], abs=1e-6)
        assert dict(one.top).get(tokens[row], one.logprob) == one.logprob
    assert [token_logprobs(logits[row : row + 1], [token], num_top)[0] for row, token in enumerate(tokens)] == found


def test_a_large_vocabulary_sums_to_one_and_does_not_depend_on_company() -> None:
    logits = torch.randn(70, 33_001, generator=torch.Generator().manual_seed(0)) * 3
    found = token_logprobs(logits, list(range(70)), 20)
    expected = log_softmax(logits.numpy())
    for row, one in enumerate(found):
        assert one is not None
        assert one.logprob == pytest.approx(expected[row, row], abs=1e-6)
        assert [token for token, _ in one.top] == np.argsort(-logits[row].numpy(), kind="stable")[:20].tolist()
    tiles = [list(range(start, min(start + 9, 70))) for start in range(0, 70, 9)]
    assert [one for tile in tiles for one in token_logprobs(logits[tile], tile, 20)] == found
    whole = token_logprobs(logits[:1, :500], [0], 500)[0]
    assert whole is not None and sum(math.exp(value) for _, value in whole.top) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_rows_that_are_not_finite_have_none(value: float) -> None:
    logits = torch.randn(3, 50)
    logits[1, 7] = value
    found = token_logprobs(logits, [1, 2, 3], 4)
    assert found[1] is None and found[0] == token_logprobs(logits[:1], [1], 4)[0] and found[2] is not None


PROMPT = random_prompt(4, 45)


@pytest.mark.parametrize("fields", [{}, {"temperature": 1.0, "seed": 3}, {"logit_bias": ((65, 100.0),)}])
def test_generated_tokens_have_the_plain_models_logprobs(fields: dict[str, object]) -> None:
    """Before temperature and bias. The chosen token of a greedy request is the likeliest; a forced one is not."""
    requests = [greedy(str(k), PROMPT, 12, num_logprobs=k, **fields) for k in (0, 5)] + [greedy("no", PROMPT, 12)]
    none, five, without = run(tiny_core(TINY), requests)
    assert none.token_ids == five.token_ids
    weight = RandomCheckpoint(TINY).tensor
    frequencies = [10000.0 ** (-2 * pair / TINY.head_dim) for pair in range(TINY.head_dim // 2)]
    logits = plain_model.logits(TINY, weight, frequencies, [*PROMPT, *five.token_ids])
    expected = log_softmax(logits[len(PROMPT) - 1 : -1].numpy())
    for recorder, num_top in ((none, 0), (five, 5)):
        deltas = [event for event in recorder.events if isinstance(event, Delta)]
        for row, delta in enumerate(deltas):
            (one,) = delta.logprobs
            assert (one.token_id,) == delta.token_ids
            # an fp32 model of two layers: logits of a few units, sums of at most a hundred terms
            assert one.logprob == pytest.approx(expected[row, one.token_id], abs=1e-3)
            assert [token for token, _ in one.top] == np.argsort(-expected[row])[:num_top].tolist()
            assert [value for _, value in one.top] == pytest.approx(np.sort(expected[row])[::-1][:num_top], abs=1e-3)
            if not fields and num_top:
                assert one.top[0] == (one.token_id, one.logprob)
    assert all(not event.logprobs for event in without.events if isinstance(event, Delta))
