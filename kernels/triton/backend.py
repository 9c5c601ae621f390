"""The Triton backend: fused attention over sealed pages and slots on CUDA, in the interpreter on a CPU for tests."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import e, log2

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.backend import PoolTensors, rotary_for
from kernels.format.step import AttentionStep
from kernels.mass import mass_lists
from kernels.rope import Rotary
from kernels.transfer import to_device
from kernels.triton.append import append_kernel
from kernels.triton.decode import combine_kernel, decode_kernel
from kernels.triton.listing import RowListings
from kernels.triton.mass import mass_kernel
from kernels.triton.prefill import prefill_kernel
from kernels.triton.seal import Sealer
from kernels.triton.spec import LayerSpec, codebook_values, layer_spec, why_unsupported
from kernels.triton.tables import Geometry, StepTables, step_tables
from kernels.triton.tiling import MAX_REGISTERS, Tiling, decode_tiling, most_prefill_rows, prefill_tiling


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer: what its kernels are made for, and its memory. `records`: uint8 [pages, bytes from the layer's first
    on]; `k`, `v`: [slots, kv_heads, P, D]; `codebooks`: see `codebook_values`. `tile_dtype`: of what is multiplied."""

    spec: LayerSpec
    records: Tensor
    k: Tensor
    v: Tensor
    codebooks: Tensor
    tile_dtype: tl.dtype
    decode_tiling: Tiling
    prefill_tiling: Tiling


