"""Which tokens may be drawn, how often, and on what a draw depends.

Statistical tests have a fixed seed; the chance that a correct sampler would have failed them is stated.
"""

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch

from engine.request import SamplingParams
from engine.sampler import sample, uniform

# Wilson-Hilferty's normal approximation of chi-square, 5 standard deviations out: a chance below 1e-6.
DEVIATIONS = 5.0


def chi_square_limit(freedom: int) -> float:
    spread = 2 / (9 * freedom)
    return freedom * (1 - spread + DEVIATIONS * math.sqrt(spread)) ** 3


def chi_square(counts: Sequence[float], expected: Sequence[float]) -> float:
    return sum((count - mean) ** 2 / mean for count, mean in zip(counts, expected, strict=True))


def params(**fields: object) -> SamplingParams:
    return SamplingParams(max_tokens=1, **fields)  # type: ignore[arg-type]


def draw(logits: torch.Tensor, count: int, **fields: object) -> Counter[int]:
    """Tokens of one row of logits at `count` positions."""
    rows = logits.expand(count, -1)
    return Counter(sample(rows, [params(**fields)] * count, range(count)))


def random_logits(vocab: int, seed: int = 0, scale: float = 2.0) -> torch.Tensor:
    return torch.randn(vocab, generator=torch.Generator().manual_seed(seed)) * scale


def kept(logits: torch.Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> dict[int, float]:
    """Tokens that may be drawn, with their probabilities, by the definition: sort, cut at k (ties of the last one
    stay), renormalise, and cut behind the token that reaches top_p (ties of it stay)."""
    values = logits.double().numpy() / temperature
    if 0 < top_k < len(values):
        values = np.where(values < np.sort(values)[-top_k], -np.inf, values)
    weights = np.exp(values - values.max())
    if top_p < 1:
        order = np.argsort(-weights, kind="stable")
        mass = 0.0
        for token in order:
            mass += weights[token]
            if mass >= top_p * weights.sum():
                break
        weights = np.where(weights < weights[token], 0, weights)
    return {int(token): float(weights[token] / weights.sum()) for token in np.flatnonzero(weights)}


def test_greedy_takes_the_largest() -> None:
    logits = torch.stack([random_logits(50, seed) for seed in range(20)])
    positions = list(range(20))
    assert sample(logits, [params(temperature=0)] * 20, positions) == [int(np.argmax(row)) for row in logits.numpy()]


def test_greedy_ignores_the_seed_and_other_parameters() -> None:
    logits = random_logits(50).expand(30, -1)
    choices = [params(temperature=0, seed=seed, top_k=3, top_p=0.9) for seed in range(30)]
    assert set(sample(logits, choices, range(30))) == {int(logits[0].argmax())}


def test_uniform_is_a_fixed_function_in_range() -> None:
    values = [uniform(seed, position) for seed in (0, 1, 2**64 - 1) for position in range(2000)]
    assert all(0 <= value < 1 for value in values)
    assert len(set(values)) > len(values) - 5
    # Equal on every machine and in every release: `head -c 16 /dev/zero | b2sum -l 32`.
    assert uniform(0, 0) == int.from_bytes(bytes.fromhex("de45d748"), "little") / 2**32


@pytest.mark.parametrize("axis", ["positions", "seeds"])
def test_uniform_is_uniform_and_neighbours_are_independent(axis: str) -> None:
    """64 cells of one value, and 16 x 16 of two neighbours, over positions of one seed and over seeds."""
    count = 65_536
    values = np.array([uniform(7, i) if axis == "positions" else uniform(i, 7) for i in range(count)])
    single = np.bincount((values * 64).astype(int), minlength=64)
    assert chi_square(single, [count / 64] * 64) < chi_square_limit(63)
    cells = (values * 16).astype(int)
    pairs = np.bincount(cells[:-1] * 16 + cells[1:], minlength=256)
    assert chi_square(pairs, [(count - 1) / 256] * 256) < chi_square_limit(255)


@pytest.mark.parametrize(
    ("seed", "fields"),
    [
        (0, {}),
        (2**63, {}),
        (1, {"temperature": 2.0}),
        (2, {"temperature": 0.5}),
        (3, {"top_k": 7}),
        (4, {"top_p": 0.8}),
        (5, {"top_k": 9, "top_p": 0.7}),
    ],
)
def test_frequencies_are_those_of_the_softmax(seed: int, fields: dict[str, float]) -> None:
    logits, count = random_logits(24), 6000
    counts = draw(logits, count, seed=seed, **fields)
    expected = kept(logits, **fields)
    assert set(counts) <= set(expected)
    common = [token for token, share in expected.items() if share * count >= 5]
    rare = [token for token in expected if token not in common]
    seen = [counts[token] for token in common]
    means = [expected[token] * count for token in common]
    if rare:
        seen.append(sum(counts[token] for token in rare))
        means.append(max(1.0, sum(expected[token] for token in rare) * count))
    assert chi_square(seen, means) < chi_square_limit(len(seen) - 1)


FILTERS = [
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.3},
    {"top_p": 1e-9},
    {"top_p": 0.999},
    {"top_k": 5, "top_p": 0.6},
    {"top_k": 40, "top_p": 0.5, "temperature": 2.0},
    {"top_k": 64},
    {"top_k": 63},
    {"top_k": 1000},
]


