"""What `PageCache` must do, by brute force: cached pages in a dictionary, and whenever room is needed a scan over all
of them with the policy's definition. It shares nothing with the heap, the keys and the counters of the cache."""

import random
from collections.abc import Callable
from dataclasses import dataclass

from engine.kv.cache import CacheOptions, PageCache
from engine.kv.prefix import Node
from engine.kv.reclaim import Reclaim
from engine.kv.sizing import PoolSize
from kernels.format.layout import PageRef, Pool
from tests.unit.simulation import Clock

Path = tuple[int, ...]  # pages have one token, so a page is known by the tokens up to its own
HOST = "host"
Place = Pool | str


@dataclass(eq=False)
class Page:
    path: Path
    place: Place
    created: float
    last_use: float
    priority: int
    num_hits: int = 0
    num_holders: int = 1
    is_awaited: bool = False  # to be restored next


Choose = Callable[[list[Page], float], Page]


def oldest(pages: list[Page]) -> Page:
    return min(pages, key=lambda page: page.last_use)


def lru(pages: list[Page], now: float) -> Page:
    return oldest(pages)


def lfu(pages: list[Page], now: float) -> Page:
    least = min(page.num_hits for page in pages)
    return oldest([page for page in pages if page.num_hits == least])


def fifo(pages: list[Page], now: float) -> Page:
    return min(pages, key=lambda page: page.created)


def slru(seconds: float) -> Choose:
    def choose(pages: list[Page], now: float) -> Page:
        probation = [page for page in pages if page.num_hits == 0 or now - page.last_use >= seconds]
        return oldest(probation or pages)

    return choose


def priority(seconds: float | None = None) -> Choose:
    def choose(pages: list[Page], now: float) -> Page:
        expired = [page for page in pages if seconds is not None and now - page.last_use >= seconds]
        least_urgent = max(page.priority for page in pages)
        return oldest(expired or [page for page in pages if page.priority == least_urgent])

    return choose


class Model:
    """Cached pages, and who goes first. `victims` lists the paths that were chosen; `num_odd` counts those that `lru`
    would not have chosen."""

    def __init__(self, choose: Choose, host_choose: Choose, sinks: int, capacity: dict[Place, int]):
        self.choose = {Pool.OPEN: choose, Pool.SEALED: choose, HOST: host_choose}
        self.sinks = sinks
        self.capacity = capacity
        self.pages: dict[Path, Page] = {}
        self.victims: list[tuple[Place, Path]] = []
        self.num_odd = 0

    def pool(self, path: Path) -> Pool:
        return Pool.OPEN if len(path) <= self.sinks else Pool.SEALED

    def num_free(self, place: Place) -> int:
        return self.capacity[place] - sum(page.place is place for page in self.pages.values())

    def num_spare(self, place: Place, without: set[Path]) -> int:
        """Free pages and pages that nobody holds, but for those on the path `without`."""
        spare = [page for page in self.pages.values() if page.num_holders == 0 and page.path not in without]
        return self.num_free(place) + sum(page.place is place for page in spare)

    def make_room(self, place: Pool, now: float) -> None:
        if self.num_free(place):
            return
        gone = self._choose(place, now)
        if self.capacity[HOST] == 0:
            self._forget(gone)
            return
        if not self.num_free(HOST):
            self._forget(self._choose(HOST, now))
        gone.place = HOST

    def _choose(self, place: Place, now: float) -> Page:
        able = [page for page in self.pages.values() if page.place is place and self._can_go(page)]
        gone = self.choose[place](able, now)
        self.victims.append((place, gone.path))
        self.num_odd += gone is not oldest(able)
        return gone

    def _can_go(self, page: Page) -> bool:
        """Leaves before parents: in a pool, those are pages with nothing behind them there that could go."""
        behind = [other for other in self.pages.values() if other.path[:-1] == page.path]
        if page.place is HOST:
            return not behind and not page.is_awaited
        return page.num_holders == 0 and not any(b.place is page.place and b.num_holders == 0 for b in behind)

    def _forget(self, page: Page) -> None:
        """With all behind it, which could not match any more."""
        self.pages = {path: other for path, other in self.pages.items() if path[: len(page.path)] != page.path}


