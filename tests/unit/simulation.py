"""The scheduler, the pool and the tree under a model of one number a token (tests/unit/oracle.py). Page memory is a
dictionary, so that reading a page that is not one's own, or was moved wrongly, shows in what comes out."""

import random
from collections import defaultdict
from dataclasses import dataclass

from engine.kv.cache import CacheOptions, PageCache
from engine.kv.moves import Poison, Restore, Save
from engine.kv.pages import PagePools
from engine.kv.rules import PageRules
from engine.kv.shrink import Shrink
from engine.kv.sizing import PoolSize, num_slots
from engine.plan import StepPlan
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler
from engine.sequence import Sequence
from kernels.format.layout import NULL_PAGE, PageRef, Pool
from kernels.format.step import PrefillChunk
from tests.unit.oracle import attention_mass, compute, continuation, next_token, sealed

SLOT_RECORDS = 3


@dataclass(frozen=True)
class Geometry:
    page_tokens: int = 4
    sink_pages: int = 1
    shrink_sinks: int = 1
    window_pages: int = 0
    max_num_seqs: int = 6
    max_step_tokens: int = 24
    num_pages: int = 30
    num_records: int = 0
    spare_slots: int | None = None
    vocab: int = 2


class Clock:
    """Seconds that pass only when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Simulation:
    """Every step is checked, and what every request generated."""

    def __init__(self, geometry: Geometry, options: CacheOptions | None = None):
        self.geometry = g = geometry
        self.clock = Clock()
        options = options or CacheOptions(num_records=g.num_records, slot_records=SLOT_RECORDS, is_poisoning=True)
        slots = num_slots(g.max_num_seqs, g.sink_pages, g.window_pages)
        if g.spare_slots is not None:
            slots = 1 + g.max_num_seqs * (1 + g.sink_pages + 2 * g.window_pages) + g.spare_slots
        self.cache = PageCache(PoolSize(1 + g.num_pages, slots, 0), g.page_tokens, g.sink_pages, options, self.clock)
        rules = PageRules(
            page_tokens=g.page_tokens,
            sink_pages=g.sink_pages,
            window_pages=g.window_pages,
            shrink_sinks=g.shrink_sinks,
            num_pages=g.num_pages,
            max_chunk_pages=-(-g.max_step_tokens // g.page_tokens),
            slot_records=SLOT_RECORDS,
        )
        self.pools = PagePools(self.cache, rules)
        self.scheduler = Scheduler(self.pools, max_num_seqs=g.max_num_seqs, max_step_tokens=g.max_step_tokens)
        self.live: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.memory: dict[PageRef, list[int]] = {}
        self.host: dict[tuple[int, ...], list[int]] = {}
        self.num_computed: defaultdict[Sequence, int] = defaultdict(int)
        self.arrivals = 0

    def add(
        self,
        prompt: tuple[int, ...],
        max_tokens: int,
        *,
        n: int = 1,
        priority: int = 0,
        salt: str = "",
        shrink: Shrink | None = None,
    ) -> list[Sequence]:
        sequences = []
        for index in range(n):
            sampling = SamplingParams(max_tokens=max_tokens, seed=index)
            request = Request(
                id=str(self.arrivals), prompt=prompt, sampling=sampling, priority=priority, salt=salt, shrink=shrink
            )
            sequences.append(Sequence(request, self.arrivals))
            self.arrivals += 1
        leader, *siblings = sequences
        leader.siblings = siblings
        self.scheduler.refuse_oversized(leader)
        for sibling in siblings:
            sibling.leader = leader
        self.scheduler.add(leader)
        self.live += sequences
        return sequences

    def add_unique(self, prompt_length: int, max_tokens: int, priority: int = 0) -> Sequence:
        """A request that shares nothing with others: its tokens are its own."""
        first = 1000 * (self.arrivals + 1)
        (sequence,) = self.add(tuple(range(first, first + prompt_length)), max_tokens, priority=priority)
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.live.remove(sequence)
        self.scheduler.check()

    def flush(self) -> None:
        """What nobody holds is free afterwards, in both pools and in host memory."""
        self.cache.flush()
        self.scheduler.check()
        cache = self.cache
        assert not any(node.is_loose for node in cache.nodes.values())
        assert all(node.page is not None for _, node in cache.tree.nodes())
        assert cache.flush() == 0

    def step(self) -> StepPlan:
        before = self.scheduler.running
        preemptions = self.scheduler.num_preemptions
        plan = self.scheduler.plan()
        preempted = [sequence for sequence in before if not sequence.is_running]
        assert len(preempted) == self.scheduler.num_preemptions - preemptions
        self._check_victims(before, preempted)
        self._check_plan(plan)
        for sequence, token in self._run(plan):
            sequence.tokens.append(token)
            if sequence.num_generated_tokens == sequence.request.sampling.max_tokens:
                self._finish(sequence)
        self.scheduler.check()
        self.clock.now += 1
        return plan

    def run(self) -> list[StepPlan]:
        """Step until every request has ended, which must happen."""
        plans = []
        # The oldest moves on in every step, or else computes its prompt again, once.
        bound = 10 + sum(2 * (len(s.tokens) + s.request.sampling.max_tokens) for s in self.live)
        while not self.scheduler.is_idle:
            plans.append(self.step())
            assert len(plans) <= bound
        assert self.live == []
        self.check_all_available()
        return plans

    def check_all_available(self) -> None:
        for pool in (self.cache.open, self.cache.sealed, self.cache.host.allocator):
            assert (pool.num_held, pool.num_available) == (0, pool.num_total)

    def _finish(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.live.remove(sequence)
        self.finished.append(sequence)
        g, request = self.geometry, sequence.request
        expected = continuation(
            request.prompt,
            request.sampling.max_tokens,
            request.sampling.seed,
            g.vocab,
            page_tokens=g.page_tokens,
            sink_pages=g.sink_pages,
            shrink_sinks=g.shrink_sinks,
            window_pages=g.window_pages,
            shrink=request.shrink,
        )
        assert sequence.tokens[sequence.num_prompt_tokens :] == expected

    def _check_victims(self, before: tuple[Sequence, ...], preempted: list[Sequence]) -> None:
        oldest = min(before, key=lambda s: s.arrival, default=None)
        order = sorted((s for s in before if s is not oldest), key=lambda s: (-s.request.priority, -s.arrival))
        assert set(preempted) == set(order[: len(preempted)])
        for sequence in preempted:
            assert (sequence.pages, sequence.window, sequence.num_reserved_pages) == ([], [], 0)
            assert sequence.num_computed_tokens == 0 or sequence.swapped

    def _check_plan(self, plan: StepPlan) -> None:
        g, running = self.geometry, self.scheduler.running
        size = g.page_tokens
        assert sum(sequence.num_seats for sequence in running) <= g.max_num_seqs
        assert list(running) == sorted(running, key=lambda s: (s.request.priority, s.arrival))
        assert plan.attention.num_rows <= g.max_step_tokens
        assert plan.decode or plan.chunks, "a step without work"
        decoding = [s for s in running if s.num_computed_tokens and len(s.tokens) == s.num_computed_tokens + 1]
        assert sorted(item.sequence.arrival for item in plan.decode) == sorted(s.arrival for s in decoding)
        held = {page for sequence in running for page in (*sequence.pages, *sequence.window)}
        assert all(page.id != NULL_PAGE for page in held)
        for item in plan.decode:
            position = item.row.position
            assert position == len(item.sequence.tokens) - 1
            assert item.row.pages[-1] == item.sequence.pages[-1] and len(item.row.pages) == len(item.sequence.pages)
            assert g.window_pages or item.row.pages == tuple(item.sequence.pages)
            is_full = (position + 1) % size == 0
            is_sink = position // size < g.sink_pages
            assert (item.seal_to is not None) == (is_full and not is_sink)
            assert item.seal_to is None or item.seal_to.pool is Pool.SEALED
        for scheduled in plan.chunks:
            start, length = scheduled.chunk.start, scheduled.chunk.length
            assert start % size == 0
            assert scheduled.is_last == (start + length == len(scheduled.sequence.tokens))
            assert scheduled.is_last or (start + length) % size == 0
        written = [page for item in plan.chunks for page in item.chunk.targets]
        written += [item.row.pages[-1] for item in plan.decode]
        written += [item.seal_to for item in plan.decode if item.seal_to and not item.is_shared]
        written += [item.seal_to for item in plan.chunks if item.seal_to]
        written += [fork.slot for item in plan.last_rows for fork in item.forks if fork.slot]
        assert len(written) == len(set(written))
        for page in written:  # only pages of one holder are written
            assert self.cache.allocator(page.pool).references(page.id) == 1 and page not in self.cache.nodes

    def _run(self, plan: StepPlan) -> list[tuple[Sequence, int]]:
        """Move, write and read pages as a model would; returns who gets which token."""
        self._move(plan)
        mass: list[list[float]] = []
        last: list[int] = []
        for item in plan.decode:
            own, before = item.row.pages[-1], item.row.pages[:-1]
            content = self.memory[own] if item.row.position % self.geometry.page_tokens else []
            value = compute(item.sequence.tokens[item.row.position], item.row.position, self._read(before) + content)
            self.memory[own] = [*content, value]
            last.append(value)
            seen = [attention_mass(value, self._first(page)) for page in item.row.pages]
            mass.append(seen if item.row.is_observed else [])
            self.num_computed[item.sequence] += 1
        for scheduled in plan.chunks:
            values, seen = self._run_chunk(scheduled.chunk, scheduled.sequence.tokens)
            mass.append(seen)
            self.num_computed[scheduled.sequence] += len(values)
            if scheduled.is_last:
                last.append(values[-1])
        for slot, page in plan.seals:
            self.memory[PageRef(Pool.SEALED, page)] = self.memory[PageRef(Pool.OPEN, slot)]
        for source, target in plan.copies:
            self.memory[PageRef(Pool.OPEN, target)] = list(self.memory[PageRef(Pool.OPEN, source)])
        sampled = plan.sampled
        values = [value for item, value in zip(plan.last_rows, last, strict=True) for _ in (item, *item.forks)]
        self.scheduler.commit(plan, mass)
        vocab = self.geometry.vocab
        return [(s, next_token(v, s.request.sampling.seed, vocab)) for s, v in zip(sampled, values, strict=True)]

    def _run_chunk(self, chunk: PrefillChunk, tokens: list[int]) -> tuple[list[int], list[float]]:
        size, values = self.geometry.page_tokens, []
        seen = [0.0] * (len(chunk.context) + len(chunk.targets))
        for offset in range(chunk.length):
            target = chunk.targets[offset // size]
            if offset % size == 0:
                self.memory[target] = []
            before = (*chunk.context, *chunk.targets[: offset // size])
            position = chunk.start + offset
            value = compute(tokens[position], position, self._read(before) + self.memory[target])
            self.memory[target].append(value)
            values.append(value)
            if offset >= chunk.length - chunk.num_observed:
                for place, page in enumerate((*before, target)):
                    seen[place] += attention_mass(value, self._first(page))
        return values, seen if chunk.num_observed else []

    def _read(self, pages: tuple[PageRef, ...]) -> list[int]:
        """Full pages, as a query behind them reads them."""
        assert all(len(self.memory[page]) == self.geometry.page_tokens for page in pages)
        return [v if page.pool is Pool.OPEN else sealed(v) for page in pages for v in self.memory[page]]

    def _first(self, page: PageRef) -> int:
        return self.memory[page][0]

    def _move(self, plan: StepPlan) -> None:
        for move in plan.moves:
            match move:
                case Save(page, records):
                    assert len(records) == self.cache.num_records(page.pool)
                    for overwritten in [key for key in self.host if set(key) & set(records)]:
                        del self.host[overwritten]
                    self.host[records] = list(self.memory[page])
                case Restore(records, page):
                    self.memory[page] = list(self.host[records])
                case Poison(page):
                    self.memory.pop(page, None)


def random_prompt(rng: random.Random, length: int, vocab: int = 2) -> tuple[int, ...]:
    return tuple(rng.randrange(vocab) for _ in range(length))
