"""How much a layer's attention, and the loss, mind that K or V is stored in a certain way.

Under the sealed-page rule: a query reads its own page and the sink pages exactly, all others as stored. Only one of K
and V of one layer is changed at a time; what two changes do together is taken for the sum.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.study.dense import LayerTrace
from engine.study.forms import Option
from engine.study.sealed import WindowPages

QUERY_STEP = 4


@dataclass(frozen=True, slots=True)
class Damage:
    """`output_error`: squared error of attention outputs, in units of their squares. `loss`: half the mean square of
    what the error does to the loss to first order, gradient times error: with the empirical Fisher information in place
    of the second derivative, this is how far the prediction of a token moves (KL divergence, nats)."""

    output_error: float
    loss: float


@dataclass(slots=True)
class _Sums:
    error: float = 0.0
    size: float = 0.0
    loss: float = 0.0
    num_queries: int = 0


class Sensitivity:
    """Sums over the windows of one layer."""

    def __init__(self, page_tokens: int, sink_pages: int):
        self._page_tokens = page_tokens
        self._num_sink_tokens = page_tokens * sink_pages
        self._sums: dict[Option, _Sums] = {}
        self.qaq = QaqBits()

    def add(self, trace: LayerTrace, pages: WindowPages, options: Sequence[Option]) -> None:
        """Measure `options` on a window. Of its queries every fourth is looked at, from the first sealed page on."""
        size = self._page_tokens
        places = torch.arange(self._num_sink_tokens + size, len(trace.q), QUERY_STEP, device=trace.q.device)
        keys = torch.arange(len(trace.k), device=trace.q.device)
        is_past = keys <= places[:, None]
        is_sealed = (keys >= self._num_sink_tokens) & (keys // size < places[:, None] // size)
        exact_k = pages.turned(trace.k)
        stored = {option: pages.read_back(option.layer) for option in options}
        errors = {option: torch.zeros_like(trace.mixed[places]) for option in options}
        group = trace.q.shape[1] // trace.k.shape[1]
        for head in range(trace.k.shape[1]):
            mine = slice(head * group, (head + 1) * group)
            q = trace.q[places, mine].transpose(0, 1) / math.sqrt(trace.q.shape[2])
            k, v = exact_k[:, head], trace.v[:, head]
            logits = (q @ k.T).masked_fill_(~is_past, -math.inf)
            weights = logits.softmax(-1)
            exact = weights @ v
            sealed_weights = weights * is_sealed
            for option, (new_k, new_v) in stored.items():
                if option.form.is_key:
                    change = (q @ (new_k[:, head] - k).T).mul_(is_sealed).add_(logits)
                    error = change.softmax(-1) @ v - exact
                else:
                    error = sealed_weights @ (new_v[:, head] - v)
                errors[option][:, mine] = error.transpose(0, 1)
        for option, error in errors.items():
            sums = self._sums.setdefault(option, _Sums())
            sums.error += error.square().sum().item()
            sums.size += trace.mixed[places].square().sum().item()
            sums.loss += (error * trace.mixed_grad[places]).sum((1, 2)).square().sum().item() / 2
            sums.num_queries += len(places)
        self.qaq.add(trace, exact_k, places, is_past)

    def damages(self) -> dict[Option, Damage]:
        return {
            option: Damage(sums.error / max(sums.size, 1e-300), sums.loss / sums.num_queries)
            for option, sums in self._sums.items()
        }


class QaqBits:
    """Bits that QAQ's formulas (arXiv 2403.04643) ask of K and of V, as a mean over tokens. They are per token and a
    page has one width, so they are told beside the measured damage and decide nothing."""

    OUTPUT_ERROR = 0.1
    WEIGHT_ERROR = 0.01
    QUANTILE = 0.9

    def __init__(self) -> None:
        self._k: list[float] = []
        self._v: list[float] = []

    def add(self, trace: LayerTrace, k: Tensor, places: Tensor, is_past: Tensor) -> None:
        count, group = len(k), trace.q.shape[1] // k.shape[1]
        output_spread = trace.mixed[places].std().item() * self.OUTPUT_ERROR
        for head in range(k.shape[1]):
            q = trace.q[places, head * group : (head + 1) * group].transpose(0, 1)
            weights = (q @ k[:, head].T / math.sqrt(q.shape[-1])).masked_fill_(~is_past, -math.inf).softmax(-1)
            largest = weights.amax((0, 1)).clamp(min=1e-6)
            v_error = output_spread / (math.sqrt(count) * largest)
            q_bound = torch.quantile(q.square().sum(-1).flatten(), self.QUANTILE).item() / q.shape[-1]
            k_error = math.sqrt(math.log1p(count**3 / (count - 1) * (self.WEIGHT_ERROR / count) ** 2) / q_bound)
            for found, x, error in (
                (self._k, k[:, head], torch.full_like(largest, k_error)),
                (self._v, trace.v[:, head], v_error),
            ):
                spread = x.amax(-1) - x.amin(-1)
                found.append((spread / (2 * math.sqrt(3) * error)).log2().ceil().clamp(0, 16).mean().item())

    @property
    def k(self) -> float:
        return sum(self._k) / len(self._k)

    @property
    def v(self) -> float:
        return sum(self._v) / len(self._v)