class Rig:
    """A cache and the model, told the same; after every page that is taken they must hold the same pages."""

    def __init__(self, reclaim: Reclaim, model: Model, host_reclaim: Reclaim | None = None):
        self.clock = Clock()
        self.model = model
        size = PoolSize(1 + model.capacity[Pool.SEALED], 1 + model.capacity[Pool.OPEN], 0)
        options = CacheOptions(
            reclaim=reclaim, host_reclaim=host_reclaim or reclaim, num_records=model.capacity[HOST], slot_records=1
        )
        self.cache = PageCache(size, 1, model.sinks, options, self.clock)
        self.active: list[list[tuple[Path, PageRef]]] = []
        self.num_tokens = 0

    def tick(self, rng: random.Random) -> float:
        """Some time passes, in steps that doubles hold exactly."""
        self.clock.now += rng.randint(1, 64) / 64
        return self.clock.now

    def rounds(self, rng: random.Random, count: int) -> None:
        for _ in range(count):
            if len(self.active) > 3 or (self.active and rng.random() < 0.5):
                self.release(rng, self.active.pop(rng.randrange(len(self.active))))
            else:
                self.request(rng)

    def request(self, rng: random.Random) -> None:
        """Somebody takes a path of the tree, with some new pages behind it, if there is room."""
        model = self.model
        start = rng.choice([(), *model.pages])
        path = [start[: depth + 1] for depth in range(len(start))]
        new: list[Path] = []
        for _ in range(rng.randint(0, 2) if start else rng.randint(1, 3)):
            self.num_tokens += 1
            new.append((*(new[-1] if new else start), self.num_tokens))
        for pool in Pool:
            taken = [p for p in path if model.pages[p].place is HOST and model.pool(p) is pool]
            if len(taken) + sum(model.pool(p) is pool for p in new) > model.num_spare(pool, set(path)):
                return
        urgency, now = rng.randint(-1, 2), self.tick(rng)
        root = self.cache.tree.root("")
        nodes = [self.node(p) for p in path]
        self.cache.hit(nodes, urgency)
        held = list(zip(path, self.cache.take(nodes), strict=True))
        self._take(path, urgency, now)
        parent = nodes[-1] if nodes else root
        for p in new:
            now = self.tick(rng)
            model.make_room(model.pool(p), now)
            page = self.cache.allocate(model.pool(p))
            parent = self.cache.insert(parent, (p[-1],), page, urgency)
            model.pages[p] = Page(p, model.pool(p), now, now, urgency)
            held.append((p, page))
            self.compare()
        self.active.append(held)

    def _take(self, path: list[Path], urgency: int, now: float) -> None:
        pages = [self.model.pages[p] for p in path]
        for page in pages:
            page.num_hits += 1
            page.last_use = now
            page.priority = min(page.priority, urgency)
            page.is_awaited = page.place is HOST
            page.num_holders += 1
        for page in pages:
            if page.is_awaited:
                self.model.make_room(self.model.pool(page.path), now)
                page.place, page.is_awaited = self.model.pool(page.path), False
        self.compare()

    def release(self, rng: random.Random, held: list[tuple[Path, PageRef]]) -> None:
        for path, page in rng.sample(held, len(held)):
            now = self.tick(rng)
            self.cache.release(page)
            of_model = self.model.pages[path]
            of_model.num_holders -= 1
            if of_model.num_holders == 0:
                of_model.last_use = now
        self.compare()

    def node(self, path: Path) -> Node:
        node = self.cache.tree.root("")
        for token in path:
            node = node.children[(token,)]
        return node

    def compare(self) -> None:
        """Which page lies where."""
        ours: dict[Path, Place] = {}
        for _, node in self.cache.tree.nodes():
            up = node
            path: Path = ()
            while up.parent is not None:
                path, up = (*up.tokens, *path), up.parent
            ours[path] = node.page.pool if node.page is not None else HOST
        assert ours == {page.path: page.place for page in self.model.pages.values()}
