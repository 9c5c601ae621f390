"""docs/hooks.md: its example runs and decides as the text says, and its tables are those of the code."""

import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from engine.kv.cache import CacheOptions, PageCache
from engine.kv.reclaim import RECLAIMS, Lru, PageUse, Reclaim, make_reclaim
from engine.kv.shrink import LARGEST, SHRINKS
from engine.kv.sizing import PoolSize
from kernels.format.layout import Pool
from tests.unit.simulation import SLOT_RECORDS, Clock, Geometry, Simulation

TEXT = (Path(__file__).parents[2] / "docs/hooks.md").read_text()
NUM_PAGES = 6


@pytest.fixture
def policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reclaim:
    """Saved under the name that the text gives it, and chosen as in the command of the text."""
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
    assert len(code.splitlines()) <= 25
    (name,) = re.findall(r"Save this as `(.+?)`", TEXT)
    (option,) = re.findall(r"make serve ARGS=\"--reclaim (\S+)\"", TEXT)
    (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    return make_reclaim(option, "--reclaim")


class Cache:
    """`NUM_PAGES` sealed pages, each of which is a prefix of its own, known by its one token."""

    def __init__(self, policy: Reclaim):
        self.clock = Clock()
        self.cache = PageCache(PoolSize(1 + NUM_PAGES, 1, 0), 1, 0, CacheOptions(reclaim=policy), self.clock)

    def use(self, token: int, priority: int = 0, times: int = 1) -> None:
        for _ in range(times):
            self.clock.now += 1
            root = self.cache.tree.root("")
            node = root.children.get((token,))
            if node is not None:
                self.cache.hit([node], priority)
                (page,) = self.cache.take([node])
            else:
                page = self.cache.allocate(Pool.SEALED)
                self.cache.insert(root, (token,), page, priority)
            self.cache.release(page)

    def order(self) -> list[int]:
        """Fill the cache anew, and see who goes when. The new pages stay, as requests that run would hold them."""
        root, order = self.cache.tree.root(""), []
        for _ in range(NUM_PAGES):
            before = set(root.children)
            self.cache.allocate(Pool.SEALED)
            (gone,) = before - set(root.children)
            order.append(gone[0])
        return order


def test_the_example_decides_as_the_text_says(policy: Reclaim) -> None:
    cache = Cache(policy)
    cache.use(1, times=4)  # three of these found it cached
    cache.use(2, times=3)
    cache.use(3, priority=2)
    cache.use(4, priority=0)
    cache.use(5, priority=2)
    cache.use(6, priority=2, times=4)
    # Batch by last use; then interactive ones by last use, of which 2 is one hit short; then stems, batch first.
    assert cache.order() == [3, 5, 2, 4, 6, 1]


def test_a_stem_that_nobody_used_for_an_hour_is_like_any_other_page(policy: Reclaim) -> None:
    cache = Cache(policy)
    cache.use(1, times=4)
    cache.use(2, times=4)
    cache.clock.now += 3598 - 4  # 1 was last used 3598 seconds ago, 2 was 3594
    for token in (3, 4, 5, 6):
        cache.use(token)
    assert policy.ttl == 3600
    assert cache.order() == [1, 3, 4, 5, 6, 2]


def test_only_the_first_pages_are_stems(policy: Reclaim) -> None:
    stem, deep = (policy.key(PageUse(0.0, 1.0, 9, 0, depth), 2.0) for depth in (31, 32))
    assert deep < stem  # type: ignore[operator]


@pytest.mark.parametrize("is_lru", [True, False])
def test_the_example_keeps_what_many_requests_begin_with(policy: Reclaim, is_lru: bool) -> None:
    geometry = Geometry(num_pages=20, sink_pages=0, vocab=1000)
    options = CacheOptions(reclaim=Lru() if is_lru else policy, slot_records=SLOT_RECORDS, is_poisoning=True)
    simulation = Simulation(geometry, options)
    stem = tuple(range(17))
    for _ in range(4):
        simulation.add(stem, 1)
        simulation.run()
    for _ in range(12):
        simulation.add_unique(20, 3)
        simulation.run()
    (last,) = simulation.add(stem, 1)
    simulation.run()
    assert last.num_cached_tokens == (0 if is_lru else 16)


def rows(header: str) -> dict[str, list[str]]:
    """A table of the text by the code in its first column."""
    lines = TEXT[TEXT.index(header) :].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {row[0].strip("`"): row for row in cells}


def test_the_tables_name_what_there_is() -> None:
    assert list(rows("| `--reclaim` |")) == list(RECLAIMS)
    for name, policy in RECLAIMS.items():
        for field in fields(policy):
            default = "none" if field.default is None else f"{field.default:.0f}"
            assert f"`{name}` ({default} if not given)" in TEXT
    assert [f"page.{name}" for name in rows("| `page.` |")] == [f"page.{field.name}" for field in fields(PageUse)]
    shrinks = rows("| `--shrink`, `kv_shrink` |")
    assert list(shrinks) == ["none", *SHRINKS]
    for name, shrink in SHRINKS.items():
        assert all(field.default is not MISSING for field in fields(shrink))
        assert re.findall(r"(\w+)=(\d+)", shrinks[name][2]) == [(f.name, str(f.default)) for f in fields(shrink)]
    assert f"integers from 1 to {LARGEST}" in " ".join(TEXT.split())
