"""Tokens whose residual stream is far larger than that of others: where attention sinks come from.

Massive activations appear behind one early layer, in the same few channels, at the tokens that later queries attend to
without need (arXiv 2402.17762; KVSink, arXiv 2508.04257).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SINK_RATIO = 10.0


@dataclass(frozen=True, slots=True)
class ResidualPeaks:
    """The largest magnitude of each token's residual stream behind one layer, fp32 [tokens], and its channel."""

    magnitude: Tensor
    channel: Tensor

    @classmethod
    def of(cls, hidden: Tensor) -> "ResidualPeaks":
        """Of fp32 [tokens, hidden]."""
        magnitude, channel = hidden.abs().max(dim=-1)
        return cls(magnitude.cpu(), channel.cpu())

    @property
    def ratio(self) -> Tensor:
        """Each token's peak in units of the median token's."""
        typical = self.magnitude.median()
        return self.magnitude / typical if typical > 0 else torch.zeros_like(self.magnitude)


@dataclass(frozen=True, slots=True)
class Sink:
    """A token of which the residual stream peaks at `SINK_RATIO` times the median token's or more behind each of
    `layers`, ascending: it emerges at the first. `channel` and `magnitude`: of its largest peak, `ratio` times the
    median token's there."""

    position: int
    layers: tuple[int, ...]
    channel: int
    magnitude: float
    ratio: float

    @property
    def layer(self) -> int:
        return self.layers[0]


def find_sinks(peaks: Sequence[ResidualPeaks]) -> tuple[Sink, ...]:
    """From the peaks behind each layer, in order of position."""
    ratios = torch.stack([layer.ratio for layer in peaks])  # [layers, tokens]
    is_large = ratios >= SINK_RATIO
    sinks = []
    for position in is_large.any(0).nonzero().flatten().tolist():
        layers = tuple(is_large[:, position].nonzero().flatten().tolist())
        highest = max(layers, key=lambda layer: float(peaks[layer].magnitude[position]))
        sinks.append(
            Sink(
                position,
                layers,
                channel=int(peaks[highest].channel[position]),
                magnitude=float(peaks[highest].magnitude[position]),
                ratio=float(ratios[highest, position]),
            )
        )
    return tuple(sinks)
