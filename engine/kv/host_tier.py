"""Which host records are free, cached or in use by swapped sequences. No torch."""

from collections.abc import Callable

from engine.kv.allocator import Allocator
from engine.kv.prefix import Node
from engine.kv.reclaim import Reclaim
from engine.kv.reclaim_queue import ReclaimQueue


class HostTier:
    """Records of host memory, and the nodes of the prefix tree whose content they hold.

    A node may be forgotten when nothing is behind it. `queue` holds those that may.
    """

    def __init__(self, num_records: int, policy: Reclaim, clock: Callable[[], float]):
        self.allocator = Allocator(1 + num_records)
        self.queue = ReclaimQueue(policy, clock)
        self.num_nodes = 0

    @property
    def is_there(self) -> bool:
        return self.allocator.num_total > 0

    def allocate(self, count: int, remove: Callable[[Node], None]) -> tuple[int, ...] | None:
        """Records with one holder; None where all are promised or in use. `remove` takes a node, and its records, out
        of the tree to make room."""
        if not self.allocator.can_reserve(count):
            return None
        while self.allocator.num_free < count:
            node = self.queue.pop()
            if node is None:
                return None
            remove(node)
        return tuple(self.allocator.allocate() for _ in range(count))

    def cache(self, node: Node, records: tuple[int, ...]) -> None:
        """The node's content lies in `records` now, which the caller held and lets go."""
        for record in records:
            self.allocator.keep(record)
            self.allocator.release(record)
        node.records = records
        self.num_nodes += 1
        self.rank(node)

    def release(self, records: tuple[int, ...]) -> None:
        """Records of a swapped page are free again."""
        for record in records:
            self.allocator.release(record)

    def uncache(self, node: Node) -> None:
        """The node's content, if it lies in records, need not be there any more."""
        if node.records is not None:
            self.queue.discard(node)
            for record in node.records:
                self.allocator.forget(record)
            node.records = None
            self.num_nodes -= 1

    def pin(self, node: Node) -> None:
        """Keep a node's records while room is made for it in its pool."""
        node.is_pinned = True
        self.queue.discard(node)

    def rank(self, node: Node) -> None:
        """Something changed behind a node: see whether it may go."""
        self.queue.discard(node)
        if node.records is not None and not node.children and not node.is_pinned:
            self.queue.push(node)
