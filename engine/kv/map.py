"""The pool in detail, for those who watch it: every page, the prefix tree, what runs. It is copied between two steps in
bounded time; what the copy is made into need not hold up the engine. No torch."""

import heapq
from collections.abc import Iterable
from collections.abc import Sequence as List
from dataclasses import dataclass
from enum import Enum
from itertools import count, islice
from typing import NamedTuple

from engine.kv.allocator import Allocator
from engine.kv.pages import PagePools
from engine.kv.prefix import Node, Tokens
from engine.kv.report import PageSizes, open_tier, sealed_tier
from engine.sequence import Sequence
from kernels.format.layout import PageRef, Pool

MAX_RUNS = 250
MAX_NODES = 1000  # that are looked at: what most of the time goes to
MAX_ROWS = 256
OPEN, SINK, WINDOW = "o", "s", "w"  # marks of held slots


@dataclass(frozen=True, slots=True)
class Pages:
    """All pages of one pool from 1 on: how many sequences hold each, and whether the prefix tree keeps it. `marks`: by
    id, what held slots are for."""

    holders: List[int]
    is_kept: List[bool]
    marks: dict[int, str]

    @classmethod
    def of(cls, allocator: Allocator, marks: dict[int, str]) -> "Pages":
        return cls(*allocator.pages(), marks)


class RunState(Enum):
    """Where the pages of a run lie: in a pool, in host memory, or nowhere yet, because a sequence computes them."""

    POOL = "pool"
    HOST = "host"
    COMPUTING = "computing"


class Run(NamedTuple):
    """Pages of the prefix tree, one behind the other without a branch, all in one state and held by as many sequences.

    `id` says where its first page lies, so it stays while that does; `parent` is that of the run in front of it, None
    for the first pages of a text; `root` numbers the salts. `tokens`, `num_hits` and `idle`, the seconds since the last
    use, are of its first page. `num_children` pages lie behind its last one; `is_cut`: that one, too, belongs to it.
    """

    id: str
    parent: str | None
    root: int
    state: RunState
    num_pages: int
    num_holders: int
    num_hits: int
    idle: float
    tokens: Tokens
    num_children: int
    is_cut: bool


@dataclass(frozen=True, slots=True)
class Row:
    """A running sequence and the pages that it holds, those of its window too."""

    request_id: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    is_decoding: bool
    pages: tuple[PageRef, ...]


@dataclass(frozen=True, slots=True)
class PoolMap:
    """The pool between two steps. `root_sizes`: first pages of each salt, shown or not. `num_nodes` pages are in the
    tree, in pools and in host memory. `num_tokens` lie in pages of both pools that are not free, and take `num_bytes`,
    of which pages of the open pool take `num_open_bytes`. `now`: the clock's seconds."""

    now: float
    page_tokens: int
    sealed: Pages
    open: Pages
    runs: tuple[Run, ...]
    root_sizes: tuple[int, ...]
    num_nodes: int
    rows: tuple[Row, ...]
    num_running: int
    num_tokens: int
    num_bytes: int
    num_open_bytes: int


def pool_map(pools: PagePools, running: list[Sequence], sizes: PageSizes) -> PoolMap:
    """Call between steps. Its time is bounded but for copying a number for each page and each page of a row."""
    cache, size = pools.cache, pools.page_tokens
    tiers = (sealed_tier(pools, sizes), open_tier(pools, running, sizes))
    sealed_bytes, open_bytes = ((tier.num_total - tier.pages["free"]) * tier.page_bytes for tier in tiers)
    sealed, slots = Pages.of(cache.sealed, {}), Pages.of(cache.open, _slot_marks(running, cache.open, size))
    now = cache.clock()
    walk = _Walk(sealed, slots, now)
    return PoolMap(
        now=now,
        page_tokens=size,
        sealed=sealed,
        open=slots,
        runs=tuple(walk.runs([root for _, root in cache.tree.roots()])),
        root_sizes=tuple(len(root.children) for _, root in cache.tree.roots()),
        num_nodes=len(cache.nodes) + cache.host.num_nodes,
        rows=tuple(_row(sequence) for sequence in running[:MAX_ROWS]),
        num_running=len(running),
        num_tokens=sum(sum(tier.tokens.values()) for tier in tiers),
        num_bytes=sealed_bytes + open_bytes,
        num_open_bytes=open_bytes,
    )


