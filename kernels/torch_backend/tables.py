"""Index tables of a step: which rows go where, which pages each row reads. Built once, used by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.format.layout import Pool
from kernels.format.step import AttentionStep, DecodeRow, PrefillChunk
from kernels.rope import Rotary
from kernels.torch_backend.mass import DecodeMass, PageMass
from kernels.torch_backend.pages import PageIndex, Turns

CONTEXT_PAGES = 8  # pages of a chunk's context that are unpacked at a time


@dataclass(frozen=True, slots=True)
class DecodeTables:
    """B decode rows, and the pages that they read. A page is a split, so a row's sums do not depend on its company.

    `slots` [m]: the own pages in row order, then sink pages; `hidden` [m, 1, 1, P]: places there that the row must not
    see. `pages` [n]: sealed pages. `row` [m + n]: whose the slots and the pages are, `number` [m + n]: which pages of
    the sequence; `bias` [m + n, 1, 1, P]: -inf where `hidden`, else 0. `mass`: of observed rows, if any.
    """

    num_rows: int
    slots: Tensor
    hidden: Tensor
    pages: Tensor
    row: Tensor
    number: Tensor
    bias: Tensor
    mass: DecodeMass | None


@dataclass(frozen=True, slots=True)
class ChunkTables:
    """One prefill chunk: its rows, its context in blocks of pages, and the full pages inside it, `num_before` pages in.

    The last `num_observed` rows add to `mass`, fp64 [pages]; None where there are none.
    """

    first_row: int
    num_rows: int
    context: tuple[PageIndex, ...]
    inside: PageIndex
    num_before: int
    num_observed: int
    mass: Tensor | None


@dataclass(slots=True)
class StepTables:
    """`own_slots`, `own_offsets` [B]: where the tokens of decode rows go. `decode`: None where there are no such rows,
    or PyTorch does not attend to them. `seal_rows` [n, P] are the rows of the chunks' full pages, `seal_pages` [n]
    where they go; `slot_writes` are (first row, number of rows, slot) of sink pages and tails. `turns`: where the
    recipe stores K before RoPE. `marks`: bool [rows], tokens that the sink rule marks, set by `TorchBackend.mark`."""

    num_rows: int
    own_slots: Tensor
    own_offsets: Tensor
    decode: DecodeTables | None
    chunks: tuple[ChunkTables, ...]
    seal_rows: Tensor
    seal_pages: Tensor
    slot_writes: tuple[tuple[int, int, int], ...]
    mass: PageMass
    turns: Turns | None
    marks: Tensor


def decode_tables(
    rows: Sequence[DecodeRow], own_offsets: Tensor, page_tokens: int, mass: Tensor | None, device: torch.device
) -> DecodeTables:
    def tensor(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    slots = [(row.pages[-1].id, (index, len(row.pages) - 1)) for index, row in enumerate(rows)]
    pages: list[tuple[int, tuple[int, int]]] = []
    for index, row in enumerate(rows):
        for place, ref in enumerate(row.pages[:-1]):
            (slots if ref.pool is Pool.OPEN else pages).append((ref.id, (index, place)))
    places = [place for _, place in slots + pages]
    hidden = torch.zeros(len(slots), 1, 1, page_tokens, dtype=torch.bool, device=device)
    hidden[: len(rows), 0, 0] = torch.arange(page_tokens, device=device) > own_offsets[:, None]
    bias = torch.zeros(len(slots) + len(pages), 1, 1, page_tokens, device=device)
    bias[: len(slots)].masked_fill_(hidden, float("-inf"))
    owners = tensor([index for index, _ in places])
    decode_mass: DecodeMass | None = None
    if mass is not None:
        observed = [item for item, (index, _) in enumerate(places) if rows[index].is_observed]
        items = tensor(sorted(observed, key=places.__getitem__))
        decode_mass = DecodeMass(items, owners.index_select(0, items), mass)
    return DecodeTables(
        num_rows=len(rows),
        slots=tensor([slot for slot, _ in slots]),
        hidden=hidden,
        pages=tensor([page for page, _ in pages]),
        row=owners,
        number=tensor([place for _, place in places]),
        bias=bias,
        mass=decode_mass,
    )


def step_tables(
    step: AttentionStep,
    page_tokens: int,
    device: torch.device,
    rotary: Rotary | None = None,
    *,
    has_decode: bool = True,
) -> StepTables:
    """`rotary`: where K is stored before RoPE. `has_decode`: whether PyTorch attends to decode rows."""
    own = [(row.pages[-1].id, row.position % page_tokens) for row in step.decode]
    own_slots, own_offsets = torch.tensor(own, dtype=torch.int64, device=device).view(-1, 2).unbind(1)
    chunks: list[ChunkTables] = []
    seal_rows: list[int] = []
    seal_pages: list[int] = []
    slot_writes: list[tuple[int, int, int]] = []
    mass = PageMass(step, device)
    first_row = num_decode = len(step.decode)
    for place, chunk in enumerate(step.chunks, start=num_decode):
        full = chunk.length // page_tokens
        for index, target in enumerate(chunk.targets):
            row = first_row + index * page_tokens
            if target.pool is Pool.SEALED:
                seal_rows.append(row)
                seal_pages.append(target.id)
            else:
                slot_writes.append((row, min(page_tokens, chunk.length - index * page_tokens), target.id))
        chunks.append(_chunk_tables(chunk, first_row, full, mass.part(place, place + 1), device))
        first_row += chunk.length
    decode: DecodeTables | None = None
    if step.decode and has_decode:
        decode = decode_tables(step.decode, own_offsets, page_tokens, mass.part(0, num_decode), device)
    return StepTables(
        num_rows=step.num_rows,
        own_slots=own_slots,
        own_offsets=own_offsets,
        decode=decode,
        chunks=tuple(chunks),
        seal_rows=torch.tensor(seal_rows, dtype=torch.int64, device=device)[:, None]
        + torch.arange(page_tokens, device=device),
        seal_pages=torch.tensor(seal_pages, dtype=torch.int64, device=device),
        slot_writes=tuple(slot_writes),
        mass=mass,
        turns=Turns.up_to(_most_pages(step), page_tokens, rotary, device) if rotary else None,
        marks=torch.zeros(step.num_rows, dtype=torch.bool, device=device),
    )


def _most_pages(step: AttentionStep) -> int:
    return max(
        (len(pages) for pages in (*(row.pages for row in step.decode), *(c.context + c.targets for c in step.chunks))),
        default=0,
    )


def _chunk_tables(
    chunk: PrefillChunk, first_row: int, full: int, mass: Tensor | None, device: torch.device
) -> ChunkTables:
    blocks = range(0, len(chunk.context), CONTEXT_PAGES)
    return ChunkTables(
        first_row=first_row,
        num_rows=chunk.length,
        context=tuple(PageIndex(chunk.context[start : start + CONTEXT_PAGES], device, start) for start in blocks),
        inside=PageIndex(chunk.targets[:full], device, len(chunk.context)),
        num_before=len(chunk.context),
        num_observed=chunk.num_observed,
        mass=mass,
    )
