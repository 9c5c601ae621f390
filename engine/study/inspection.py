"""What `quire inspect` finds in a model's K and V on one window of text."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.model.llama import Llama
from engine.study.axis_error import AttentionStudy, AxisError, Variant, study_attention
from engine.study.capture import LayerTensors, capture
from engine.study.distribution import Distribution, Kind
from engine.study.sinks import ResidualPeaks, Sink, find_sinks

Advance = Callable[[], None]
"""Called behind each layer."""


@dataclass(frozen=True, slots=True)
class LayerNorms:
    """Of each token, over all kv heads: fp32 [tokens]."""

    k: Tensor
    v: Tensor


@dataclass(frozen=True, slots=True)
class SinkAttention:
    """What the layers that a sink's residual peak enters make of it, mean over these layers. `k_norm` and `v_norm`: in
    units of the median token's. `received`: share of the attention of queries in later pages."""

    k_norm: float
    v_norm: float
    received: float


@dataclass(frozen=True, slots=True)
class Inspection:
    """`distributions`: by layer, then kind. `norms`, `peaks` and `attention` go by layer. `pictures`: fp32 magnitudes
    [tokens, D] of the chosen head in the chosen layers."""

    tokens: tuple[int, ...]
    layers: tuple[int, ...]
    head: int
    distributions: tuple[Distribution, ...]
    attention: tuple[AttentionStudy, ...]
    norms: tuple[LayerNorms, ...]
    peaks: tuple[ResidualPeaks, ...]
    pictures: dict[tuple[int, Kind], Tensor]
    sinks: tuple[Sink, ...]

    @property
    def num_layers(self) -> int:
        return len(self.norms)

    def distribution(self, layer: int, kind: Kind) -> Distribution:
        return next(found for found in self.distributions if (found.layer, found.kind) == (layer, kind))

    def error(self, layer: int, variant: Variant) -> AxisError:
        return self.attention[layer].errors[variant]

    def mean_output_error(self, variant: Variant) -> float:
        """Over all layers."""
        return sum(study.errors[variant].outputs for study in self.attention) / self.num_layers

    def sink_attention(self, sink: Sink) -> SinkAttention | None:
        """None if the peak is there behind the last layer alone, so that no attention sees it."""
        entered = [layer + 1 for layer in sink.layers if layer + 1 < self.num_layers]
        if not entered:
            return None
        rows = []
        for layer in entered:
            norms = self.norms[layer]
            ratios = (float(norm[sink.position] / norm.median()) for norm in (norms.k, norms.v))
            rows.append((*ratios, float(self.attention[layer].received[sink.position])))
        return SinkAttention(*(sum(column) / len(rows) for column in zip(*rows, strict=True)))


def inspect_window(
    model: Llama, tokens: Sequence[int], *, layers: Sequence[int], head: int, advance: Advance
) -> Inspection:
    """Measure all layers on one window of at least `axis_error.FEWEST_TOKENS`. Of `layers`, the KV head `head` is kept
    to be drawn. Raises StartupError where numbers are not finite."""
    inspector = _Inspector(tuple(layers), head, advance)
    capture(model, tokens, inspector)
    return Inspection(
        tuple(tokens),
        tuple(layers),
        head,
        tuple(inspector.distributions),
        tuple(inspector.attention),
        tuple(inspector.norms),
        tuple(inspector.peaks),
        inspector.pictures,
        find_sinks(inspector.peaks),
    )


class _Inspector:
    def __init__(self, layers: tuple[int, ...], head: int, advance: Advance):
        self._layers = layers
        self._head = head
        self._advance = advance
        self.distributions: list[Distribution] = []
        self.attention: list[AttentionStudy] = []
        self.norms: list[LayerNorms] = []
        self.peaks: list[ResidualPeaks] = []
        self.pictures: dict[tuple[int, Kind], Tensor] = {}

    def attended(self, tensors: LayerTensors) -> None:
        self.distributions += [Distribution.of(tensors, kind) for kind in Kind]
        self.attention.append(study_attention(tensors))
        k, v = (torch.linalg.vector_norm(x.flatten(1), dim=1).cpu() for x in (tensors.k, tensors.v))
        self.norms.append(LayerNorms(k, v))
        if tensors.layer in self._layers:
            for kind in Kind:
                self.pictures[tensors.layer, kind] = kind.read(tensors)[:, self._head].abs().cpu()

    def finished(self, layer: int, hidden: Tensor) -> None:
        self.peaks.append(ResidualPeaks.of(hidden))
        self._advance()
