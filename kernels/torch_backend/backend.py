"""The vectorised torch backend: any device, any head size, and the fallback where no other backend fits."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backend import PoolTensors
from kernels.format.step import AttentionStep
from kernels.torch_backend.pages import LayerPages
from kernels.torch_backend.softmax import Partial
from kernels.torch_backend.tables import ChunkTables, DecodeTables, StepTables, step_tables

BLOCK_ELEMENTS = 2**21  # fp32 numbers of K that decode unpacks at a time: 8 MiB, about a core's share of cache


class TorchBackend:
    name = "torch"

    def __init__(self, pool: PoolTensors):
        self.pool = pool
        self._device = pool.open.device
        self._page_tokens = pool.layout.page_tokens
        self._scale = pool.layout.head_dim**-0.5
        self._layers = [LayerPages(pool, index) for index in range(len(pool.layout.layers))]

    def prepare(self, step: AttentionStep) -> StepTables:
        return step_tables(step, self._page_tokens, self._device)

    def append(self, layer: int, k: Tensor, v: Tensor, tables: StepTables) -> None:
        pages = self._layers[layer]
        if tables.decode is not None:
            count = tables.decode.own_slot.numel()
            where = (tables.decode.own_slot, slice(None), tables.decode.own_offset)
            pages.open_k[where], pages.open_v[where] = k[:count], v[:count]
        for row, count, slot in tables.slot_writes:
            pages.open_k[slot, :, :count] = k[row : row + count].transpose(0, 1)
            pages.open_v[slot, :, :count] = v[row : row + count].transpose(0, 1)
        if tables.seal_pages.numel():
            tile_k, tile_v = (x[tables.seal_rows].transpose(1, 2).contiguous() for x in (k, v))
            pages.seal(tile_k, tile_v, tables.seal_pages)

    def seal(self, slots: Sequence[int], pages: Sequence[int]) -> None:
        index = torch.tensor(slots, device=self._device)
        targets = torch.tensor(pages, device=self._device)
        for layer in self._layers:
            layer.seal(layer.open_k[index], layer.open_v[index], targets)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, tables: StepTables) -> Tensor:
        out = torch.zeros_like(q, dtype=torch.float32)
        pages = self._layers[layer]
        if tables.decode is not None:
            count = tables.decode.own_slot.numel()
            out[:count] = self._decode(pages, self._grouped(q[:count]), tables.decode).flatten(1, 2)
        for chunk in tables.chunks:
            rows = slice(chunk.first_row, chunk.first_row + chunk.num_rows)
            out[rows] = self._prefill(pages, q[rows], k[rows], v[rows], chunk)
        return out

    def _grouped(self, q: Tensor) -> Tensor:
        """[rows, heads, D] to fp32 [rows, kv_heads, group, D], scaled."""
        return torch.mul(q.float(), self._scale).view(len(q), self.pool.layout.num_kv_heads, -1, q.shape[-1])

    def _decode(self, pages: LayerPages, q: Tensor, tables: DecodeTables) -> Tensor:
        """q [B, kv_heads, group, D] to the output in the same shape."""
        k, v = pages.read_open(tables.own_slot)
        # an open page holds leftovers past the position: 0 · NaN would survive the softmax
        v = v.masked_fill(~tables.own_allowed.transpose(-1, -2), 0.0)
        result = Partial.over(q, k, v, tables.own_allowed)
        if tables.sink_row.numel():
            sinks = Partial.over(q.index_select(0, tables.sink_row), *pages.read_open(tables.sink_slots))
            result = result.add_splits(sinks, tables.sink_row)
        layout = self.pool.layout
        block = max(1, BLOCK_ELEMENTS // (layout.num_kv_heads * layout.page_tokens * layout.head_dim))
        for start in range(0, tables.pages.numel(), block):
            row = tables.page_row[start : start + block]
            part = pages.attend_pages(q.index_select(0, row), tables.pages[start : start + block])
            result = result.add_splits(part, row)
        return result.output()

    def _prefill(self, pages: LayerPages, q: Tensor, k: Tensor, v: Tensor, chunk: ChunkTables) -> Tensor:
        """q [T, heads, D], k and v [T, kv_heads, D] of one chunk to the output [T, heads, D].

        Rows are (token, query of the group), so that the rows of a page are contiguous.
        """
        group = q.shape[1] // k.shape[1]
        queries = self._grouped(q).transpose(0, 1).flatten(1, 2)  # [kv_heads, T * group, D]
        before: Partial | None = None
        for block in chunk.context:
            part = Partial.over(queries, *pages.read_refs(block))
            before = part if before is None else before.merge(part)
        own_k, own_v = (x.float().transpose(0, 1) for x in (k, v))  # [kv_heads, T, D]
        if chunk.num_rows > self._page_tokens and not pages.recipe.is_raw:
            inside_k, inside_v = pages.read_refs(chunk.inside)
        outputs = []
        for start in range(0, chunk.num_rows, self._page_tokens):
            end = min(start + self._page_tokens, chunk.num_rows)
            rows = slice(start * group, end * group)
            if start == 0 or pages.recipe.is_raw:  # sealing a raw page changes nothing
                keys, values = own_k[:, :end], own_v[:, :end]
            else:
                keys = torch.cat((inside_k[:, :start], own_k[:, start:end]), 1)
                values = torch.cat((inside_v[:, :start], own_v[:, start:end]), 1)
            part = Partial.over(queries[:, rows], keys, values, self._causal(end - start, group))
            if before is not None:
                part = part.merge(Partial(before.largest[:, rows], before.total[:, rows], before.values[:, rows]))
            outputs.append(part.output())
        out = torch.cat(outputs, 1).view(k.shape[1], chunk.num_rows, group, -1)
        return out.transpose(0, 1).flatten(1, 2)

    def _causal(self, length: int, group: int) -> Tensor:
        """[length * group, length]: within a page, each token sees the tokens up to itself."""
        tokens = torch.arange(length, device=self._device)
        return tokens <= tokens.repeat_interleave(group)[:, None]
