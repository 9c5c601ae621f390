"""Codebooks against exhaustive search, and KVQuant's arithmetic by hand."""

import itertools

import numpy as np
import pytest

from engine.study.codebooks import NUM_BINS, Histogram, cluster_means, fit


def least_error(points: np.ndarray, weights: np.ndarray, size: int) -> float:
    """Of all ways to cut sorted points into `size` runs."""
    best = np.inf
    for cuts in itertools.combinations(range(1, len(points)), size - 1):
        error = 0.0
        for run, weight in zip(np.split(points, cuts), np.split(weights, cuts), strict=True):
            error += (weight * (run - np.average(run, weights=weight)) ** 2).sum()
        best = min(best, error)
    return best


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_clusters_are_the_best_there_are(seed: int, size: int) -> None:
    generator = np.random.default_rng(seed)
    points = np.sort(generator.uniform(-1, 1, 11))
    weights = generator.exponential(size=11)
    means = cluster_means(weights, points, weights * points**2, [size])[size]
    assert len(means) == size
    error = (weights * np.abs(points[:, None] - means).min(1) ** 2).sum()
    assert error == pytest.approx(least_error(points, weights, size), rel=1e-9)


def filled(points: list[float], weights: list[float]) -> Histogram:
    histogram = Histogram()
    for point, weight in zip(points, weights, strict=True):
        histogram.add(np.array([point], np.float32), np.array([weight], np.float32))
    return histogram


def test_weights_decide() -> None:
    """Four clusters of two points each; in each the heavy point draws the value."""
    centres = [-0.875, -0.25, 0.25, 0.875]
    points = [x + d for x in centres for d in (-0.0625, 0.0625)]
    table = fit(filled(points, [3.0, 1.0] * 4), [3, 2])[2]
    # the mean of -1/16 and +1/16 weighing 3 and 1 is -1/32; then Q-Norm, by hand
    lut = np.array(centres) - 1 / 32
    decoded = np.repeat(lut, 2)
    ratio = np.std(points) / np.std(decoded)
    expected = lut * ratio + (np.mean(points) - np.mean(decoded) * ratio)
    assert table.values == pytest.approx(expected, abs=1e-3)
    assert table.bounds == pytest.approx((lut[1:] + lut[:-1]) / 2, abs=1e-3)


def test_q_norm_keeps_mean_and_spread() -> None:
    numbers = np.random.default_rng(1).normal(0.1, 0.3, 20000).clip(-1, 1).astype(np.float32)
    histogram = Histogram()
    histogram.add(numbers, np.ones_like(numbers))
    table = fit(histogram, [2])[2]
    decoded = np.array(table.values)[np.searchsorted(table.bounds, numbers)]
    assert decoded.mean() == pytest.approx(numbers.mean(), abs=3e-3)
    assert decoded.std() == pytest.approx(numbers.std(), abs=3e-3)


def test_more_codes_lose_less() -> None:
    numbers = np.random.default_rng(2).normal(0, 0.3, 5000).clip(-1, 1).astype(np.float32)
    histogram = Histogram()
    histogram.add(numbers, np.ones_like(numbers))
    tables = fit(histogram, [4, 3])
    errors = {}
    for bits, table in tables.items():
        decoded = np.array(table.values)[np.searchsorted(table.bounds, numbers)]
        errors[bits] = ((decoded - numbers) ** 2).mean()
        uniform = np.round((numbers + 1) / 2 * table.max_code) / table.max_code * 2 - 1
        assert errors[bits] < ((uniform - numbers) ** 2).mean()
    assert errors[4] < errors[3] / 2


@pytest.mark.parametrize("points", [[0.5], [-1.0, 1.0], [0.0] * 5])
def test_few_numbers_still_give_a_whole_ascending_table(points: list[float]) -> None:
    for bits, table in fit(filled(points, [1.0] * len(points)), [4, 3, 2]).items():
        assert len(table.values) == 1 << bits and len(table.bounds) == (1 << bits) - 1
        assert (np.diff(table.values) > 0).all() and (np.diff(table.bounds) > 0).all()
        assert all(float(np.float16(value)) == value for value in table.values)


def test_numbers_without_weight_count_alike() -> None:
    weighed, plain = filled([-0.5, 0.1, 0.7], [0.0] * 3), filled([-0.5, 0.1, 0.7], [1.0] * 3)
    assert fit(weighed, [3]) == fit(plain, [3])


def test_a_bin_is_narrow() -> None:
    histogram = filled([0.3, 0.3 + 1e-4], [1.0, 1.0])
    weight, mean, _ = histogram.weighted
    assert weight.tolist() == [2.0] and abs(mean[0] - 0.30005) < 2 / NUM_BINS
