"""What quantizing K or V by channel or by token does to attention, as KIVI compares it (arXiv 2402.02750, section 3.2),
but under the sealed-page rule: sink page and own page stay exact.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from engine.study.capture import PAGE_TOKENS, LayerTensors
from engine.study.distribution import Kind, rotate_head
from kernels.format.codec import Integer, Store, per_channel, per_token, raw
from kernels.format.layout import PageLayout
from kernels.format.recipe import LayerRecipe, Recipe
from kernels.torch_backend.stores import StoreView

BITS = (4, 2)
FEWEST_TOKENS = 3 * PAGE_TOKENS  # a sink page, a sealed page, and queries that read it
BLOCK_NUMBERS = 2**20  # weights of a block; larger ones are slower


class Axis(Enum):
    """Which numbers of a page share scale and zero: a channel's over its tokens, or a token's over a head."""

    CHANNEL = "channel"
    TOKEN = "token"

    def store(self, bits: int) -> Store:
        return per_channel(Integer(bits)) if self is Axis.CHANNEL else per_token(Integer(bits))


@dataclass(frozen=True, slots=True)
class Variant:
    """`bits`: asymmetric integers with fp16 parameters."""

    kind: Kind
    axis: Axis
    bits: int


VARIANTS = tuple(Variant(kind, axis, bits) for kind in Kind for axis in Axis for bits in BITS)


@dataclass(frozen=True, slots=True)
class AxisError:
    """Relative, as ||changed - exact|| / ||exact|| (Frobenius): of the sealed numbers, of the attention weights after
    softmax (K only), and of the attention outputs, both over the queries that read a sealed page."""

    numbers: float
    weights: float | None
    outputs: float


@dataclass(frozen=True, slots=True)
class AttentionStudy:
    """`received`: fp32 [tokens], the mean weight that a token gets from the measured queries in later pages, 0 where
    there are none."""

    errors: Mapping[Variant, AxisError]
    received: Tensor


def store_and_read(x: Tensor, store: Store) -> Tensor:
    """fp32 [tokens, kv_heads, D] as it comes back from sealed pages; the first page and a last one that is not full
    stay as they are."""
    end = len(x) // PAGE_TOKENS * PAGE_TOKENS
    pages = x[PAGE_TOKENS:end].unflatten(0, (-1, PAGE_TOKENS)).transpose(1, 2)
    # as V, whose codes are packed along tokens: they fill whole bytes whatever D is
    recipe = Recipe("study", (LayerRecipe(raw(), store),), PAGE_TOKENS, sink_pages=1)
    layout = PageLayout(recipe, num_kv_heads=x.shape[1], head_dim=x.shape[2], dtype="float32")
    records = torch.zeros(len(pages), layout.page_bytes, dtype=torch.uint8, device=x.device)
    view = StoreView(records, layout.layers[0].v, 0)
    view.write(pages, torch.arange(len(pages), device=x.device), None, is_key=False)
    return torch.cat((x[:PAGE_TOKENS], view.read(is_key=False).transpose(1, 2).flatten(0, 1), x[end:]))


def study_attention(tensors: LayerTensors) -> AttentionStudy:
    """All of `VARIANTS` on a window of at least `FEWEST_TOKENS`."""
    changes = {variant: _change(tensors, variant) for variant in VARIANTS}
    sums = dict.fromkeys(VARIANTS, (0.0, 0.0))
    weights_sum = outputs_sum = 0.0
    num_tokens, num_kv_heads, _ = tensors.k.shape
    received = torch.zeros(num_tokens, device=tensors.k.device)
    group = tensors.q.shape[1] // num_kv_heads
    rows = max(PAGE_TOKENS, BLOCK_NUMBERS // (num_tokens * tensors.q.shape[1]))
    for start in range(2 * PAGE_TOKENS, num_tokens, rows):
        block = _Block(tensors, start, min(start + rows, num_tokens), group)
        weights_sum += _energy(block.weights)
        outputs_sum += _energy(block.outputs)
        received[: block.end] += block.sealed_weights.sum((0, 1, 2))
        for variant, change in changes.items():
            weights, outputs = sums[variant]
            changed_weights, changed_outputs = (block.change_k if variant.kind.is_key else block.change_v)(change)
            sums[variant] = weights + changed_weights, outputs + changed_outputs
    errors = {}
    for variant, (weights, outputs) in sums.items():
        exact = tensors.k if variant.kind.is_key else tensors.v
        end = num_tokens // PAGE_TOKENS * PAGE_TOKENS
        errors[variant] = AxisError(
            _relative(_energy(changes[variant]), _energy(exact[PAGE_TOKENS:end])),
            _relative(weights, weights_sum) if variant.kind.is_key else None,
            _relative(outputs, outputs_sum),
        )
    next_pages = (torch.arange(num_tokens, device=received.device) // PAGE_TOKENS + 1) * PAGE_TOKENS
    num_queries = (num_tokens - next_pages.clamp(min=2 * PAGE_TOKENS)).clamp(min=1)
    return AttentionStudy(errors, (received / (num_queries * tensors.q.shape[1])).cpu())


def _change(tensors: LayerTensors, variant: Variant) -> Tensor:
    """Stored minus exact, in the space that attention reads: [tokens, kv_heads, D]."""
    kind = variant.kind
    stored = store_and_read(kind.read(tensors), variant.axis.store(variant.bits))
    if kind.is_rotated:
        stored = rotate_head(stored)
    elif kind is Kind.K_BEFORE_ROPE:
        stored = tensors.turn(stored)
    change = stored - (tensors.k if kind.is_key else tensors.v)
    change[:PAGE_TOKENS] = 0  # rotating there and back leaves rounding
    change[len(change) // PAGE_TOKENS * PAGE_TOKENS :] = 0
    return change


class _Block:
    """Exact attention of the queries from `start` to `end`: weights [kv_heads, group, queries, end], the same without
    each query's own page, and outputs [kv_heads, group, queries, D]."""

    def __init__(self, tensors: LayerTensors, start: int, end: int, group: int):
        self.end = end
        places = torch.arange(end, device=tensors.k.device)
        queries = places[start:].unsqueeze(1)
        self._is_own = queries // PAGE_TOKENS == places // PAGE_TOKENS
        q = tensors.q[start:end].unflatten(1, (-1, group)).permute(1, 2, 0, 3)
        self._q = q / math.sqrt(tensors.q.shape[-1])
        self._v = self._values(tensors.v)
        self._scores = self._product(tensors.k).masked_fill(places > queries, -math.inf)
        self.weights = self._scores.softmax(-1)
        self.sealed_weights = self.weights.masked_fill(self._is_own, 0.0)
        self.outputs = torch.matmul(self.weights, self._v)

    def _values(self, v: Tensor) -> Tensor:
        return v[: self.end].transpose(0, 1).unsqueeze(1)

    def _product(self, k: Tensor) -> Tensor:
        return torch.matmul(self._q, k[: self.end].permute(1, 2, 0).unsqueeze(1))

    def change_k(self, change: Tensor) -> tuple[float, float]:
        """Energy of the changes of weights and of outputs."""
        scores = self._scores + self._product(change).masked_fill_(self._is_own, 0.0)
        weights = scores.softmax(-1).sub_(self.weights)
        return _energy(weights), _energy(torch.matmul(weights, self._v))

    def change_v(self, change: Tensor) -> tuple[float, float]:
        return 0.0, _energy(torch.matmul(self.sealed_weights, self._values(change)))


def _energy(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _relative(changed: float, exact: float) -> float:
    return math.sqrt(changed / exact) if exact else 0.0
