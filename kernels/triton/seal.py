"""Full pages into records, from slots or from a chunk's activations.

Channel c of token t, KV head h and layer l of page number i of a call lies `first[i] · page_stride + l · layer_stride +
h · head_stride + t · token_stride + c` numbers behind the pointer to K or V. It goes to page `pages[i]`.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.format.layout import PageLayout
from kernels.triton.encode import NO_ROW, to_float, to_half
from kernels.triton.quantize import Side, seal_head
from kernels.triton.spec import LayerSpec, layer_spec
from kernels.triton.tiling import MAX_REGISTERS

NORM_TOKENS = 16  # of a program: more programs hide that each waits for its loads
CHANNEL_BLOCK = 64  # that a sum over a page takes at a time
NUMBERS_A_WARP = 1024  # of a tile: 32 a thread


@triton.jit
def page_places(first, pages, first_step, pages_step, layers, sealed, page_bytes, page_stride, layer_stride):
    """Of the page and layer of this program: where its numbers begin, and the layer's first byte in the record."""
    page = tl.program_id(0)
    number = tl.load(layers + 2 * tl.program_id(1))
    start = tl.multiple_of(tl.load(layers + 2 * tl.program_id(1) + 1), 16)
    offset = tl.load(first + page * first_step) * page_stride + number * layer_stride
    return offset, sealed + tl.load(pages + page * pages_step) * page_bytes + start


