"""Carries cached pages over a restart: from the pools and host memory to an archive on disk, and back."""

import logging
import time

import torch
from torch import Tensor

from engine.kv.archive import Archive
from engine.kv.archive_format import SavedPage
from engine.kv.cache import PageCache
from engine.kv.host import HostMemory, PageMover
from engine.kv.moves import num_page_bytes
from engine.kv.prefix import Node
from engine.kv.reclaim import PageUse
from kernels.backend import PoolTensors

log = logging.getLogger(__name__)


class CacheKeeper:
    """Call `restore` before the first step and `save` after the last."""

    def __init__(
        self, archive: Archive, cache: PageCache, pool: PoolTensors, host: HostMemory | None, mover: PageMover
    ):
        self._archive = archive
        self._cache = cache
        self._pool = pool
        self._host = host
        self._mover = mover

    def restore(self) -> int:
        """Fill free pages, then free host records, with what was saved; parents first. Returns how many pages."""
        nodes: list[Node | None] = []
        now = time.monotonic()
        for saved, data in self._archive.read():
            parent = self._cache.tree.root(saved.salt) if saved.parent is None else nodes[saved.parent]
            node = None
            if parent is not None:
                last_use = now - len(nodes) / 1000  # the times are gone, the order is known
                use = PageUse(now, last_use, saved.num_hits, saved.priority, parent.depth + 1)
                node = self._cache.load(parent, saved.tokens, use)
            nodes.append(node)
            if node is None:
                continue
            if node.page is not None:
                self._pool.record(node.page).copy_(data)
            elif self._host is not None and node.records is not None:
                self._host.put(node.records, data)
        return sum(node is not None for node in nodes)

    def save(self) -> None:
        """Write every cached page, the most recently used first. A disk that does not take them is one warning."""
        self._mover.run(self._cache.take_moves())
        if self._pool.open.is_cuda:  # copies to pinned memory may still be under way
            torch.cuda.synchronize()
        nodes = list(self._cache.tree.nodes())
        last_use = {node: node.last_use for _, node in nodes}
        for _, node in reversed(nodes):  # a page that is still held was used at least as late as those behind it
            assert node.parent is not None
            if node.parent in last_use:
                last_use[node.parent] = max(last_use[node.parent], last_use[node])
        nodes.sort(key=lambda item: (-last_use[item[1]], item[1].depth))
        index = {node: number for number, (_, node) in enumerate(nodes)}
        pages = [
            SavedPage(
                parent=index.get(node.parent) if node.parent is not None else None,
                salt=salt,
                tokens=node.tokens,
                pool=self._cache.pool_at(node.depth),
                priority=node.priority,
                num_hits=node.num_hits,
            )
            for salt, node in nodes
        ]
        try:
            self._archive.write(pages, lambda number: self._read(nodes[number][1]))
        except OSError as error:
            log.warning("cached pages were not saved: %s", error)
        else:
            log.info("%d cached pages were saved", len(pages))

    def close(self) -> None:
        self._archive.close()

    def _read(self, node: Node) -> Tensor:
        if node.page is not None:
            return self._pool.record(node.page).cpu()
        assert node.records is not None and self._host is not None
        data = torch.empty(num_page_bytes(self._cache.pool_at(node.depth), self._pool.layout), dtype=torch.uint8)
        self._host.get(node.records, data)
        return data
