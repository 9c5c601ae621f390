"""Bias, penalties and forbidden tokens against the formulas, one token at a time in doubles."""

import math
from collections.abc import Sequence as List
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.masks import Masks, fill_masks
from engine.penalties import adjust
from engine.request import Request, SamplingParams
from engine.sampler import sample
from engine.sequence import Sequence
from engine.token_counts import TokenCounts

VOCAB = 37
NONE = Masks([], torch.zeros(0, 2, dtype=torch.int32), {})


def sequence(prompt: List[int], generated: List[int], end_ids: List[int] = (), **fields: Any) -> Sequence:
    params = SamplingParams(**{"max_tokens": 99, "temperature": 0} | fields)
    made = Sequence(Request(id="r", prompt=tuple(prompt), sampling=params), 0, end_ids=frozenset(end_ids))
    for token in generated:
        made.append(token)
    return made


class Allowed:
    """Allows the same tokens for ever."""

    is_complete = False

    def __init__(self, tokens: List[int]):
        self._tokens = tokens

    def fill_mask(self, words: memoryview) -> None:
        bits = np.asarray(words).view(np.uint32)
        for token in self._tokens:
            bits[token // 32] |= np.uint32(1 << token % 32)

    def accept(self, token: int) -> None:
        raise AssertionError


def expected(logits: List[float], of: Sequence) -> list[float]:
    """Equation 2 of the CTRL paper as a scale of logits, with the sign looked at; then OpenAI's formula, mu[j] -
    c[j] * alpha_frequency - float(c[j] > 0) * alpha_presence. `of.counts` is not looked at."""
    sampling, generated = of.request.sampling, of.tokens[of.num_prompt_tokens :]
    result = []
    for token, value in enumerate(logits):
        value += sum(bias for biased, bias in sampling.logit_bias if biased == token)
        if token in of.tokens:
            value = value / sampling.repetition_penalty if value > 0 else value * sampling.repetition_penalty
        count = sum(other == token for other in generated)
        value -= count * sampling.frequency_penalty + float(count > 0) * sampling.presence_penalty
        if len(generated) < sampling.min_tokens and token in of.end_ids:
            value = -math.inf
        result.append(value)
    return result


TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=40)
SEQUENCES = st.builds(
    sequence,
    TOKENS,
    TOKENS,
    st.lists(st.integers(0, VOCAB - 1), max_size=3),
    repetition_penalty=st.just(1.0) | st.floats(0.1, 2),
    presence_penalty=st.just(0.0) | st.floats(-2, 2),
    frequency_penalty=st.just(0.0) | st.floats(-2, 2),
    min_tokens=st.integers(0, 50),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5).map(
        lambda bias: tuple(bias.items())
    ),
)


@given(st.lists(SEQUENCES, min_size=1, max_size=4), st.integers(0, 2**31))
def test_rows_are_those_of_the_formulas(sequences: list[Sequence], seed: int) -> None:
    logits = torch.randn(len(sequences), VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
    before = logits.clone()
    adjusted = adjust(logits, sequences, NONE)
    assert torch.equal(logits, before)
    wanted = np.array([expected(row, of) for row, of in zip(logits.tolist(), sequences, strict=True)])
    # fp32 holds 24 bits; each of three stages rounds once, and none of what is between them is above 1000
    np.testing.assert_allclose(adjusted.double().numpy(), wanted, rtol=0, atol=3 * 1000 * 2**-24)
    alone = [adjust(logits[row : row + 1], [of], NONE) for row, of in enumerate(sequences)]
    assert torch.equal(adjusted, torch.cat(alone))


def test_what_nobody_asked_for_is_not_touched() -> None:
    logits = torch.randn(2, VOCAB)
    assert adjust(logits, [sequence([1, 2], [3]), sequence([1], [])], NONE) is logits


def test_openai_penalties_leave_the_prompt_alone_and_repetition_does_not() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 2.0]])
    both = sequence([0, 1], [2, 3, 2], presence_penalty=0.5, frequency_penalty=0.25)
    assert adjust(logits, [both], NONE).tolist() == [[2, -2, 1, -2.75, 2]]
    repeated = sequence([0, 1], [2, 3, 2], repetition_penalty=2.0)
    assert adjust(logits, [repeated], NONE).tolist() == [[1, -4, 1, -4, 2]]


