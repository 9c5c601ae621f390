"""Pages that outlive their sequence: kept by the prefix tree, reclaimed when memory is needed, moved to host memory and
back. No torch.

A page of the tree that no sequence holds is *loose*. It may go as soon as nothing loose lies behind it in its pool; a
sink page goes with everything behind it, because without it none of that could match. Where there is host memory a page
moves there instead, and on from there when that is full.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from engine.kv.allocator import Allocator
from engine.kv.host_tier import HostTier
from engine.kv.moves import Move, Poison, Restore, Save
from engine.kv.prefix import Node, PrefixTree, Tokens
from engine.kv.reclaim import Lru, PageUse, Reclaim
from engine.kv.reclaim_queue import ReclaimQueue
from engine.kv.sizing import PoolSize
from engine.kv.stats import PoolStats, Reclaimed
from kernels.format.layout import PageRef, Pool


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheOptions:
    """`num_records`: host records without the null record; 0: no host memory. `slot_records`: those of one slot.
    `is_poisoning`: fill pages with NaN when they become free."""

    reclaim: Reclaim = Lru()
    host_reclaim: Reclaim = Lru()
    num_records: int = 0
    slot_records: int = 1
    is_poisoning: bool = False


class PageCache:
    """Both pools and host memory as page ids, with the prefix tree over them. Not thread-safe.

    `nodes`: those whose page lies in a pool. `moves` collects, in order, the copies that a plan needs done before its
    step. Nodes are stamped with the seconds of `clock`.
    """

    def __init__(
        self, size: PoolSize, page_tokens: int, sink_pages: int, options: CacheOptions, clock: Callable[[], float]
    ):
        self.sealed = Allocator(size.num_pages)
        self.open = Allocator(size.num_slots)
        self.host = HostTier(options.num_records, options.host_reclaim, clock)
        self.tree = PrefixTree(page_tokens)
        self.stats = PoolStats()
        self.moves: list[Move] = []
        self.sink_pages = sink_pages
        self._options = options
        self.clock = clock
        self.nodes: dict[PageRef, Node] = {}
        self.sealed_queue = ReclaimQueue(options.reclaim, clock)
        self.open_queue = ReclaimQueue(options.reclaim, clock)

    def allocator(self, pool: Pool) -> Allocator:
        return self.open if pool is Pool.OPEN else self.sealed

    def pool_at(self, depth: int) -> Pool:
        """Where a full page lies that has `depth` pages in front of it."""
        return Pool.OPEN if depth < self.sink_pages else Pool.SEALED

    def num_records(self, pool: Pool) -> int:
        """Host records that one page takes."""
        return self._options.slot_records if pool is Pool.OPEN else 1

    def allocate(self, pool: Pool) -> PageRef:
        """A page with one holder; reclaims one where none is free. The caller has checked that one is available."""
        allocator = self.allocator(pool)
        if not allocator.num_free:
            self._reclaim(pool)
        return PageRef(pool, allocator.allocate())

    def hold(self, node: Node) -> None:
        """One holder more for a page of the tree that lies in a pool."""
        assert node.page is not None
        self.allocator(node.page.pool).retain(node.page.id)
        if node.is_loose:
            self._set_loose(node, False)

    def release(self, page: PageRef) -> None:
        """One holder less. A page that nobody holds stays cached if it is in the tree."""
        if not self.allocator(page.pool).release(page.id):
            return
        node = self.nodes.get(page)
        if node is None:
            self._poison(page)
        else:
            node.last_use = self.clock()
            self._set_loose(node, True)

    def hit(self, path: Sequence[Node], priority: int) -> None:
        """A request found `path`; it counts once."""
        now = self.clock()
        for node in path:
            self.stats.reuse_gap.add(now - node.last_use)
            node.num_hits += 1
            node.last_use = now
            node.priority = min(node.priority, priority)

    def insert(self, parent: Node, tokens: Tokens, page: PageRef, priority: int) -> Node:
        """Put a full page that the caller holds into the tree. Where the tree has its content already, the caller's
        hold moves to the page that is there, `node.page`, and the caller's is given back."""
        node = self.tree.add(parent, tokens)
        now = self.clock()
        if not node.is_filled:
            node.created, node.priority = now, priority
        node.last_use, node.priority = now, min(node.priority, priority)
        if node.page is None:
            self.host.uncache(node)
            self._place(node, page)
        elif node.page != page:
            self.release(page)
            self.hold(node)
            self.stats.num_adopted_pages += 1
        return node

    def take(self, path: Sequence[Node]) -> list[PageRef]:
        """Hold all of `path`, bringing back what lies in host memory. The caller has checked that it fits."""
        for node in path:
            if node.page is not None:
                self.hold(node)
            else:
                self.host.pin(node)
        for node in path:
            if node.page is None:
                self._restore(node)
        return [node.page for node in path if node.page is not None]

    def _restore(self, node: Node) -> None:
        assert node.records is not None and node.parent is not None
        page = self.allocate(self.pool_at(node.depth))
        self.moves.append(Restore(node.records, page))
        self.stats.num_restored_pages += 1
        node.is_pinned = False
        self.host.uncache(node)
        self._place(node, page)

    def swap_out(self, page: PageRef) -> tuple[int, ...]:
        """Copy a page that the caller gives up to host records that the caller had reserved."""
        records = self.host.allocate(self.num_records(page.pool), self._drop_from_host)
        assert records is not None
        self.moves.append(Save(page, records))
        self.stats.num_saved_pages += 1
        self.release(page)
        return records

    def swap_in(self, pool: Pool, records: tuple[int, ...]) -> PageRef:
        page = self.allocate(pool)
        self.moves.append(Restore(records, page))
        self.stats.num_restored_pages += 1
        self.host.release(records)
        return page

    def load(self, parent: Node, tokens: Tokens, use: PageUse) -> Node | None:
        """A place for a page that lay on disk, cached: in its pool, else in host memory; None where nothing is free, or
        where it is there already. Parents come first."""
        if (there := parent.children.get(tokens)) is not None and there.is_filled:
            return None
        pool = self.pool_at(use.depth)
        count = self.num_records(pool)
        records: tuple[int, ...] | None = None
        if parent.records is not None or not self.allocator(pool).num_free:
            if self.host.allocator.num_free >= count:
                records = self.host.allocate(count, self._drop_from_host)
            if records is None:
                return None
        node = self.tree.add(parent, tokens)
        node.created, node.last_use = use.created, use.last_use
        node.num_hits, node.priority = use.num_hits, use.priority
        if records is None:
            page = self.allocate(pool)
            self._place(node, page)
            self.allocator(pool).release(page.id)
            self._set_loose(node, True)
        else:
            self.host.cache(node, records)
            self.host.rank(parent)
        return node

    def take_moves(self) -> list[Move]:
        moves, self.moves = self.moves, []
        return moves

    def _place(self, node: Node, page: PageRef) -> None:
        """The node's content lies in `page` now, which somebody holds."""
        node.page, node.owner = page, None
        node.num_loose_children = 0  # children of a page that was not in a pool are not either
        self.allocator(page.pool).keep(page.id)
        self.nodes[page] = node

    def _set_loose(self, node: Node, is_loose: bool) -> None:
        page, parent = node.page, node.parent
        assert page is not None and parent is not None
        queue = self.queue(page.pool)
        shares_pool = parent.page is not None and parent.page.pool is page.pool
        node.is_loose = is_loose
        if is_loose:
            if shares_pool:
                parent.num_loose_children += 1
                queue.discard(parent)
            if node.num_loose_children == 0:
                queue.push(node)
            return
        queue.discard(node)
        if shares_pool:
            parent.num_loose_children -= 1
            if parent.is_loose and parent.num_loose_children == 0:
                queue.push(parent)

    def queue(self, pool: Pool) -> ReclaimQueue:
        return self.open_queue if pool is Pool.OPEN else self.sealed_queue

    def _reclaim(self, pool: Pool) -> None:
        """Make one page of `pool` free."""
        node = self.queue(pool).pop()
        if node is None:
            raise RuntimeError(f"no {pool.value} page is free and none can be reclaimed")
        if pool is Pool.SEALED:
            self._evict(node, Reclaimed.SEALED_NEEDED)
            return
        stack = [node]
        while stack:
            node = stack.pop()
            if self._evict(node, Reclaimed.SLOT_NEEDED):
                stack.extend(child for child in node.children.values() if child.is_loose)

    def flush(self) -> int:
        """Forget every cached page that no sequence holds, in host memory too. Returns how many. Between steps."""
        before = self.stats.reclaimed[Reclaimed.FLUSHED]
        for queue in (self.open_queue, self.sealed_queue):
            while (node := queue.pop()) is not None:
                self._remove(node, Reclaimed.FLUSHED)
        for node in [node for _, node in self.tree.nodes() if node.page is None]:
            if node.records is not None:  # else it went with one above it
                self._remove(node, Reclaimed.FLUSHED)
        return self.stats.reclaimed[Reclaimed.FLUSHED] - before

    def _evict(self, node: Node, reason: Reclaimed) -> bool:
        """Take a loose node's page. Returns whether the node lives on in host memory."""
        assert node.page is not None
        count = self.num_records(node.page.pool)
        records = self.host.allocate(count, self._drop_from_host) if self.host.is_there else None
        if records is None:
            self._remove(node, reason)
            return False
        for child in list(node.children.values()):
            if child.page is not None and not child.is_loose:  # held by a sequence that dropped this page
                self._remove(child, Reclaimed.DETACHED)
        self.moves.append(Save(node.page, records))
        self.stats.num_saved_pages += 1
        self._count(node, reason)
        self._vacate(node)
        self.host.cache(node, records)
        return True

    def _remove(self, top: Node, reason: Reclaimed) -> None:
        """Take a node and all below it out of the tree; pages that sequences hold stay theirs."""
        nodes = list(top.subtree())
        self.tree.unlink(top)
        for node in nodes:
            if node.page is not None:
                self._count(node, reason)
                self._vacate(node)
            elif node.records is not None:
                self.stats.reclaimed[reason] += 1
                self.host.uncache(node)
            node.owner = None
        assert top.parent is not None
        self.host.rank(top.parent)

    def _vacate(self, node: Node) -> None:
        """The node's page is no longer the tree's."""
        page = node.page
        assert page is not None
        if node.is_loose:
            self._set_loose(node, False)
        node.page = None
        del self.nodes[page]
        if self.allocator(page.pool).forget(page.id):
            self._poison(page)

    def _drop_from_host(self, node: Node) -> None:
        self._remove(node, Reclaimed.HOST_NEEDED)

    def _count(self, node: Node, reason: Reclaimed) -> None:
        now = self.clock()
        self.stats.reclaimed[reason] += 1
        self.stats.lifetime.add(now - node.created)
        self.stats.idle.add(now - node.last_use)

    def _poison(self, page: PageRef) -> None:
        if self._options.is_poisoning:
            self.moves.append(Poison(page))
