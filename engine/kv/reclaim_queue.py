"""Cached pages in the order in which they go: a heap over the keys of a policy. No torch."""

import heapq
from collections.abc import Callable, Sequence

from engine.kv.prefix import Node
from engine.kv.reclaim import Reclaim

# The number orders equal keys, so that nodes are never compared.
_Entry = tuple[float | Sequence[float], int, Node]


class ReclaimQueue:
    """The nodes that may go now. A node that is touched leaves and comes back with a new key."""

    def __init__(self, policy: Reclaim, clock: Callable[[], float]):
        self._policy = policy
        self._ttl = policy.ttl
        self._clock = clock
        self._heap: list[_Entry] = []
        self._entries: dict[Node, _Entry] = {}
        self._expiring: list[tuple[float, int, _Entry]] = []  # a heap by last use
        self._num_pushes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, node: Node) -> bool:
        return node in self._entries

    def push(self, node: Node) -> None:
        """Add a node, or rank it again."""
        now = self._clock()
        self._num_pushes += 1
        entry = (self._policy.key(node.use, now), self._num_pushes, node)
        self._entries[node] = entry
        heapq.heappush(self._heap, entry)
        if self._ttl is not None and now - node.last_use < self._ttl:
            heapq.heappush(self._expiring, (node.last_use, self._num_pushes, entry))
        most = 2 * len(self._entries) + 64  # above it, most belong to nodes that were touched since
        if len(self._heap) > most:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)
        if len(self._expiring) > most:
            self._expiring = [item for item in self._expiring if self._is_current(item[2])]
            heapq.heapify(self._expiring)

    def discard(self, node: Node) -> None:
        self._entries.pop(node, None)

    def pop(self) -> Node | None:
        """Take out the node that goes first; None where there is none."""
        self._rank_expired()
        while self._heap:
            entry = heapq.heappop(self._heap)
            if self._is_current(entry):
                del self._entries[entry[2]]
                return entry[2]
        return None

    def _is_current(self, entry: _Entry) -> bool:
        return self._entries.get(entry[2]) is entry

    def _rank_expired(self) -> None:
        """Give new keys to the nodes that were not used for the policy's ttl."""
        now = self._clock()
        while self._expiring and self._ttl is not None and now - self._expiring[0][0] >= self._ttl:
            _, number, entry = heapq.heappop(self._expiring)
            if self._is_current(entry):
                node = entry[2]
                ranked = (self._policy.key(node.use, now), number, node)
                self._entries[node] = ranked
                heapq.heappush(self._heap, ranked)