@pytest.mark.parametrize("fields", FILTERS)
@pytest.mark.parametrize("kind", ["distinct", "ties"])
def test_exactly_the_tokens_of_the_definition_can_be_drawn(fields: dict[str, float], kind: str) -> None:
    logits = random_logits(64, seed=3, scale=1.0)
    if kind == "ties":
        logits = (logits * 2).round() / 2
    expected = kept(logits, **fields)
    counts = draw(logits, 2000, seed=1, **fields)
    assert set(counts) <= set(expected)
    # Of 2000 draws a token with a share of 1 % is missing with a chance below 1e-8.
    assert {token for token, share in expected.items() if share > 0.01} <= set(counts)


def test_equal_logits_at_the_edge_stay_together() -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, 2.0, 2.0, 0.0])
    assert set(draw(logits, 300, top_k=2)) == {1, 2, 3, 4}
    assert set(draw(logits, 300, top_p=0.5)) == {1, 2, 3, 4}  # e^3 / total is 0.45
    assert set(draw(logits, 300, top_p=0.4)) == {1}


LARGE = 2600
DRAWS = 400


@pytest.mark.parametrize(
    "fields",
    [
        {"top_k": 1023},
        {"top_k": 1024},
        {"top_k": 1025},
        {"top_k": 2599},
        {"top_p": 0.5},
        {"top_k": 1500, "top_p": 0.9},
        {"top_k": 1500, "top_p": 0.3},
        {"top_k": 600, "top_p": 0.999999},
        {"top_k": LARGE + 7},
        {"top_p": 0.9999},
    ],
)
def test_beyond_the_shortlist(fields: dict[str, float]) -> None:
    """An almost flat row, where 1024 tokens hold two fifths of the mass: the edge of what is kept lies exactly."""
    logits = random_logits(LARGE, scale=0.01)
    expected = kept(logits, **fields)
    counts = draw(logits, DRAWS, seed=2, **fields)
    assert set(counts) <= set(expected)
    # The smallest kept tokens do occur: each tenth of the kept tokens, in order of size, has its share.
    ranked = sorted(expected, key=lambda token: float(logits[token]))
    tenths = [sum(counts[int(token)] for token in part) for part in np.array_split(ranked, 10)]
    means = [DRAWS * sum(expected[int(token)] for token in part) for part in np.array_split(ranked, 10)]
    assert chi_square(tenths, means) < chi_square_limit(9)


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    logits = torch.tensor([[3e38, -3e38, 0.0], [1.0, 1.0, 0.5], [-1e4, -1e4 - 1, -2e4]])
    for temperature in (1e-6, 1e-300):
        tokens = [sample(logits, [params(temperature=temperature, seed=seed)] * 3, [0, 1, 2]) for seed in range(40)]
        assert {row[0] for row in tokens} == {0} and {row[2] for row in tokens} == {0}
        assert {row[1] for row in tokens} == {0, 1}


def test_company_does_not_change_a_row() -> None:
    """Rows of every kind, alone and in many arrangements: the token is the same."""
    kinds = [
        params(temperature=0),
        params(seed=1),
        params(seed=1, temperature=0.3),
        params(seed=2, top_k=5),
        params(seed=3, top_p=0.5),
        params(seed=4, top_k=1200, top_p=0.999),
        params(seed=5, temperature=2.0, top_p=0.99999),
    ]
    rows = [(random_logits(3001, seed=i), kinds[i % len(kinds)], 10 * i) for i in range(21)]

    def tokens(indices: Sequence[int]) -> list[int]:
        logits = torch.stack([rows[i][0] for i in indices])
        return sample(logits, [rows[i][1] for i in indices], [rows[i][2] for i in indices])

    alone = [tokens([i])[0] for i in range(len(rows))]
    generator = np.random.default_rng(0)
    for _ in range(20):
        indices = generator.permutation(len(rows))[: generator.integers(1, len(rows) + 1)].tolist()
        assert tokens(indices) == [alone[i] for i in indices]
    assert len(set(alone)) > 15


def test_a_token_depends_on_seed_and_position_alone() -> None:
    logits = random_logits(500)
    first = sample(logits.expand(40, -1), [params(seed=9)] * 40, range(40))
    again = [sample(logits[None], [params(seed=9)], [position])[0] for position in range(40)]
    other = sample(logits.expand(40, -1), [params(seed=10)] * 40, range(40))
    assert first == again
    assert sum(a == b for a, b in zip(first, other, strict=True)) < 10


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("fields", [{}, {"temperature": 0}, {"top_k": 5}, {"top_p": 0.9}])
def test_logits_that_are_not_finite_give_no_token_and_leave_others_alone(
    value: float, fields: dict[str, float]
) -> None:
    """As where a model overflows in fp16. A single -inf is a token that is never taken."""
    sound = random_logits(300)
    rows = torch.stack(
        [sound, torch.full((300,), value), torch.where(torch.arange(300) == int(sound.argmin()), value, sound)]
    )
    tokens = sample(rows, [params(seed=1, **fields)] * 3, [4, 4, 4])
    assert tokens[0] == sample(sound[None], [params(seed=1, **fields)], [4])[0]
    assert tokens[1] is None
    assert tokens[2] == (sample(sound[None], [params(seed=1, **fields)], [4])[0] if value == -math.inf else None)


@pytest.mark.parametrize(("extreme", "token"), [(0.0, 3), (1 - 2**-32, 5)])
def test_the_ends_of_the_range_draw_tokens_that_are_kept(
    monkeypatch: pytest.MonkeyPatch, extreme: float, token: int
) -> None:
    monkeypatch.setattr("engine.sampler.uniform", lambda seed, position: extreme)
    logits = torch.tensor([[0.0, 1.0, 0.0, 5.0, 1.0, 5.0, 0.0]])
    assert sample(logits, [params(top_k=2)], [0]) == [token]
