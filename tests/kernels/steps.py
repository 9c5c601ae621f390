"""One forward pass over filled pools, with what each row should read and what each page should hold afterwards."""

from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.format.layout import PageRef, Pool
from kernels.format.step import AttentionStep, DecodeRow, PrefillChunk
from tests.kernels.builders import Pools, write_record

NONE = slice(0, 0)


@dataclass(frozen=True)
class Row:
    """What the oracle needs for one row: the pages before its own, and K and V [tokens, layers, kv_heads, D] of its own
    page up to itself."""

    before: tuple[PageRef, ...]
    own_k: Tensor
    own_v: Tensor


class StepBuilder:
    """Collects decode rows, then chunks; `rows` says what each of them should read."""

    def __init__(self, pools: Pools):
        self.pools = pools
        self.rows: list[Row] = []
        self._decode: list[DecodeRow] = []
        self._chunks: list[PrefillChunk] = []
        self._k: list[Tensor] = []
        self._v: list[Tensor] = []
        self._writes: list[tuple[PageRef, int, Tensor, Tensor]] = []

    def add_decode(self, position: int, is_observed: bool = False, dropped: slice = NONE) -> None:
        """A row of a new random sequence whose pages `dropped` are gone."""
        k, v = self.pools.random_keys(position + 1), self.pools.random_values(position + 1)
        pages = list(self.pools.place(k[:position], v[:position]))
        del pages[dropped]
        self.continue_decode(tuple(pages), k, v, is_observed)

    def add_chunk(self, start: int, length: int, num_observed: int = 0, dropped: slice = NONE) -> None:
        """A chunk of a new random sequence whose pages `dropped` are gone."""
        k, v = self.pools.random_keys(start + length), self.pools.random_values(start + length)
        pages = list(self.pools.place(k[:start], v[:start]))
        del pages[dropped]
        self.continue_chunk(tuple(pages), start, k, v, num_observed)

    def continue_decode(
        self, pages: tuple[PageRef, ...], k: Tensor, v: Tensor, is_observed: bool = False
    ) -> tuple[PageRef, ...]:
        """The last token of `k` and `v` [tokens, layers, kv_heads, D]; the others are in `pages`, or were in pages that
        are gone. Returns the sequence's pages after the step."""
        size, position = self.pools.layout.page_tokens, len(k) - 1
        if position % size == 0:
            pages += (self.pools.take(Pool.OPEN),)
        start = position // size * size
        self._decode.append(DecodeRow(position, pages, is_observed))
        self.rows.append(Row(pages[:-1], k[start:], v[start:]))
        self._writes.append((pages[-1], position - start, k[position:], v[position:]))
        self._k.append(k[position:])
        self._v.append(v[position:])
        return pages

    def continue_chunk(
        self, context: tuple[PageRef, ...], start: int, k: Tensor, v: Tensor, num_observed: int = 0
    ) -> tuple[PageRef, ...]:
        """The tokens of `k` and `v` from `start` on, behind the full pages `context`. Returns the sequence's pages
        after the step."""
        size = self.pools.layout.page_tokens
        k, v = k[start:], v[start:]
        pages = context
        for index, (keys, values) in enumerate(zip(k.split(size), v.split(size), strict=True), start // size):
            ref = self.pools.target(index, len(keys) == size)
            self.rows += [Row(pages, keys[: end + 1], values[: end + 1]) for end in range(len(keys))]
            self._writes.append((ref, 0, keys, values))
            pages += (ref,)
        self._chunks.append(PrefillChunk(start, len(k), context, pages[len(context) :], num_observed))
        self._k.append(k)
        self._v.append(v)
        return pages

    @property
    def step(self) -> AttentionStep:
        return AttentionStep(tuple(self._decode), tuple(self._chunks))

    def activations(self, padding: int) -> tuple[Tensor, Tensor]:
        """K and V [rows + padding, layers, kv_heads, D]; padding rows are NaN."""
        k, v = torch.cat(self._k), torch.cat(self._v)
        rest = torch.full((padding, *k.shape[1:]), torch.nan, dtype=k.dtype)
        return torch.cat((k, rest)), torch.cat((v, rest))

    def expected_pools(self) -> tuple[Tensor, Tensor]:
        """The sealed and the open pool as they should be after the step: the rows where they belong, and every other
        byte as it is now."""
        sealed, slots = self.pools.tensors.sealed.clone(), self.pools.tensors.open.clone()
        for ref, offset, k, v in self._writes:
            if ref.pool is Pool.SEALED:
                write_record(self.pools.layout, sealed[ref.id], k, v)
            else:
                for kind, x in enumerate((k, v)):
                    slots[ref.id, :, kind, :, offset : offset + len(x)] = x.permute(1, 2, 0, 3)
        return sealed, slots
