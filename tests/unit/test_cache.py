"""What the random rounds do not do to a cache: pages from disk."""

import pytest

from engine.kv.audit import check_cache
from engine.kv.cache import CacheOptions, PageCache
from engine.kv.reclaim import PageUse
from engine.kv.sizing import PoolSize
from tests.unit.simulation import Clock


def use(depth: int) -> PageUse:
    return PageUse(created=0.0, last_use=0.0, num_hits=0, priority=0, depth=depth)


@pytest.mark.parametrize("num_pages", [0, 3], ids=["in host memory", "in the pool"])
def test_a_page_that_disk_lists_twice_is_taken_once(num_pages: int) -> None:
    options = CacheOptions(num_records=3)
    cache = PageCache(PoolSize(1 + num_pages, 1, 0), 2, 0, options, Clock())
    root = cache.tree.root("")
    first = cache.load(root, (1, 2), use(0))
    assert first is not None and cache.load(root, (1, 2), use(0)) is None
    behind = cache.load(first, (1, 2), use(1))
    assert behind is not None and cache.load(first, (1, 2), use(1)) is None
    check_cache(cache, {}, {}, ())
    assert len(list(cache.tree.nodes())) == 2
    assert cache.sealed.num_cached + cache.host.allocator.num_cached == 2
