"""Index tables of a step: which rows go where, which pages each row reads. Built once, used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.format.layout import Pool
from kernels.format.step import AttentionStep, DecodeRow, PrefillChunk
from kernels.torch_backend.pages import PageIndex

CONTEXT_PAGES = 8  # pages of a chunk's context that are unpacked at a time


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """B decode rows.

    `own_slot`, `own_offset` [B]: where each token goes. `own_allowed` [B, 1, 1, P]: the tokens of that slot up to it.
    `sink_slots` and `sink_row` [m]: sink pages before the own page, and whose they are; `pages` and `page_row` [n]:
    sealed pages. A page is a split, so a sequence's sums do not depend on its company.
    """

    own_slot: Tensor
    own_offset: Tensor
    own_allowed: Tensor
    sink_slots: Tensor
    sink_row: Tensor
    pages: Tensor
    page_row: Tensor


@dataclass(frozen=True, slots=True)
class ChunkTables:
    """One prefill chunk: its rows, its context in blocks of pages, and the full pages inside it."""

    first_row: int
    num_rows: int
    context: tuple[PageIndex, ...]
    inside: PageIndex


@dataclass(frozen=True, slots=True)
class StepTables:
    """`seal_rows` [n, P] are the rows of the chunks' full pages, `seal_pages` [n] where they go; `slot_writes` are
    (first row, number of rows, slot) of sink pages and tails."""

    num_rows: int
    decode: DecodeTables | None
    chunks: tuple[ChunkTables, ...]
    seal_rows: Tensor
    seal_pages: Tensor
    slot_writes: tuple[tuple[int, int, int], ...]


def decode_tables(rows: Sequence[DecodeRow], page_tokens: int, device: torch.device) -> DecodeTables:
    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    before = {
        pool: [(ref.id, index) for index, row in enumerate(rows) for ref in row.pages[:-1] if ref.pool is pool]
        for pool in Pool
    }
    offset = tensor([row.position % page_tokens for row in rows])
    return DecodeTables(
        own_slot=tensor([row.pages[-1].id for row in rows]),
        own_offset=offset,
        own_allowed=(torch.arange(page_tokens, device=device) <= offset[:, None])[:, None, None],
        sink_slots=tensor([slot for slot, _ in before[Pool.OPEN]]),
        sink_row=tensor([row for _, row in before[Pool.OPEN]]),
        pages=tensor([page for page, _ in before[Pool.SEALED]]),
        page_row=tensor([row for _, row in before[Pool.SEALED]]),
    )


def step_tables(step: AttentionStep, page_tokens: int, device: torch.device) -> StepTables:
    chunks: list[ChunkTables] = []
    seal_rows: list[int] = []
    seal_pages: list[int] = []
    slot_writes: list[tuple[int, int, int]] = []
    first_row = len(step.decode)
    for chunk in step.chunks:
        full = chunk.length // page_tokens
        for index, target in enumerate(chunk.targets):
            row = first_row + index * page_tokens
            if target.pool is Pool.SEALED:
                seal_rows.append(row)
                seal_pages.append(target.id)
            else:
                slot_writes.append((row, min(page_tokens, chunk.length - index * page_tokens), target.id))
        chunks.append(_chunk_tables(chunk, first_row, full, device))
        first_row += chunk.length
    return StepTables(
        num_rows=step.num_rows,
        decode=decode_tables(step.decode, page_tokens, device) if step.decode else None,
        chunks=tuple(chunks),
        seal_rows=torch.tensor(seal_rows, dtype=torch.int64, device=device)[:, None]
        + torch.arange(page_tokens, device=device),
        seal_pages=torch.tensor(seal_pages, dtype=torch.int64, device=device),
        slot_writes=tuple(slot_writes),
    )


def _chunk_tables(chunk: PrefillChunk, first_row: int, full: int, device: torch.device) -> ChunkTables:
    blocks = range(0, len(chunk.context), CONTEXT_PAGES)
    return ChunkTables(
        first_row=first_row,
        num_rows=chunk.length,
        context=tuple(PageIndex(chunk.context[start : start + CONTEXT_PAGES], device) for start in blocks),
        inside=PageIndex(chunk.targets[:full], device),
    )
