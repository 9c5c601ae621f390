"""Proves that every page is accounted for. Slow: for tests, for an idle engine, and on demand. No torch."""

from collections.abc import Collection, Mapping

from engine.kv.allocator import Allocator
from engine.kv.cache import PageCache
from engine.kv.prefix import Node
from kernels.format.layout import PageRef, Pool


def check_cache(
    cache: PageCache, held: Mapping[PageRef, int], records: Mapping[int, int], owners: Collection[object]
) -> None:
    """Raise RuntimeError unless the pools, host memory and the tree agree with each other and with the sequences.

    `held`, `records`: how many sequences list each page, and each host record. `owners`: sequences that may be
    computing pages of the tree.
    """
    for allocator in (cache.open, cache.sealed, cache.host.allocator):
        allocator.check()
    for pool in Pool:
        ids = {page.id: count for page, count in held.items() if page.pool is pool}
        _check_references(cache.allocator(pool), ids, f"{pool.value} page")
    _check_references(cache.host.allocator, records, "host record")
    nodes = [node for _, node in cache.tree.nodes()]
    in_pools = [node for node in nodes if node.page is not None]
    if len(in_pools) != len(cache.nodes) or any(cache.nodes.get(node.page) is not node for node in in_pools):  # type: ignore[arg-type]
        raise RuntimeError("the tree and the index of its pages differ")
    kept = [record for node in nodes for record in node.records or ()]
    if len(kept) != len(set(kept)) or set(kept) & set(records):
        raise RuntimeError("a host record is used twice")
    num_cached = cache.host.allocator.num_cached
    if num_cached != len(kept):
        raise RuntimeError(f"{num_cached} host records are cached but the tree lists {len(kept)}")
    _expect(cache.host.num_nodes == len(nodes) - len(in_pools), "the number of pages in host memory")
    for node in nodes:
        _check_node(cache, node)
    for _, root in cache.tree.roots():
        for node in root.subtree():
            if node is not root and not node.is_filled and node.owner not in owners:
                raise RuntimeError("a page of the tree waits for a sequence that is gone")


def _check_references(allocator: Allocator, counts: Mapping[int, int], what: str) -> None:
    for page in range(1, allocator.num_total + 1):
        count, listed = allocator.references(page), counts.get(page, 0)
        if count != listed:
            raise RuntimeError(f"{what} {page} has {count} holders but sequences list it {listed} times")


def _check_node(cache: PageCache, node: Node) -> None:
    assert node.parent is not None
    if node.is_pinned or (node.page is not None and node.records is not None):
        raise RuntimeError("a page of the tree lies in two places, or on its way")
    if node.parent.parent is not None and not node.parent.is_filled:
        raise RuntimeError("a page of the tree lies behind one that is not there")
    if node.page is None:
        _expect((node in cache.host.queue) == (not node.children), "the queue of host memory")
        _expect(all(child.page is None for child in node.children.values()), "the order of host memory")
        return
    pool = node.page.pool
    _expect(pool is (Pool.OPEN if node.depth < cache.sink_pages else Pool.SEALED), "the pool of a node")
    _expect(node.is_loose == (cache.allocator(pool).references(node.page.id) == 0), "what is loose")
    loose = sum(
        child.is_loose and child.page is not None and child.page.pool is pool for child in node.children.values()
    )
    _expect(node.num_loose_children == loose, "the count of loose children")
    _expect((node in cache.queue(pool)) == (node.is_loose and loose == 0), "the queue of a pool")


def _expect(holds: bool, what: str) -> None:
    if not holds:
        raise RuntimeError(f"the prefix tree is wrong about {what}")
