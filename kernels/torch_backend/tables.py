"""Index tables of a step: which rows go where, which pages each row reads. Built once, used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.format.layout import NULL_PAGE, Pool
from kernels.format.step import AttentionStep, DecodeRow, PrefillChunk
from kernels.torch_backend.pages import PageIndex

SPLIT_PAGES = 8  # a fixed number of pages a split, so that a sequence's sums do not depend on its company


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """B decode rows; I splits of their sealed pages.

    `own_slot`, `own_offset` [B]: where each token goes. `slots` [B, 1 + S]: sinks and own page, padded.
    `open_allowed` [B, 1, 1, (1+S)·P]: what a row may see there. `pages` [I, SPLIT_PAGES], padded; `row` [I]: whose
    they are; `sealed_allowed` [I, 1, 1, SPLIT_PAGES·P].
    """

    own_slot: Tensor
    own_offset: Tensor
    slots: Tensor
    open_allowed: Tensor
    pages: Tensor
    row: Tensor
    sealed_allowed: Tensor


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
    def tensor(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    def padded(lists: list[list[int]], width: int) -> Tensor:
        return tensor([ids + [NULL_PAGE] * (width - len(ids)) for ids in lists])

    slots = [[ref.id for ref in row.pages if ref.pool is Pool.OPEN] for row in rows]
    width = max(len(ids) for ids in slots)
    # tokens a row may see in its slots: full sinks, then its own page up to its position
    visible = tensor([(len(ids) - 1) * page_tokens + row.position % page_tokens + 1
                      for row, ids in zip(rows, slots, strict=True)])  # fmt: skip
    splits: list[list[int]] = []
    owner: list[int] = []
    for index, row in enumerate(rows):
        sealed = [ref.id for ref in row.pages if ref.pool is Pool.SEALED]
        for start in range(0, len(sealed), SPLIT_PAGES):
            splits.append(sealed[start : start + SPLIT_PAGES])
            owner.append(index)
    filled = tensor([len(ids) * page_tokens for ids in splits])
    return DecodeTables(
        own_slot=tensor([row.pages[-1].id for row in rows]),
        own_offset=tensor([row.position % page_tokens for row in rows]),
        slots=padded(slots, width),
        open_allowed=(torch.arange(width * page_tokens, device=device) < visible[:, None])[:, None, None],
        pages=padded(splits, SPLIT_PAGES).view(-1, SPLIT_PAGES),
        row=tensor(owner),
        sealed_allowed=(torch.arange(SPLIT_PAGES * page_tokens, device=device) < filled[:, None])[:, None, None],
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
    blocks = range(0, len(chunk.context), SPLIT_PAGES)
    return ChunkTables(
        first_row=first_row,
        num_rows=chunk.length,
        context=tuple(PageIndex(chunk.context[start : start + SPLIT_PAGES], device) for start in blocks),
        inside=PageIndex(chunk.targets[:full], device),
    )
