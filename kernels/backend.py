"""The protocol every attention backend implements, and the memory it works on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kernels.format.layout import PageLayout, PageRef, Pool
from kernels.format.step import AttentionStep
from kernels.rope import Rotary
from kernels.transfer import to_device


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that the torch-free layout calls by name."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True, slots=True)
class PoolTensors:
    """The memory of both pools.

    `sealed`: uint8 [num_pages, page_bytes]. `open`: model dtype [num_slots, layers, 2, kv_heads, P, D].
    Page 0 and slot 0 (`NULL_PAGE`) stay zero: padding reads them.
    """

    layout: PageLayout
    sealed: Tensor
    open: Tensor

    @classmethod
    def allocate(cls, layout: PageLayout, *, num_pages: int, num_slots: int, device: torch.device) -> "PoolTensors":
        """Zeroed pools; the counts include the null page and the null slot."""
        return cls(
            layout,
            torch.zeros(num_pages, layout.page_bytes, dtype=torch.uint8, device=device),
            torch.zeros(num_slots, *layout.slot_shape, dtype=torch_dtype(layout.dtype), device=device),
        )

    @property
    def num_bytes(self) -> int:
        return self.sealed.nbytes + self.open.nbytes

    def copy_slots(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """All layers. No target may be a source or be named twice."""
        device = self.open.device
        first, second = (to_device(list(slots), torch.int64, device) for slots in (sources, targets))
        self.open[second] = self.open[first]

    def mark_table(self, marks: Sequence[Sequence[int]], num_pages: int) -> Tensor:
        """bool [num_pages, P] on the device of the pools, of the places of each page; none where `marks` is empty."""
        size, device = self.layout.page_tokens, self.open.device
        if not marks:
            return torch.zeros(num_pages, size, dtype=torch.bool, device=device)
        return to_device([[place in places for place in range(size)] for places in marks], torch.bool, device)

    def record(self, ref: PageRef) -> Tensor:
        """The memory of a page or slot, a uint8 [page_bytes or slot_bytes] view: writing to it writes to the pool."""
        return self.sealed[ref.id] if ref.pool is Pool.SEALED else self.open[ref.id].view(-1).view(torch.uint8)


def rotary_for(layout: PageLayout, rotary: Rotary | None) -> Rotary | None:
    """The model's rotary embedding, or None where no layer stores K before RoPE. Raises ValueError where it lacks."""
    if not any(layer.before_rope for layer in layout.recipe.layers):
        return None
    if rotary is None:
        raise ValueError("a recipe that stores K before RoPE needs the model's rotary embedding")
    return rotary


class AttentionBackend(Protocol):
    """Attention over the pools. Q, K and V arrive after RoPE and rotation, K and V rounded to the model's dtype; K
    before RoPE where the recipe stores it so: page number n of a row or chunk then holds positions n·P on.

    q: fp32 [rows, heads, D]; k, v: [rows, kv_heads, D]. Rows past `step.num_rows` are padding and are left alone.
    """

    name: str

    def prepare(self, step: AttentionStep) -> Any:
        """Index tables of a step, built once and used by every layer."""

    def mark(self, tables: Any, marks: Tensor) -> None:
        """bool [rows]: which tokens the recipe's sink rule marks. Before the first layer whose recipe keeps such tokens
        is appended to."""

    def append(self, layer: int, k: Tensor, v: Tensor, tables: Any) -> None:
        """Write decode rows, sink pages and tails to their slots, and seal the full pages of chunks."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, tables: Any) -> Tensor:
        """Attention output [rows, heads, D], fp32; padding rows are zero. Call after `append`."""

    def mass(self, tables: Any) -> list[list[float]]:
        """The attention weight that observed queries gave to each page, summed over layers, heads and queries. Call
        after all layers were attended to.

        For each decode row, then each chunk: one number a page, in the order of `DecodeRow.pages` or of
        `PrefillChunk.context` + `targets`; nothing where no query is observed. A row's or chunk's numbers sum to
        layers · heads · observed queries, up to rounding. Chunks of one sequence are added up by the caller.
        """

    def seal(self, slots: Sequence[int], pages: Sequence[int], marks: Sequence[Sequence[int]] = ()) -> None:
        """Quantize full slots into sealed pages, all layers. The slots stay as they are. `marks`: for each page the
        places of tokens that the sink rule marks; none where absent."""

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy whole slots, all layers. No target may be a source or be named twice."""
