"""How a kernel of attention cuts pages into tiles: one value, passed as `tl.constexpr`. What was tried: docs/log.md."""

from dataclasses import dataclass

from kernels.triton.spec import LayerSpec

SMALLEST_TILE = 16  # rows of a product
FEWEST_QUERIES = 8  # columns of a product
MAX_REGISTERS = 255  # all that a thread can have: left to itself, the assembler spills to have more threads at once


@dataclass(frozen=True)
class Tiling:
    """`query_axis`: the axis of queries in tiles of logits and of the output. With 0 they are a product's rows. With 1
    keys and values are, which a thread then unpacks where the product needs them, and eight queries suffice.
    `key_parts`: parts of D that a tile of K comes in. `tokens`: of K or V that are dequantized at a time; `channels`:
    of V. `tokens_16bit`: of a page in 16 bit that are taken at a time. `num_stages`: of the loop over sealed pages.
    Kernels may read fields only: Triton's cache of compiled kernels does not know what a property is made of."""

    query_axis: int
    key_parts: int
    tokens: int
    channels: int
    tokens_16bit: int
    num_warps: int
    num_stages: int

    def num_queries(self, group: int) -> int:
        """That a program of decode has room for, of a padded `group`."""
        return max(group, FEWEST_QUERIES if self.query_axis == 1 else SMALLEST_TILE)


def decode_tiling(layer: LayerSpec) -> Tiling:
    """Few warps, since each repeats the work on logits."""
    if layer.before_rope:
        return _tiling(layer, query_axis=0, num_warps=4, num_stages=1)
    if layer.is_raw:
        is_large = layer.head_dim * layer.page_tokens > 128 * 64
        return _tiling(layer, query_axis=0, num_warps=4 if is_large else 2, num_stages=2 if is_large else 3)
    is_narrow = layer.head_dim == 64 and layer.k.planes == 4  # rows of 16 bytes are no work for two warps
    has_table = layer.k.is_table or layer.v.is_table
    # the page's id takes one of three, and not all have registers for as many
    is_tight = is_narrow or layer.k.bits == 3 or layer.head_dim > 128
    num_stages = 1 if has_table else 2 if is_tight else 3
    return _tiling(layer, query_axis=1, num_warps=1 if is_narrow else 2, num_stages=num_stages)


def most_prefill_rows(head_dim: int, *, is_turning: bool, is_invariant: bool) -> int:
    """(place, query) rows of a program. K that is turned when it is read takes registers; and a decode row that takes
    this path for the sake of equal bits has a tile of its own, mostly empty."""
    rows = 128 if head_dim <= 128 else 32
    return max(SMALLEST_TILE, rows // (4 if is_turning else 2 if is_invariant else 1))


def prefill_tiling(layer: LayerSpec) -> Tiling:
    return _tiling(layer, query_axis=0, num_warps=8, num_stages=2)


def _tiling(layer: LayerSpec, *, query_axis: int, num_warps: int, num_stages: int) -> Tiling:
    # Triton repeats loads of fewer parameters than threads wherever they are needed; larger ones it keeps in a layout
    # of their own, and moves the tile through shared memory to meet them
    parameters = 128 if query_axis == 1 and layer.k.has_words else 64 if layer.before_rope else 32
    planes = max(layer.k.planes, 2 if layer.before_rope else 1)
    is_small = max(planes, layer.v.planes) == 4 if query_axis == 1 else layer.head_dim > 128
    channels = layer.v.group_channels if layer.v.has_scale else layer.head_dim
    return Tiling(
        query_axis=query_axis,
        key_parts=max(planes, layer.head_dim // parameters) if layer.k.has_scale else planes,
        tokens=min(layer.page_tokens // layer.v.planes, 16 if is_small else 32),
        channels=min(layer.head_dim, max(channels, 32)),
        tokens_16bit=16 if layer.before_rope else 32,
        num_warps=num_warps,
        num_stages=num_stages,
    )