@given(TOKENS, TOKENS)
def test_counts_are_those_of_the_tokens(prompt: list[int], generated: list[int]) -> None:
    counts = TokenCounts(prompt)
    for token in generated:
        counts.add(token)
    found = dict(zip(counts.tokens, counts.counts, strict=True))
    assert found == {token: generated.count(token) for token in {*prompt, *generated}}
    assert len(counts.tokens) == len(found)


def test_a_bias_of_100_forces_and_of_minus_100_forbids() -> None:
    """Under every way to choose. A random logit here is never above 20."""
    generator = torch.Generator().manual_seed(1)
    for number in range(50):
        logits = torch.randn(3, VOCAB, generator=generator) * 4
        best = int(logits[0].argmax())
        rows = [
            sequence([], [], logit_bias=((best, -100.0),)),
            sequence([], [], logit_bias=((7, 100.0),)),
            sequence([], [], logit_bias=((7, 100.0),), temperature=1.0, seed=number, top_p=0.9),
        ]
        params = [row.request.sampling for row in rows]
        tokens = sample(adjust(torch.cat([logits[:1]] * 3), rows, NONE), params, [0, 0, 0])
        assert tokens[0] == int(logits[0].topk(2).indices[1]) and tokens[1:] == [7, 7]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_seen_though_forbidden(temperature: float) -> None:
    """A model that overflowed is not sound, whatever a mask hides."""
    for value in (math.nan, math.inf):
        logits = torch.randn(2, VOCAB)
        logits[0, 5] = value
        banned = [sequence([], [], [5], min_tokens=1, temperature=temperature) for _ in range(2)]
        tokens = sample(adjust(logits, banned, NONE), [banned[0].request.sampling] * 2, [0, 0])
        assert tokens[0] is None and tokens[1] not in (None, 5)
        banned[0].constraint = Allowed([6, 7])
        tokens = sample(adjust(logits, banned, fill_masks(banned, VOCAB)), [banned[0].request.sampling] * 2, [0, 0])
        assert tokens[0] is None and tokens[1] not in (None, 5)


@given(st.lists(st.none() | st.sets(st.integers(0, VOCAB - 1), min_size=1), min_size=1, max_size=5))
def test_a_mask_leaves_what_it_allows(allowed: list[set[int] | None]) -> None:
    sequences = [sequence([], []) for _ in allowed]
    for of, tokens in zip(sequences, allowed, strict=True):
        of.constraint = None if tokens is None else Allowed(sorted(tokens))
    masks = fill_masks(sequences, VOCAB)
    assert masks.rows == [row for row, tokens in enumerate(allowed) if tokens is not None] and not masks.refusals
    logits = torch.randn(len(allowed), VOCAB)
    for row, (values, tokens) in enumerate(zip(adjust(logits, sequences, masks).tolist(), allowed, strict=True)):
        kept = set(range(VOCAB)) if tokens is None else tokens
        assert [value for token, value in enumerate(values) if token in kept] == logits[row][sorted(kept)].tolist()
        assert all(value == -math.inf for token, value in enumerate(values) if token not in kept)


@pytest.mark.parametrize("allowed", [[], [VOCAB], [VOCAB + 1, 63], [3], [3, 31]])
def test_a_mask_that_allows_nothing_that_may_come_is_refused(allowed: list[int]) -> None:
    """Bits behind the vocabulary say nothing, and 3 and 31 end the answer, which is too short."""
    ends = sequence([], [], [3, 31], min_tokens=2)
    ends.constraint = Allowed(allowed)
    other = sequence([], [])
    other.constraint = Allowed([36])
    masks = fill_masks([ends, other], VOCAB)
    assert list(masks.refusals) == [ends] and masks.rows == [1]
    ends.append(1)
    ends.append(1)
    assert (ends in fill_masks([ends], VOCAB).refusals) == (not {3, 31} & {*allowed})