@triton.jit
def norms_kernel(
    k,
    first,
    pages,
    first_step,
    pages_step,
    layers,
    sealed,
    page_bytes,
    page_stride,
    layer_stride,
    head_stride,
    token_stride,
    layer: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Norms of K over all heads. The sum does not depend on how threads share a tile: squares are summed over heads in
    order, and what is left in fp64."""
    offset, record = page_places(
        first, pages, first_step, pages_step, layers, sealed, page_bytes, page_stride, layer_stride
    )
    D: tl.constexpr = layer.head_dim
    tokens = tl.program_id(2) * TOKENS + tl.arange(0, TOKENS)
    places = k + offset + tokens.to(tl.int64)[:, None] * token_stride + tl.arange(0, D)[None, :]
    total = tl.zeros((TOKENS, D), tl.float32)
    for _ in range(layer.num_kv_heads):
        x = to_float(tl.load(places))
        total += x * x
        places += head_stride
    norm = to_half(tl.sqrt_rn(tl.sum(total.to(tl.float64), 1).to(tl.float32)))
    tl.store((record + layer.k_norm).to(tl.pointer_type(tl.float16)) + tokens, norm)


@triton.jit
def rows_kernel(
    v,
    marks,
    first,
    pages,
    first_step,
    pages_step,
    layers,
    sealed,
    page_bytes,
    page_stride,
    layer_stride,
    head_stride,
    token_stride,
    layer: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    """Which tokens keep their rows in 16 bit. marks: bool [pages, P]."""
    offset, record = page_places(
        first, pages, first_step, pages_step, layers, sealed, page_bytes, page_stride, layer_stride
    )
    P: tl.constexpr = layer.page_tokens
    tokens = tl.arange(0, P)
    if layer.keeps_largest:
        places = v + offset + tokens.to(tl.int64)[:, None] * token_stride + tl.arange(0, CHANNELS)[None, :]
        total = tl.zeros((P, CHANNELS), tl.float64)
        for _ in range(layer.num_kv_heads):
            for channel in range(0, layer.head_dim, CHANNELS):
                x = to_float(tl.load(places + channel)).to(tl.float64)
                total += x * x
            places += head_stride
        rank = tl.sum(total, 1)
    else:
        is_marked = tl.load(marks + tl.program_id(0).to(tl.int64) * P + tokens)
        rank = is_marked.to(tl.float64)
    # the largest first, of equals the first; without a mark none
    for index in range(layer.num_rows):
        largest = tl.max(rank, 0)
        place = tl.min(tl.where(rank == largest, tokens, NO_ROW), 0)
        if not layer.keeps_largest:
            place = tl.where(largest > 0, place, NO_ROW)
        tl.store(record + layer.row_places + index, place.to(tl.uint8))
        rank = tl.where(tokens == place, -1.0, rank)


@triton.jit
def quantize_kernel(
    k,
    v,
    first,
    pages,
    first_step,
    pages_step,
    layers,
    sealed,
    page_bytes,
    k_page_stride,
    k_layer_stride,
    k_head_stride,
    k_token_stride,
    v_page_stride,
    v_layer_stride,
    v_head_stride,
    v_token_stride,
    K: tl.constexpr,
    V: tl.constexpr,
):
    """K or V of one head, by the norms and kept rows that are in the record."""
    HEADS: tl.constexpr = K.layer.num_kv_heads
    head = tl.program_id(2).to(tl.int64)
    if head < HEADS:
        offset, record = page_places(
            first, pages, first_step, pages_step, layers, sealed, page_bytes, k_page_stride, k_layer_stride
        )
        seal_head(k + offset + head * k_head_stride, k_token_stride, record, head, K)
    else:
        offset, record = page_places(
            first, pages, first_step, pages_step, layers, sealed, page_bytes, v_page_stride, v_layer_stride
        )
        seal_head(v + offset + (head - HEADS) * v_head_stride, v_token_stride, record, head - HEADS, V)


@dataclass(frozen=True, slots=True)
class Source:
    """K or V where it lies; see the top."""

    tensor: Tensor
    page_stride: int
    layer_stride: int
    head_stride: int
    token_stride: int

    @classmethod
    def slots(cls, tensor: Tensor) -> "Source":
        """[slots, layers, kv_heads, P, D]; `first` are slots."""
        return cls(tensor, *tensor.stride()[:4])

    @classmethod
    def rows(cls, tensor: Tensor) -> "Source":
        """[rows, kv_heads, D] of one layer; `first` are rows. Raises ValueError where channels are not adjacent."""
        row, head, channel = tensor.stride()
        if channel != 1:
            raise ValueError(f"channels of K or V are {channel} numbers apart; the kernels read adjacent ones")
        return cls(tensor, row, 0, head, row)

    @property
    def strides(self) -> tuple[int, int, int, int]:
        return self.page_stride, self.layer_stride, self.head_stride, self.token_stride


class LayersSealer:
    """The kernels for layers that share a spec. `layers`: int64 [n, 2], the number of each and where in a record it
    begins."""

    def __init__(self, spec: LayerSpec, layers: Tensor, sealed: Tensor):
        self._spec = spec
        self._layers = layers
        self._sealed = sealed
        self._sides = Side(spec, is_key=True), Side(spec, is_key=False)

    def seal(self, k: Source, v: Source, first: Tensor, pages: Tensor, marks: Tensor) -> None:
        spec, grid = self._spec, (len(pages), len(self._layers))
        where = (first, pages, first.stride(0), pages.stride(0), self._layers, self._sealed, self._sealed.stride(0))
        if spec.has_norm:
            parts = spec.page_tokens // NORM_TOKENS
            norms_kernel[*grid, parts](k.tensor, *where, *k.strides, spec, NORM_TOKENS, enable_fp_fusion=False)
        if spec.num_rows:
            warps = spec.page_tokens * CHANNEL_BLOCK // NUMBERS_A_WARP
            rows_kernel[grid](v.tensor, marks, *where, *v.strides, spec, CHANNEL_BLOCK, num_warps=warps)
        quantize_kernel[*grid, 2 * spec.num_kv_heads](
            *(k.tensor, v.tensor, *where, *k.strides, *v.strides, *self._sides),
            num_warps=self._sides[0].tile_numbers // NUMBERS_A_WARP,
            maxnreg=MAX_REGISTERS,
            enable_fp_fusion=False,
        )


class Sealer:
    """Writes full pages into records. `pages`: int64 [n], where each goes; `marks`: bool [n, P], contiguous,
    the tokens that a sink rule marks. A kernel reads what the one before it wrote, so all are in one stream."""

    def __init__(self, layout: PageLayout, sealed: Tensor):
        def sealer(spec: LayerSpec, layers: list[int]) -> LayersSealer:
            places = [(layer, layout.layers[layer].span[0]) for layer in layers]
            return LayersSealer(spec, torch.tensor(places, dtype=torch.int64, device=sealed.device), sealed)

        by_spec: dict[LayerSpec, list[int]] = {}
        for layer in range(len(layout.layers)):
            by_spec.setdefault(layer_spec(layout, layer), []).append(layer)
        self._by_spec = [sealer(spec, layers) for spec, layers in by_spec.items()]
        self._by_layer = {layer: sealer(spec, [layer]) for spec, layers in by_spec.items() for layer in layers}

    def seal_slots(self, open_pool: Tensor, slots: Tensor, pages: Tensor, marks: Tensor) -> None:
        """All layers of full `slots`, int64 [n], of [num_slots, layers, 2, kv_heads, P, D]."""
        if len(pages):
            k, v = (Source.slots(open_pool[:, :, side]) for side in (0, 1))
            for layers in self._by_spec:
                layers.seal(k, v, slots, pages, marks)

    def seal_rows(self, layer: int, k: Tensor, v: Tensor, rows: Tensor, pages: Tensor, marks: Tensor) -> None:
        """One layer, from activations [rows, kv_heads, D]. `rows`: int64 [n], the first of each page."""
        if len(pages):
            self._by_layer[layer].seal(Source.rows(k), Source.rows(v), rows, pages, marks)