class TritonBackend:
    def __init__(self, pool: PoolTensors, rotary: Rotary | None, *, num_heads: int, is_invariant: bool = False):
        """Raises ValueError for a layout that `why_unsupported` names. `rotary` is needed where the recipe stores K
        before RoPE."""
        layout = pool.layout
        if reason := why_unsupported(layout, num_heads):
            raise ValueError(reason)
        self.name = "triton (batch-invariant)" if is_invariant else "triton"
        self.pool = pool
        self._rotary = rotary_for(layout, rotary)
        self._is_invariant = is_invariant
        self._device = pool.open.device
        self._scale = layout.head_dim**-0.5 * log2(e)
        self._model_dtype = getattr(tl, layout.dtype)
        group = num_heads // layout.num_kv_heads
        padded = triton.next_power_of_2(group)
        rows = most_prefill_rows(layout.head_dim, is_turning=self._rotary is not None, is_invariant=is_invariant)
        tile_tokens = min(layout.page_tokens, rows // padded)
        self._geometry = Geometry(layout.page_tokens, group, padded, tile_tokens)
        self._listings = RowListings()
        self._sealer = Sealer(layout, pool.sealed)
        self._layers = [self._parts(index) for index in range(len(layout.layers))]

    def _parts(self, layer: int) -> LayerParts:
        spec = layer_spec(self.pool.layout, layer, is_interpreted=triton.knobs.runtime.interpret)
        start, _ = self.pool.layout.layers[layer].span
        is_model = spec.is_raw or self._model_dtype == tl.float32
        k, v = self.pool.open[:, layer].unbind(1)
        dtype = self.pool.open.dtype if is_model else torch.float16
        codebooks = torch.tensor(codebook_values(self.pool.layout, layer), dtype=dtype, device=self._device)
        tile_dtype = self._model_dtype if is_model else tl.float16
        records, tilings = self.pool.sealed[:, start:], (decode_tiling(spec), prefill_tiling(spec))
        return LayerParts(spec, records, k, v, codebooks, tile_dtype, *tilings)

    def prepare(self, step: AttentionStep) -> StepTables:
        return step_tables(
            step, self._geometry, self._listings, self._rotary, self._device, is_invariant=self._is_invariant
        )

    def prepare_decode(self, step: AttentionStep) -> StepTables:
        """Of a step of decode rows that are not observed, over a recipe that `can_pad`: made larger, so that few sizes
        occur (`StepTables.size`). Rows that are added give zeros."""
        return step_tables(step, self._geometry, self._listings, None, self._device, is_invariant=False, is_padded=True)

    @property
    def can_pad(self) -> bool:
        """Whether a decode step's tables can be made larger and then overwritten by those of another."""
        return not self._is_invariant and self._rotary is None

    def mark(self, tables: StepTables, marks: Tensor) -> None:
        places = torch.arange(self._geometry.page_tokens, device=self._device)
        tables.seal_marks = marks[tables.seals[:, :1] + places]

    def append(self, layer: int, k: Tensor, v: Tensor, tables: StepTables) -> None:
        parts = self._layers[layer]
        spec = parts.spec
        if num_writes := len(tables.writes):
            append_kernel[num_writes, spec.num_kv_heads](
                k, v, tables.writes, parts.k, parts.v, *k.stride()[:2], *v.stride()[:2], parts.k.stride(0),
                P=spec.page_tokens, D=spec.head_dim,
            )  # fmt: skip
        if len(tables.seals):
            rows, pages = tables.seals.unbind(1)
            self._sealer.seal_rows(layer, k, v, rows, pages, tables.seal_marks)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, tables: StepTables) -> Tensor:
        parts = self._layers[layer]
        # rows of chunks may have padding behind them, which nobody writes; those of decode are all written
        make = torch.empty if tables.num_split_rows == len(q) else torch.zeros
        out = make(len(q), q.shape[1], q.shape[2], device=q.device)
        if tables.num_split_rows:
            self._decode(parts, q, out, tables)
        if len(tables.tiles):
            self._prefill(parts, q, k, v, out, tables)
        return out

    def _decode(self, parts: LayerParts, q: Tensor, out: Tensor, tables: StepTables) -> None:
        spec, tiling, group = parts.spec, parts.decode_tiling, self._geometry.group
        heads, num_splits, num_rows = spec.num_kv_heads, len(tables.splits), tables.num_split_rows
        has_mass = len(tables.mass.decode) > 0
        values, stats = (q.new_empty(num_splits, heads, group * n, dtype=torch.float32) for n in (spec.head_dim, 2))
        row_stats = q.new_empty(num_rows, heads, 2 * group, dtype=torch.float32)
        page_stats = q.new_empty(len(tables.pages) if has_mass else 0, heads, 2 * group, dtype=torch.float32)
        decode_kernel[num_splits, heads](
            q, tables.splits, tables.pages, tables.numbers, parts.records, parts.k, parts.v, parts.codebooks,
            tables.cos, tables.sin, values, stats, page_stats,
            *q.stride()[:2], parts.records.stride(0), parts.k.stride(0), self._scale,
            layer=spec, tiling=tiling, G=group, M=tiling.num_queries(self._geometry.padded_group),
            DTYPE=parts.tile_dtype, MODEL=self._model_dtype, HAS_MASS=has_mass, num_warps=tiling.num_warps,
            num_stages=tiling.num_stages, maxnreg=MAX_REGISTERS,
        )  # fmt: skip
        combine_kernel[num_rows, heads](
            values, stats, tables.first_split, out, row_stats, out.stride(0),
            H=heads, D=spec.head_dim, G=group, GROUP=self._geometry.padded_group,
        )  # fmt: skip
        if has_mass:
            self._add_mass(spec, page_stats, row_stats, tables.mass.decode, tables.mass.sums, group)

    def _prefill(self, parts: LayerParts, q: Tensor, k: Tensor, v: Tensor, out: Tensor, tables: StepTables) -> None:
        spec, tiling, geometry = parts.spec, parts.prefill_tiling, self._geometry
        heads, rows = spec.num_kv_heads, geometry.tile_tokens * geometry.padded_group
        has_mass = tables.mass.num_stats > 0
        page_stats = q.new_empty(tables.mass.num_stats, heads, 2 * rows, dtype=torch.float32)
        tile_stats = q.new_empty(len(tables.tiles) if has_mass else 0, heads, 2 * rows, dtype=torch.float32)
        for in_slot, part in ((True, slice(0, tables.num_slot_tiles)), (False, slice(tables.num_slot_tiles, None))):
            if num_tiles := len(tables.tiles[part]):
                prefill_kernel[num_tiles, heads](
                    q, k, v, tables.tiles[part], tables.pages, tables.numbers, parts.records, parts.k, parts.v,
                    parts.codebooks, tables.cos, tables.sin, out, page_stats, tile_stats[part], *q.stride()[:2],
                    *k.stride()[:2], *v.stride()[:2], out.stride(0), parts.records.stride(0), parts.k.stride(0),
                    self._scale,
                    layer=spec, tiling=tiling, G=geometry.group, GROUP=geometry.padded_group,
                    TOKENS=geometry.tile_tokens, DTYPE=parts.tile_dtype, MODEL=self._model_dtype,
                    OWN_IN_SLOT=in_slot, HAS_MASS=has_mass,
                    num_warps=tiling.num_warps, num_stages=tiling.num_stages,
                )  # fmt: skip
        if has_mass:
            self._add_mass(spec, page_stats, tile_stats, tables.mass.tiles, tables.mass.sums, rows)

    def _add_mass(
        self, spec: LayerSpec, page_stats: Tensor, row_stats: Tensor, entries: Tensor, sums: Tensor, rows: int
    ) -> None:
        mass_kernel[(len(entries),)](
            page_stats, row_stats, entries, sums,
            H=spec.num_kv_heads, R=rows, ROWS=triton.next_power_of_2(rows), G=self._geometry.group,
        )  # fmt: skip

    def mass(self, tables: StepTables) -> list[list[float]]:
        return mass_lists(tables.mass.sums, tables.mass.counts)

    def seal(self, slots: Sequence[int], pages: Sequence[int], marks: Sequence[Sequence[int]] = ()) -> None:
        # two tensors, since kernels are compiled for what begins at multiples of 16 bytes
        first, targets = (to_device(list(ids), torch.int64, self._device) for ids in (slots, pages))
        self._sealer.seal_slots(self.pool.open, first, targets, self.pool.mark_table(marks, len(pages)))

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.pool.copy_slots(sources, targets)
