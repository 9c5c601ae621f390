"""Attention whose result for a row depends on nothing but the row's own sequence (docs/architecture.md).

Decode rows and prefill chunks take one path: a tile holds the P places of one page, a row sits at its position within
it, and keys are added page by page in order. So every product has the same shape and every sum the same order,
whatever else is in the step and however the prompt was cut into chunks. So is the mass of pages: each query's share is
the same number everywhere, and sums of shares do not round.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import PoolTensors
from kernels.format.layout import PageRef
from kernels.format.step import AttentionStep
from kernels.rope import Rotary
from kernels.torch_backend.backend import ExtendedTorchBackend
from kernels.torch_backend.mass import exact_sum
from kernels.torch_backend.pages import LayerPages, PageIndex, Turns
from kernels.torch_backend.softmax import Partial
from kernels.torch_backend.tables import StepTables


@dataclass(frozen=True, slots=True)
class Tile:
    """Rows `first_row` to `first_row + num_rows` of the step at places `offset`… of their page, which lies in `slot`
    (decode) or, where that is None, in the step's activations. `before` are the pages in front of it. The last
    `num_observed` rows add to `mass`, fp64 [pages in front and the own one]; None where there are none."""

    first_row: int
    num_rows: int
    offset: int
    slot: int | None
    before: tuple[PageIndex, ...]
    num_observed: int
    mass: Tensor | None

    @property
    def rows(self) -> slice:
        return slice(self.first_row, self.first_row + self.num_rows)

    @property
    def places(self) -> slice:
        return slice(self.offset, self.offset + self.num_rows)

    @property
    def observed(self) -> slice:
        return slice(self.places.stop - self.num_observed, self.places.stop)


@dataclass(frozen=True, slots=True)
class InvariantTables:
    step: StepTables
    tiles: tuple[Tile, ...]


class InvariantTorchBackend(ExtendedTorchBackend):
    name = "torch (batch-invariant)"

    def __init__(self, pool: PoolTensors, rotary: Rotary | None = None):
        super().__init__(pool, rotary)
        places = torch.arange(self._page_tokens, device=self._device)
        self._future_tile = places > places[:, None]

    def prepare(self, step: AttentionStep) -> InvariantTables:  # type: ignore[override]
        tables = super().prepare(step)
        return InvariantTables(tables, tuple(self._tiles(step, tables)))

    def _tiles(self, step: AttentionStep, tables: StepTables) -> Iterator[Tile]:
        size = self._page_tokens
        for row, decode in enumerate(step.decode):
            before, slot = self._single(decode.pages[:-1]), decode.pages[-1].id
            mass = tables.mass.part(row, row + 1)
            yield Tile(row, 1, decode.position % size, slot, before, int(decode.is_observed), mass)
        first_row = len(step.decode)
        for chunk, chunk_tables in zip(step.chunks, tables.chunks, strict=True):
            for start in range(0, chunk.length, size):
                end = min(start + size, chunk.length)
                before = self._single(chunk.context + chunk.targets[: start // size])
                num_observed = max(0, end - max(start, chunk.length - chunk.num_observed))
                mass = chunk_tables.mass[: len(before) + 1] if num_observed and chunk_tables.mass is not None else None
                yield Tile(first_row + start, end - start, 0, None, before, num_observed, mass)
            first_row += chunk.length

    def _single(self, refs: tuple[PageRef, ...]) -> tuple[PageIndex, ...]:
        return tuple(PageIndex((ref,), self._device, number) for number, ref in enumerate(refs))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, tables: InvariantTables) -> Tensor:  # type: ignore[override]
        out = torch.zeros_like(q, dtype=torch.float32)
        pages = self._layers[layer]
        for tile in tables.tiles:
            out[tile.rows] = self._attend_tile(pages, q[tile.rows], k[tile.rows], v[tile.rows], tile, tables.step.turns)
        return out

    def _attend_tile(
        self, pages: LayerPages, q: Tensor, k: Tensor, v: Tensor, tile: Tile, turns: Turns | None
    ) -> Tensor:
        size, group = self._page_tokens, q.shape[1] // k.shape[1]
        places = tile.places
        queries = q.new_zeros(k.shape[1], group, size, q.shape[2], dtype=torch.float32)
        queries[:, :, places] = self._grouped(q).permute(1, 2, 0, 3)
        own_k, own_v = (k.new_zeros(k.shape[1], size, k.shape[2], dtype=torch.float32) for _ in range(2))
        if tile.slot is None:
            own_k[:, places], own_v[:, places] = k.transpose(0, 1).float(), v.transpose(0, 1).float()
        else:
            seen = tile.offset + 1
            own_k[:, :seen], own_v[:, :seen] = pages.open_k[tile.slot, :, :seen], pages.open_v[tile.slot, :, :seen]
        number = torch.tensor([len(tile.before)], device=self._device)
        own_k = pages.turned(own_k.unsqueeze(0), number, turns)[0]
        queries = queries.flatten(1, 2)  # [kv_heads, group * P, D]
        weighed: list[tuple[Tensor, Tensor]] = []
        result: Partial | None = None
        for index in tile.before:
            part = Partial.over(queries, *(x.contiguous() for x in pages.read_refs(index, turns)))
            result = part if result is None else result.merge(part)
            if tile.mass is not None:
                weighed.append((part.largest, part.total))
        part = Partial.over(queries, own_k, own_v, self._future_tile.repeat(group, 1))
        result = part if result is None else result.merge(part)
        if tile.mass is not None:
            weighed.append((part.largest, part.total))
            shares = torch.stack([total * result.share(largest) for largest, total in weighed])
            shares = shares.unflatten(-1, (group, size))[..., tile.observed]
            tile.mass.add_(exact_sum(shares, (1, 2, 3)))
        output = result.output().view(k.shape[1], group, size, -1)[:, :, places]
        return output.permute(2, 0, 1, 3).flatten(1, 2)
