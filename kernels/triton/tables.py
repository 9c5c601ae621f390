"""Tables of a step: which rows go where, which pages each tile of queries reads. Built once, used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from triton import next_power_of_2

from kernels.format.layout import NULL_PAGE, Pool
from kernels.format.step import AttentionStep, DecodeRow, PrefillChunk
from kernels.rope import Rotary
from kernels.triton.listing import Ints, Listed, PageLists, Place, RowListings

SPLIT_PAGES = 8  # sealed pages that one program of decode reads
NO_STATS = -1


@dataclass(frozen=True, slots=True)
class Geometry:
    """What the tables depend on beside the step. `group`: query heads of a KV head, `padded_group`: a power of two of
    at least that; `tile_tokens`: places of a page that one program of prefill has queries of."""

    page_tokens: int
    group: int
    padded_group: int
    tile_tokens: int


@dataclass(frozen=True, slots=True)
class Mass:
    """Who is observed. `counts`: pages of each row and chunk, 0 where it is not; `sums` int64, in units, of them.
    `decode`, `tiles` int32 [n, 5]: entries of `mass_kernel`; `num_stats`: pages of tiles that keep statistics."""

    counts: list[int]
    sums: Tensor
    decode: Tensor
    tiles: Tensor
    num_stats: int


@dataclass(slots=True)
class StepTables:
    """The kernels say what columns `writes` [n, 3], `splits` [n, 6], `first_split` [rows + 1] and `tiles` [n, 12] have;
    all int32. The first `num_slot_tiles` have their own page in a slot. `pages`, `numbers` int32: see `PageLists`.
    `seals` int64 [n, 2]: first row and target of each full page; `seal_marks` bool [n, P]: which of their tokens the
    sink rule marks. `cos`, `sin` fp32 [tokens, D/2]. `packed` int32 holds all int32 tables.
    """

    num_rows: int
    writes: Tensor
    splits: Tensor
    first_split: Tensor
    tiles: Tensor
    num_slot_tiles: int
    pages: Tensor
    numbers: Tensor
    seals: Tensor
    seal_marks: Tensor
    cos: Tensor
    sin: Tensor
    mass: Mass
    packed: Tensor

    @property
    def size(self) -> tuple[int, int, int]:
        """Rows, splits and pages: tables of decode rows that agree in it can take each other's place."""
        return self.num_rows, len(self.splits), len(self.pages)

    def overwrite(self, other: "StepTables") -> None:
        """Say what `other`, of the same size, says, in the same memory."""
        self.packed.copy_(other.packed, non_blocking=True)

    @property
    def num_split_rows(self) -> int:
        return len(self.first_split) - 1


