"""The vectorised torch backend: any device, any head size, and the fallback where no other backend fits."""

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from kernels.backend import PoolTensors, rotary_for
from kernels.format.step import AttentionStep
from kernels.mass import mass_lists
from kernels.rope import Rotary
from kernels.torch_backend.mass import ChunkMass
from kernels.torch_backend.pages import LayerPages, Turns
from kernels.torch_backend.softmax import Observe, Partial
from kernels.torch_backend.tables import ChunkTables, DecodeTables, StepTables, step_tables
from kernels.transfer import to_device

BLOCK_ELEMENTS = 2**20  # fp32 numbers of K that decode unpacks at a time: 4 MiB


class TorchBackend:
    name = "torch"

    def __init__(self, pool: PoolTensors, rotary: Rotary | None = None):
        """`rotary` is needed where the recipe stores K before RoPE."""
        self.pool = pool
        self._rotary = rotary_for(pool.layout, rotary)
        self._device = pool.open.device
        self._page_tokens = pool.layout.page_tokens
        self._scale = pool.layout.head_dim**-0.5
        page_elements = pool.layout.num_kv_heads * pool.layout.page_tokens * pool.layout.head_dim
        self._block_pages = max(1, BLOCK_ELEMENTS // page_elements)
        self._layers = [LayerPages(pool, index) for index in range(len(pool.layout.layers))]

    def prepare(self, step: AttentionStep) -> StepTables:
        return step_tables(step, self._page_tokens, self._device, self._rotary)

    def mark(self, tables: StepTables, marks: Tensor) -> None:
        tables.marks = marks[: tables.num_rows]

    def append(self, layer: int, k: Tensor, v: Tensor, tables: StepTables) -> None:
        pages = self._layers[layer]
        if count := len(tables.own_slots):
            where = (tables.own_slots, slice(None), tables.own_offsets)
            pages.open_k[where], pages.open_v[where] = k[:count], v[:count]
        for row, count, slot in tables.slot_writes:
            pages.open_k[slot, :, :count] = k[row : row + count].transpose(0, 1)
            pages.open_v[slot, :, :count] = v[row : row + count].transpose(0, 1)
        if tables.seal_pages.numel():
            tile_k, tile_v = (x[tables.seal_rows].transpose(1, 2).contiguous() for x in (k, v))
            pages.seal(tile_k, tile_v, tables.seal_pages, tables.marks[tables.seal_rows])

    def seal(self, slots: Sequence[int], pages: Sequence[int], marks: Sequence[Sequence[int]] = ()) -> None:
        index, targets = to_device([list(slots), list(pages)], torch.int64, self._device)
        marked = self.pool.mark_table(marks, len(pages))
        for layer in self._layers:
            layer.seal(layer.open_k[index], layer.open_v[index], targets, marked)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.pool.copy_slots(sources, targets)

    def mass(self, tables: StepTables) -> list[list[float]]:
        return mass_lists(tables.mass.sums, tables.mass.counts)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, tables: StepTables) -> Tensor:
        pages = self._layers[layer]
        parts: list[Tensor] = []
        if tables.decode is not None:
            grouped = self._grouped(q[: tables.decode.num_rows])
            if pages.attends_in_16bit:
                out = self._decode_16bit(pages, grouped, tables.decode)
            else:
                out = self._decode(pages, grouped, tables.decode, tables.turns)
            parts.append(out.flatten(1, 2))
        return self._with_chunks(parts, pages, q, k, v, tables)

    def _with_chunks(
        self, parts: list[Tensor], pages: LayerPages, q: Tensor, k: Tensor, v: Tensor, tables: StepTables
    ) -> Tensor:
        """The output of all rows, of which `parts` are the decode rows, if any."""
        for chunk in tables.chunks:
            rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
            parts.append(self._prefill(pages, q[rows], k[rows], v[rows], chunk, tables.turns))
        if tables.num_rows < len(q):
            parts.append(q.new_zeros(len(q) - tables.num_rows, *q.shape[1:]))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _grouped(self, q: Tensor) -> Tensor:
        """[rows, heads, D] to fp32 [rows, kv_heads, group, D], scaled."""
        return torch.mul(q.float(), self._scale).view(len(q), self.pool.layout.num_kv_heads, -1, q.shape[-1])

    def _decode(self, pages: LayerPages, q: Tensor, tables: DecodeTables, turns: Turns | None) -> Tensor:
        """q [B, kv_heads, group, D] to the output in the same shape."""
        k, v = pages.read_open(tables.slots, tables.number[: len(tables.slots)], turns)
        # an open page holds leftovers past the position: 0 · NaN would survive the softmax
        v = v.masked_fill(tables.hidden.transpose(-1, -2), 0.0)
        num_slots = len(tables.slots)
        parts = [Partial.over(q.index_select(0, tables.row[:num_slots]), k, v, tables.hidden)]
        row, number = tables.row[num_slots:], tables.number[num_slots:]
        for start in range(0, len(tables.pages), self._block_pages):
            block = slice(start, start + self._block_pages)
            queries = q.index_select(0, row[block])
            parts.append(pages.attend_pages(queries, tables.pages[block], number[block], turns))
        return self._combined(parts, tables)

    def _decode_16bit(self, pages: LayerPages, q: Tensor, tables: DecodeTables) -> Tensor:
        """The same where all pages are 16-bit: half the traffic of a copy in fp32."""
        parts: list[Partial] = []
        num_slots, slots = len(tables.slots), tables.slots
        start = 0
        while start < len(tables.row):
            end = max(num_slots, start + self._block_pages)  # all slots are in the first block
            tiles = pages.tiles_16bit(slots, tables.pages[max(0, start - num_slots) : end - num_slots])
            if start == 0:  # leftovers behind the position may be NaN, which a bias of -inf would not hide
                tiles[:num_slots].masked_fill_(tables.hidden.unsqueeze(1).transpose(-1, -2), 0.0)
            k, v = tiles.unbind(1)
            parts.append(Partial.over_16bit(q.index_select(0, tables.row[start:end]), k, v, tables.bias[start:end]))
            start, slots = end, slots[:0]
        return self._combined(parts, tables)

    @staticmethod
    def _combined(parts: list[Partial], tables: DecodeTables) -> Tensor:
        rows, totals = Partial.combine(parts, tables.row, tables.num_rows)
        if tables.mass is not None:
            tables.mass.add(totals, rows)
        return rows.output()

    def _prefill(
        self, pages: LayerPages, q: Tensor, k: Tensor, v: Tensor, chunk: ChunkTables, turns: Turns | None
    ) -> Tensor:
        """q [T, heads, D], k and v [T, kv_heads, D] of one chunk to the output [T, heads, D].

        Rows are (token, query of the group), so that the rows of a page are contiguous.
        """
        group = q.shape[1] // k.shape[1]
        queries = self._grouped(q).transpose(0, 1).flatten(1, 2)  # [kv_heads, T * group, D]
        if pages.recipe.before_rope and turns is not None:
            k = pages.turned_at(k, *turns.rows(chunk.num_before, chunk.num_rows))
        mass: ChunkMass | None = None
        see_context: Observe | None = None
        see_own: Observe | None = None
        if chunk.mass is not None:
            mass = ChunkMass(chunk.mass, (chunk.num_rows - chunk.num_observed) * group, self._page_tokens)
            see_context, see_own = mass.see_context, mass.see_own
        before: Partial | None = None
        for block in chunk.context:
            part = Partial.over(queries, *pages.read_refs(block, turns), observe=see_context)
            before = part if before is None else before.merge(part)
        own_k, own_v = (x.float().transpose(0, 1) for x in (k, v))  # [kv_heads, T, D]
        if chunk.num_rows > self._page_tokens and not pages.recipe.is_raw:
            inside_k, inside_v = pages.read_refs(chunk.inside, turns)
        future = self._future(min(chunk.num_rows, self._page_tokens), group)
        outputs = []
        for start in range(0, chunk.num_rows, self._page_tokens):
            end = min(start + self._page_tokens, chunk.num_rows)
            rows = slice(start * group, end * group)
            if start == 0 or pages.recipe.is_raw:  # sealing a raw page changes nothing
                keys, values = own_k[:, :end], own_v[:, :end]
            else:
                keys = torch.cat((inside_k[:, :start], own_k[:, start:end]), 1)
                values = torch.cat((inside_v[:, :start], own_v[:, start:end]), 1)
            hidden = future[: (end - start) * group, : end - start]
            part = Partial.over(queries[:, rows], keys, values, hidden, observe=see_own)
            if before is not None:
                part = part.merge(before.at(rows))
            if mass is not None:
                mass.add(rows, part)
            outputs.append(part.output())
        out = torch.cat(outputs, 1).view(k.shape[1], chunk.num_rows, group, -1)
        return out.transpose(0, 1).flatten(1, 2)

    def _future(self, length: int, group: int) -> Tensor:
        """[length * group, length]: within a page, the tokens behind each row's own."""
        tokens = torch.arange(length, device=self._device)
        return tokens > tokens.repeat_interleave(group)[:, None]


class StepHolder(Protocol):
    """Tables that hold more than those of `TorchBackend`, which are `step`."""

    @property
    def step(self) -> StepTables: ...


class ExtendedTorchBackend(TorchBackend):
    """What is the same for backends whose `prepare` makes such tables."""

    def mark(self, tables: StepHolder, marks: Tensor) -> None:  # type: ignore[override]
        super().mark(tables.step, marks)

    def append(self, layer: int, k: Tensor, v: Tensor, tables: StepHolder) -> None:  # type: ignore[override]
        super().append(layer, k, v, tables.step)

    def mass(self, tables: StepHolder) -> list[list[float]]:  # type: ignore[override]
        return super().mass(tables.step)
