"""Confidence intervals of a mean over a few paired windows. No torch."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean and the bounds of its confidence interval; None where one value gives no spread."""

    mean: float
    low: float | None
    high: float | None


def paired_loss(reference: Sequence[float], other: Sequence[float], confidence: float = 0.95) -> Interval:
    """How much larger the perplexity of `other` is, in percent, from the mean log-likelihoods (nats a token) of each
    window. Student's t over the differences of the windows, whose common difficulty cancels."""
    losses = [ours - theirs for ours, theirs in zip(reference, other, strict=True)]
    mean = fmean(losses)
    if len(losses) == 1:
        return Interval(_percent(mean), None, None)
    reach = student_t((1 + confidence) / 2, len(losses) - 1) * stdev(losses) / math.sqrt(len(losses))
    return Interval(_percent(mean), _percent(mean - reach), _percent(mean + reach))


def student_t(probability: float, degrees: int) -> float:
    """The quantile of Student's t distribution, for probabilities above one half, by bisection."""
    low, high = 0.0, math.pi / 2
    target = 2 * probability - 1
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _central_probability(middle, degrees) < target else (low, middle)
    return math.sqrt(degrees) * math.tan(low)


def _central_probability(angle: float, degrees: int) -> float:
    """P(|t| < sqrt(degrees) * tan(angle)): the finite series of Abramowitz and Stegun, 26.7.3 and 26.7.4."""
    cosine, sine = math.cos(angle), math.sin(angle)
    is_odd = degrees % 2
    term, total = (cosine if is_odd else 1.0), 0.0
    for index in range(degrees // 2):
        total += term
        step = 2 * index + 1 + is_odd
        term *= cosine * cosine * step / (step + 1)
    return 2 / math.pi * (angle + sine * total) if is_odd else sine * total


def _percent(loss: float) -> float:
    return 100 * math.expm1(loss)