class TableBuilder:
    """Collects the rows of one step. `is_invariant`: decode rows take the path of chunks."""

    def __init__(self, geometry: Geometry, *, is_invariant: bool):
        self._geometry = geometry
        self._is_invariant = is_invariant
        self._lists = PageLists()
        self._decode_writes: list[tuple[int, ...]] = []
        self._chunk_writes: list[Ints] = []
        self._split_rows: list[tuple[int, ...]] = []
        self._tiles: list[tuple[int, ...]] = []
        self._num_slot_tiles = 0
        self._seals: list[tuple[int, int]] = []
        self._counts: list[int] = []
        self._num_sums = 0
        self._split_mass: list[Ints] = []
        self._tile_mass: list[Ints] = []
        self._num_stats = 0

    def add_decode(self, row: int, decode: DecodeRow, listed: Listed) -> None:
        own, place = decode.pages[-1], decode.position % self._geometry.page_tokens
        self._decode_writes.append((row, own.id, place))
        self._counts.append(len(decode.pages) if decode.is_observed else 0)
        pages = self._lists.add(listed)
        if self._is_invariant:
            number = len(decode.pages) - 1
            first_observed = place if decode.is_observed else place + 1
            self._add_tiles(pages.before(number), number, row - place, (place, place + 1), own.id, first_observed)
            self._num_slot_tiles = len(self._tiles)
        else:
            self._add_splits(pages, row, place + 1, decode.is_observed)
        self._num_sums += self._counts[-1]

    def _add_splits(self, pages: Place, row: int, last_tokens: int, is_observed: bool) -> None:
        self._split_rows.append((row, *pages.columns, last_tokens))
        if is_observed:
            entries = pages.first_slot + np.arange(len(pages.numbers))
            self._split_mass.append(columns(entries, row, self._num_sums + pages.numbers, 0, self._geometry.group))

    def add_chunk(self, first_row: int, chunk: PrefillChunk) -> None:
        """A chunk whose rows begin at `first_row`."""
        size, num_before = self._geometry.page_tokens, len(chunk.context)
        refs = chunk.context + chunk.targets
        self._counts.append(len(refs) if chunk.num_observed else 0)
        pages = self._lists.add(Listed.of(refs))
        for index, target in enumerate(chunk.targets):
            row, count = first_row + index * size, min(size, chunk.length - index * size)
            if target.pool is Pool.SEALED:
                self._seals.append((row, target.id))
            else:
                places = np.arange(count)
                self._chunk_writes.append(columns(row + places, target.id, places))
            number = num_before + index
            first_observed = max(0, chunk.length - chunk.num_observed - index * size)
            self._add_tiles(pages.before(number), number, row, (0, count), NULL_PAGE, first_observed)
        self._num_sums += self._counts[-1]

    def _add_tiles(
        self, before: Place, number: int, own_row: int, places: tuple[int, int], slot: int, first_observed: int
    ) -> None:
        """Rows at `places` of page `number` of a sequence, place 0 being row `own_row`; those from place
        `first_observed` on are observed."""
        size, group = self._geometry.tile_tokens, self._geometry.padded_group
        for first in range(places[0] // size * size, places[1], size):
            begin, end = max(first, places[0]), min(first + size, places[1])
            entry = NO_STATS
            if first_observed < end:
                entry = self._num_stats
                pages = np.append(before.numbers, number)
                seen = (max(begin, first_observed) - first) * group, (end - first) * group
                entries = entry + np.arange(len(pages))
                self._tile_mass.append(columns(entries, len(self._tiles), self._num_sums + pages, *seen))
                self._num_stats += len(pages)
            self._tiles.append((own_row, first, begin, end, places[1], slot, number, *before.columns, entry))

    def finish(self, num_rows: int, rotary: Rotary | None, device: torch.device, *, is_padded: bool) -> StepTables:
        """`is_padded`: for decode rows only; made larger than they need be, so that few sizes occur."""
        splits, first_split = split(table(self._split_rows, 6))
        arrays = {
            "writes": joined([table(self._decode_writes, 3), *self._chunk_writes], 3),
            "splits": splits,
            "first_split": first_split,
            "tiles": table(self._tiles, 12),
            "pages": self._lists.ids,
            "numbers": self._lists.numbers,
            "split_mass": joined(self._split_mass, 5),
            "tile_mass": joined(self._tile_mass, 5),
            "seals": table(self._seals, 2),
        }
        if is_padded:
            num_rows = next_power_of_2(num_rows)
            arrays = padded(arrays, num_rows)
        cos = sin = torch.zeros(1, device=device)
        if rotary is not None:
            num_tokens = (int(self._lists.numbers.max(initial=0)) + 1) * self._geometry.page_tokens
            cos, sin = (x.squeeze(1) for x in rotary.at(torch.arange(num_tokens, device=device)))
        packed, tensors = upload(arrays, device)
        split_mass, tile_mass, seals = (tensors.pop(name) for name in ("split_mass", "tile_mass", "seals"))
        sums = torch.zeros(self._num_sums, dtype=torch.int64, device=device)
        return StepTables(
            num_rows=num_rows,
            **tensors,
            num_slot_tiles=self._num_slot_tiles,
            seals=seals.long(),
            seal_marks=torch.zeros(len(seals), self._geometry.page_tokens, dtype=torch.bool, device=device),
            cos=cos,
            sin=sin,
            mass=Mass(self._counts, sums, split_mass, tile_mass, self._num_stats),
            packed=packed,
        )


def table(rows: Sequence[tuple[int, ...]], width: int) -> Ints:
    return np.array(rows, np.int32).reshape(-1, width)


def split(rows: Ints) -> tuple[Ints, Ints]:
    """Decode rows, each as one split, into those of `SPLIT_PAGES`, and where each row's begin. A row's first split has
    its slots beside its sealed pages."""
    counts = -(-np.maximum(rows[:, 4], 1) // SPLIT_PAGES)
    first_split = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    splits = np.repeat(rows, counts, axis=0)
    start = (np.arange(len(splits)) - np.repeat(first_split[:-1], counts)) * SPLIT_PAGES
    splits[:, 2] *= start == 0
    splits[:, 3] += start
    splits[:, 4] = np.minimum(SPLIT_PAGES, splits[:, 4] - start)
    return splits, first_split


def joined(parts: list[Ints], width: int) -> Ints:
    return np.concatenate([np.zeros((0, width), np.int32), *parts])


def padded(arrays: dict[str, Ints], num_rows: int) -> dict[str, Ints]:
    """Tables of decode rows with room for a power of two of splits. What is added writes what the last row does, and
    has no pages."""
    num_splits = next_power_of_2(max(num_rows, len(arrays["splits"])))
    most_slots = int(arrays["splits"][:, 2].max())
    num_pages = num_splits * (SPLIT_PAGES + most_slots)

    def larger(name: str, count: int, fill: Ints | int) -> Ints:
        array = arrays[name]
        result = np.empty((count, *array.shape[1:]), np.int32)
        result[: len(array)], result[len(array) :] = array, fill
        return result

    return arrays | {
        "writes": larger("writes", num_rows, arrays["writes"][-1]),
        "splits": larger("splits", num_splits, 0),
        "first_split": larger("first_split", num_rows + 1, arrays["first_split"][-1]),
        "pages": larger("pages", num_pages, 0),
        "numbers": larger("numbers", num_pages, 0),
    }


def upload(arrays: dict[str, Ints], device: torch.device) -> tuple[Tensor, dict[str, Tensor]]:
    """All arrays in one copy, and each of them as a view of it. They begin at multiples of 16 bytes, for which kernels
    are compiled."""
    starts = np.cumsum([0, *(-(-array.size // 4) * 4 for array in arrays.values())]).tolist()
    buffer = torch.zeros(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
    packed = torch.empty_like(buffer, device=device)
    numbers = buffer.numpy()
    tensors = {}
    for start, (name, array) in zip(starts[:-1], arrays.items(), strict=True):
        place = slice(start, start + array.size)
        numbers[place] = array.reshape(-1)
        tensors[name] = packed[place].view(array.shape)
    packed.copy_(buffer, non_blocking=True)
    return packed, tensors


def columns(*values: int | NDArray[np.integer[Any]]) -> Ints:
    """int32 [n, columns]; numbers are repeated."""
    return np.stack(np.broadcast_arrays(*values), -1).reshape(-1, len(values)).astype(np.int32)


def step_tables(
    step: AttentionStep,
    geometry: Geometry,
    listings: RowListings,
    rotary: Rotary | None,
    device: torch.device,
    *,
    is_invariant: bool,
    is_padded: bool = False,
) -> StepTables:
    """`rotary`: where the recipe stores K before RoPE. `is_padded`: see `TableBuilder.finish`."""
    builder = TableBuilder(geometry, is_invariant=is_invariant)
    for row, decode in enumerate(step.decode):
        builder.add_decode(row, decode, listings.of(decode.pages))
    listings.end_step()
    first_row = len(step.decode)
    for chunk in step.chunks:
        builder.add_chunk(first_row, chunk)
        first_row += chunk.length
    return builder.finish(step.num_rows, rotary, device, is_padded=is_padded)
