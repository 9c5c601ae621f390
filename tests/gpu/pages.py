"""One layer's attention over pages that hold random K and V, the same few again and again."""

import torch
from torch import Tensor

from kernels.backend import PoolTensors
from kernels.format.layout import PageLayout, PageRef, Pool
from kernels.format.named import named_recipe
from kernels.format.step import AttentionStep, DecodeRow, PrefillChunk
from kernels.triton.backend import TritonBackend
from tests.gpu.plan import Heads

NUM_RANDOM = 16  # pages that differ


def layout_of(name: str, heads: Heads, dtype: str) -> PageLayout:
    recipe = named_recipe(name, num_layers=1, has_k_bias=False, page_tokens=heads.page_tokens, sink_pages=1)
    return PageLayout(recipe, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, dtype=dtype)


class FilledPages:
    """`num_pages` sealed pages and `num_slots` slots, full all of them, which steps take in random order."""

    def __init__(self, name: str, heads: Heads, dtype: str, device: torch.device, *, num_pages: int, num_slots: int):
        self.layout = layout_of(name, heads, dtype)
        self.heads = heads
        self._device = device
        num_slots = max(num_slots, NUM_RANDOM)
        num_pages = max(num_pages, NUM_RANDOM)
        pool = PoolTensors.allocate(self.layout, num_pages=1 + num_pages, num_slots=1 + num_slots, device=device)
        pool.open[1:].normal_()
        self.backend = TritonBackend(pool, None, num_heads=heads.num_heads)
        first = list(range(1, 1 + NUM_RANDOM))
        self.backend.seal(first, first)
        filled, rest = 1 + NUM_RANDOM, num_pages - NUM_RANDOM
        while rest > 0:
            count = min(filled - 1, rest)
            pool.sealed[filled : filled + count] = pool.sealed[1 : 1 + count]
            filled, rest = filled + count, rest - count
        self._ids = {Pool.SEALED: self._shuffled(num_pages), Pool.OPEN: self._shuffled(num_slots)}
        self._taken = dict.fromkeys(Pool, 0)

    @staticmethod
    def _shuffled(count: int) -> list[int]:
        return (1 + torch.randperm(count, generator=torch.Generator().manual_seed(0))).tolist()

    def free_all(self) -> None:
        self._taken = dict.fromkeys(Pool, 0)

    def _take(self, pool: Pool, count: int) -> tuple[PageRef, ...]:
        start = self._taken[pool]
        ids = self._ids[pool][start : start + count]
        if len(ids) < count:
            raise ValueError(f"{count} pages are wanted of {len(self._ids[pool]) - start} that are left")
        self._taken[pool] += count
        return tuple(PageRef(pool, id) for id in ids)

    def decode_step(self, context: int, batch: int) -> AttentionStep:
        """Rows of `context` tokens each, their own included, in pages of their own."""
        num_sinks = self.layout.recipe.sink_pages
        num_sealed = -(-context // self.heads.page_tokens) - 1 - num_sinks
        rows = [
            DecodeRow(
                context - 1,
                self._take(Pool.OPEN, num_sinks) + self._take(Pool.SEALED, num_sealed) + self._take(Pool.OPEN, 1),
            )
            for _ in range(batch)
        ]
        return AttentionStep(tuple(rows), ())

    def prefill_step(self, count: int, length: int) -> AttentionStep:
        """Chunks of new sequences."""
        size, num_sinks = self.heads.page_tokens, self.layout.recipe.sink_pages
        chunks = []
        for _ in range(count):
            is_open = [index < num_sinks or (index + 1) * size > length for index in range(-(-length // size))]
            targets = [self._take(Pool.OPEN if slot else Pool.SEALED, 1)[0] for slot in is_open]
            chunks.append(PrefillChunk(0, length, (), tuple(targets)))
        return AttentionStep((), tuple(chunks))

    def activations(self, rows: int) -> tuple[Tensor, Tensor, Tensor]:
        """q fp32 [rows, heads, D], k and v [rows, kv_heads, D] in the model's dtype."""
        heads, dtype = self.heads, self.backend.pool.open.dtype
        q = torch.randn(rows, heads.num_heads, heads.head_dim, device=self._device)
        k, v = (torch.randn(rows, heads.num_kv_heads, heads.head_dim, device=self._device).to(dtype) for _ in "kv")
        return q, k, v

    def __len__(self) -> int:
        return len(self._ids[Pool.SEALED])


def decode_bytes(layout: PageLayout, context: int, batch: int) -> int:
    """What decode rows must read of the pools."""
    num_sinks = layout.recipe.sink_pages
    num_full = -(-context // layout.page_tokens) - 1
    own = context - num_full * layout.page_tokens
    slots = layout.slot_bytes * (num_sinks + own / layout.page_tokens)
    return round(batch * ((num_full - num_sinks) * layout.page_bytes + slots))


def decode_pages(layout: PageLayout, context: int) -> int:
    """Sealed pages of one row."""
    return -(-context // layout.page_tokens) - 1 - layout.recipe.sink_pages
