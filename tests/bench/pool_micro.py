"""What planning costs: the scheduler, the allocator and the prefix tree with pages of real size and no model.

Times are CPU time of this thread, so that other programs on the machine do not count.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median, quantiles

from engine.kv.cache import CacheOptions, PageCache
from engine.kv.pages import PagePools
from engine.kv.prefix import Node
from engine.kv.report import PageSizes
from engine.kv.rules import PageRules
from engine.kv.sizing import PoolSize, num_slots
from engine.plan import StepPlan
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from kernels.format.layout import PageRef, Pool

PAGE = 64
ROWS = 64
CONTEXT = 2048  # tokens of a running row
CACHED_PAGES = 20_000
WAITING = 200
LONG_PROMPT = 8192
DECODE_STEPS = 320
PREFILL_STEPS = 64
ENDLESS = 100_000
SYSTEM_PROMPTS, SYSTEM_PAGES, BRANCH_PAGES = 10, 4, 80
VOCAB = range(49152)

clock = time.thread_time


@dataclass(frozen=True, slots=True)
class StepCost:
    """Milliseconds a step; `plan` and `commit` are medians, too."""

    name: str
    num_steps: int
    num_cached_pages: int
    median: float
    p99: float
    largest: float
    plan: float
    commit: float


@dataclass(frozen=True, slots=True)
class CallCost:
    """The median over `num_calls` calls, in microseconds."""

    name: str
    num_calls: int
    median: float


class Bench:
    """A scheduler over a pool that is full: `ROWS` sequences decode, all other pages are cached."""

    def __init__(self, max_num_seqs: int):
        self.rng = random.Random(0)
        num_pages = CACHED_PAGES + ROWS * (CONTEXT // PAGE) + 2 * DECODE_STEPS
        size = PoolSize(1 + num_pages, num_slots(max_num_seqs, 1), 0)
        self.cache = PageCache(size, PAGE, 1, CacheOptions(), time.monotonic)
        rules = PageRules(
            page_tokens=PAGE, sink_pages=1, shrink_sinks=1, num_pages=num_pages, max_chunk_pages=1024 // PAGE
        )
        self.scheduler = Scheduler(PagePools(self.cache, rules), max_num_seqs=max_num_seqs, max_step_tokens=1024)
        self.systems = [self.tokens(SYSTEM_PAGES * PAGE) for _ in range(SYSTEM_PROMPTS)]
        self._num_added = 0
        self._cache_branches()
        self._start_rows()

    def _cache_branches(self) -> None:
        """Prompts behind a few system prompts, until no page is free."""
        while self.cache.sealed.num_free:
            self.add(BRANCH_PAGES * PAGE, 1)
            while not self.scheduler.is_idle:
                self.step()

    def _start_rows(self) -> None:
        """One of the rows fills a page in every step."""
        system_tokens = SYSTEM_PAGES * PAGE
        rows = [self.add(CONTEXT - system_tokens + index, ENDLESS) for index in range(ROWS)]
        while not all(row.is_decoding for row in rows):
            self.step()

    def tokens(self, count: int) -> tuple[int, ...]:
        return tuple(self.rng.choices(VOCAB, k=count))

    def add(self, num_tokens: int, max_tokens: int) -> Sequence:
        """A request with a system prompt and `num_tokens` tokens of its own."""
        prompt = self.rng.choice(self.systems) + self.tokens(num_tokens)
        request = Request(id=str(self._num_added), prompt=prompt, sampling=SamplingParams(max_tokens=max_tokens))
        sequence = Sequence(request, self._num_added)
        self._num_added += 1
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> tuple[float, float]:
        """Milliseconds of `plan` and of `commit`. Tokens are made up."""
        start = clock()
        plan = self.scheduler.plan()
        planned = clock()
        self.scheduler.commit(plan)
        end = clock()
        self._append(plan)
        return 1e3 * (planned - start), 1e3 * (end - planned)

    def _append(self, plan: StepPlan) -> None:
        for sequence in plan.sampled:
            sequence.tokens.append(self.rng.choice(VOCAB))
            if sequence.num_generated_tokens == sequence.request.sampling.max_tokens:
                self.scheduler.remove(sequence)

    def measure(self, name: str, num_steps: int, arrive: Callable[[], object] = lambda: None) -> StepCost:
        gc.collect()  # what was set up before is no part of a step
        costs = []
        for _ in range(num_steps):
            arrive()
            costs.append(self.step())
        steps = [plan + commit for plan, commit in costs]
        plan, commit = (median(part) for part in zip(*costs, strict=True))
        p99 = quantiles(steps, n=100, method="inclusive")[-1]
        num_cached = self.cache.sealed.num_cached
        return StepCost(name, num_steps, num_cached, median(steps), p99, max(steps), plan, commit)


def step_costs() -> Iterator[StepCost]:
    """A step by what runs in it and what waits for it."""
    bench = Bench(ROWS)
    yield bench.measure("decode", DECODE_STEPS)
    for _ in range(WAITING):
        bench.add(LONG_PROMPT, 16)
    yield bench.measure(f"decode; {WAITING} wait for a seat", DECODE_STEPS)
    bench = Bench(ROWS + WAITING)
    bench.add((2 * PREFILL_STEPS + 4) * 1024, 1)
    bench.step()  # matches it for the first time
    yield bench.measure("decode, a chunk", PREFILL_STEPS)
    for _ in range(WAITING):
        bench.add(LONG_PROMPT, 16)
    bench.step()
    yield bench.measure(f"decode, a chunk; {WAITING} wait for their turn", PREFILL_STEPS)
    bench = Bench(ROWS + ROWS)

    def refill() -> None:
        while bench.scheduler.num_waiting < WAITING:
            bench.add(8, 1)

    yield bench.measure(f"decode, {ROWS} of {WAITING} are admitted", PREFILL_STEPS, refill)


def call_costs() -> Iterator[CallCost]:
    """Single operations in the same full pool."""
    bench = Bench(ROWS)
    cache, tree = bench.cache, bench.cache.tree
    long = bench.add(LONG_PROMPT, 1)
    bench.scheduler.remove(long)
    tokens = long.tokens
    parent, path, pages = tree.root("cost"), list[Node](), list[PageRef]()

    def insert(index: int) -> None:
        nonlocal parent
        parent = cache.insert(parent, tree.page_at(tokens, index), pages[index], 0)
        path.append(parent)

    num_pages = len(tokens) // PAGE
    yield _time("take a page that is reclaimed", num_pages, lambda index: pages.append(cache.allocate(_pool(index))))
    yield _time("insert a page", num_pages, insert)
    yield _time("release a page, which stays cached", num_pages, lambda index: cache.release(pages[-1 - index]))
    yield _time("hold a cached page", num_pages, lambda index: cache.hold(path[index]))
    for page in reversed(pages):
        cache.release(page)
    root, found = tree.root("cost"), list[Node]()

    def match(index: int) -> None:
        found.clear()
        tree.extend(found, root, tokens, num_pages)

    yield _time(f"match {num_pages * PAGE} tokens", 100, match)
    assert found == path
    yield _time("match them again", 100, lambda index: tree.extend(found, root, tokens, num_pages))
    yield _time("prove that every page is accounted for", 5, lambda index: bench.scheduler.check())
    yield _time("snapshot", 5, lambda index: bench.scheduler.snapshot(PageSizes(1, 1)))


def _pool(depth: int) -> Pool:
    return Pool.OPEN if depth == 0 else Pool.SEALED


def _time(name: str, num_calls: int, call: Callable[[int], object]) -> CallCost:
    """`call` gets 0, 1, …, and may work on what earlier calls left."""
    costs = []
    for index in range(num_calls):
        start = clock()
        call(index)
        costs.append(clock() - start)
    return CallCost(name, num_calls, 1e6 * median(costs))