def _slot_marks(running: Iterable[Sequence], slots: Allocator, page_tokens: int) -> dict[int, str]:
    """Held slots hold sink pages, but for those of windows and those being filled."""
    marks = {page: SINK for page in range(1, slots.num_total + 1) if slots.references(page)}
    for sequence in running:
        for page in sequence.window:
            marks[page.id] = WINDOW
        if sequence.num_computed_tokens % page_tokens:
            marks[sequence.pages[-1].id] = OPEN
    return marks


def _row(sequence: Sequence) -> Row:
    return Row(
        sequence.request.id,
        sequence.num_prompt_tokens,
        sequence.num_cached_tokens,
        sequence.num_generated_tokens,
        sequence.is_decoding,
        (*sequence.pages, *sequence.window),
    )


class _Walk:
    """Through the tree, to what is in use first and then to what was used last, until there are enough runs."""

    def __init__(self, sealed: Pages, slots: Pages, now: float):
        self._sealed = sealed.holders
        self._slots = slots.holders
        self._now = now
        self._num_left = MAX_NODES
        self._heap: list[tuple[bool, float, int, Node, str | None, int]] = []
        self._order = count()

    def runs(self, roots: List[Node]) -> list[Run]:
        found: list[Run] = []
        for number, root in enumerate(roots, start=1):
            self._push(root, None, number)
        while self._heap and len(found) < MAX_RUNS:
            *_, order, first, parent, number = heapq.heappop(self._heap)
            last, run = self._follow(first, order, parent, number)
            found.append(run)
            if not run.is_cut:
                self._push(last, run.id, number)
        return found

    def _push(self, parent: Node, run: str | None, root: int) -> None:
        """The newest children first: of very many, others are not looked at."""
        for node in islice(reversed(parent.children.values()), self._num_left):
            self._num_left -= 1
            is_idle = node.is_filled and not self._num_holders(node)
            heapq.heappush(self._heap, (is_idle, -node.last_use, next(self._order), node, run, root))

    def _num_holders(self, node: Node) -> int:
        if node.page is None:
            return 0
        pool, id = node.page
        return (self._sealed if pool is Pool.SEALED else self._slots)[id - 1]

    def _follow(self, first: Node, order: int, parent: str | None, root: int) -> tuple[Node, Run]:
        """The run that begins with `first`, and its last node."""
        num_holders, state, is_loose = self._num_holders(first), _state(first), first.is_loose
        last, num_pages, most = first, 1, 1 + self._num_left
        sealed, slots, is_cut = self._sealed, self._slots, False
        while len(last.children) == 1 and not is_cut:
            (child,) = last.children.values()
            if child.is_loose is not is_loose:
                break
            if not is_loose:  # else it is in a pool and held by none; that goes for most, and is quick to see
                if child.page is None:
                    if _state(child) is not state:
                        break
                else:
                    pool, id = child.page
                    if (sealed if pool is Pool.SEALED else slots)[id - 1] != num_holders:
                        break
            if num_pages < most:
                last, num_pages = child, num_pages + 1
            else:
                is_cut = True
        self._num_left -= num_pages - 1
        idle = 0.0 if state is RunState.COMPUTING else self._now - first.last_use
        name, num_children = _run_id(first, order), len(last.children)
        run = Run(
            name, parent, root, state, num_pages, num_holders, first.num_hits, idle, first.tokens, num_children, is_cut
        )
        return last, run


def _state(node: Node) -> RunState:
    if node.page is not None:
        return RunState.POOL
    return RunState.COMPUTING if node.records is None else RunState.HOST


def _run_id(node: Node, order: int) -> str:
    if node.page is not None:
        pool, id = node.page
        return f"sealed-{id - 1}" if pool is Pool.SEALED else f"open-{id - 1}"
    return f"computing-{order}" if node.records is None else f"host-{node.records[0]}"
