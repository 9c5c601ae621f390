"""`min_p`: by the definition, before top_k and top_p, for a row in any company."""

import math
from collections import Counter

import pytest
import torch

from engine.request import SamplingParams
from engine.sampler import sample

COUNT = 2000


def draw(logits: torch.Tensor, **fields: float) -> Counter[int | None]:
    params = SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]
    return Counter(sample(logits.expand(COUNT, -1), [params] * COUNT, range(COUNT)))


def kept(logits: torch.Tensor, min_p: float, temperature: float, top_k: int, top_p: float) -> dict[int, float]:
    """Probabilities by the definition, each filter counting what the one before it left."""
    values = [float(value) / temperature for value in logits]
    weights = {token: math.exp(value - max(values)) for token, value in enumerate(values)}

    def share(tokens: dict[int, float]) -> dict[int, float]:
        total = sum(tokens.values())
        return {token: weight / total for token, weight in tokens.items()}

    left = share(weights)
    left = share({token: weight for token, weight in left.items() if weight >= min_p * max(left.values())})
    ranked = sorted(left, key=lambda token: -left[token])
    left = share({token: left[token] for token in ranked[: top_k or None]})
    sums, total = [], 0.0
    for token in ranked[: len(left)]:
        sums.append(token)
        total += left[token]
        if total >= top_p:
            break
    return share({token: left[token] for token in sums})


@pytest.mark.parametrize("vocab", [60, 1500])
@pytest.mark.parametrize(
    ("min_p", "temperature", "top_k", "top_p"),
    [
        (0.1, 1.0, 0, 1.0),
        (0.1, 0.5, 0, 1.0),
        (0.02, 2.0, 0, 1.0),
        (1.0, 1.0, 0, 1.0),
        (0.05, 1.0, 4, 1.0),
        (0.3, 1.0, 40, 1.0),
        (0.2, 1.0, 0, 0.7),
        (0.1, 1.0, 6, 0.8),
        (0.2, 1.5, 1200, 0.99),
    ],
)
def test_what_is_drawn_is_what_the_definition_leaves(
    vocab: int, min_p: float, temperature: float, top_k: int, top_p: float
) -> None:
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    expected = kept(logits, min_p, temperature, top_k, top_p)
    counts = draw(logits, min_p=min_p, temperature=temperature, top_k=top_k, top_p=top_p)
    assert set(counts) <= set(expected)
    for token, share in expected.items():
        if share > 0.01:  # 6 standard deviations of a binomial count; at least 20 are expected, so 0 is too few
            assert counts[token] > 0
            assert abs(counts[token] - COUNT * share) <= 6 * math.sqrt(COUNT * share * (1 - share))


def test_min_p_comes_before_top_p() -> None:
    """Of 0.5, 0.2, 0.2, 0.1: min_p 0.3 leaves 5/9, 2/9, 2/9, of which two are enough for 0.75. The other way round
    top_p 0.75 would take three of the four."""
    logits = torch.tensor([0.5, 0.2001, 0.1999, 0.1]).log()
    assert set(draw(logits, min_p=0.3, top_p=0.75)) == {0, 1}
    assert set(draw(logits, top_p=0.75)) == {0, 1, 2}


def test_company_does_not_change_a_row() -> None:
    kinds = [
        {},
        {"min_p": 0.1},
        {"min_p": 0.05, "top_p": 0.8},
        {"top_k": 3},
        {"temperature": 0, "min_p": 0.5},
        {"min_p": 0.001, "top_k": 1300},
    ]
    logits = torch.randn(12, 1400, generator=torch.Generator().manual_seed(3)) * 0.7
    params = [SamplingParams(max_tokens=1, seed=row, **kinds[row % len(kinds)]) for row in range(12)]  # type: ignore[arg-type]
    alone = [sample(logits[row : row + 1], [params[row]], [row])[0] for row in range(12)]
    assert sample(logits, params, range(12)) == alone
    odd = list(range(1, 12, 2))
    assert sample(logits[odd], [params[row] for row in odd], odd) == alone[1::2]
