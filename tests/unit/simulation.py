"""The scheduler under a runner that invents tokens. The pool is a dictionary from page to the tokens written there, so
that reading a page that is not one's own shows."""

from engine.kv.pages import PagePools
from engine.kv.sizing import PoolSize, num_slots
from engine.request import Request, SamplingParams
from engine.scheduler import Scheduler, StepPlan
from engine.sequence import Sequence
from kernels.format.layout import NULL_PAGE, PageRef, Pool


class Simulation:
    """`num_pages` sealed pages (without the null page) of `page_tokens` tokens. Every step is checked."""

    def __init__(self, *, page_tokens: int, sink_pages: int, max_num_seqs: int, max_step_tokens: int, num_pages: int):
        self.page_tokens, self.sink_pages = page_tokens, sink_pages
        self.max_num_seqs, self.max_step_tokens = max_num_seqs, max_step_tokens
        size = PoolSize(1 + num_pages, num_slots(max_num_seqs, sink_pages), 0)
        self.pools = PagePools(size, page_tokens=page_tokens, sink_pages=sink_pages)
        self.scheduler = Scheduler(self.pools, max_num_seqs=max_num_seqs, max_step_tokens=max_step_tokens)
        self.live: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.memory: dict[PageRef, list[int]] = {}
        self._arrivals = 0
        self._tokens = 0

    def add(self, prompt_length: int, max_tokens: int, priority: int = 0) -> Sequence:
        prompt = tuple(self._new_token() for _ in range(prompt_length))
        sampling = SamplingParams(max_tokens=max_tokens)
        request = Request(id=str(self._arrivals), prompt=prompt, sampling=sampling, priority=priority)
        sequence = Sequence(request, self._arrivals)
        self._arrivals += 1
        self.live.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def _new_token(self) -> int:
        """Every token of a simulation is another one: content then names its place."""
        self._tokens += 1
        return self._tokens

    def cancel(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.live.remove(sequence)
        self.scheduler.check()

    def step(self) -> StepPlan:
        before = self.scheduler.running
        preemptions = self.scheduler.num_preemptions
        plan = self.scheduler.plan()
        preempted = [sequence for sequence in before if sequence not in self.scheduler.running]
        admitted = [sequence for sequence in self.scheduler.running if sequence not in before]
        assert len(preempted) == self.scheduler.num_preemptions - preemptions
        self._check_victims(before, preempted)
        self._check_admission(plan, preempted, admitted)
        self._check_budget(plan, admitted)
        self._check_pages(plan)
        for sequence in self._run(plan):
            sequence.tokens.append(self._new_token())
            if sequence.num_generated_tokens == sequence.request.sampling.max_tokens:
                self.scheduler.remove(sequence)
                self.live.remove(sequence)
                self.finished.append(sequence)
        self.scheduler.check()
        return plan

    def run(self) -> list[StepPlan]:
        """Step until every request has ended, which must happen."""
        plans = []
        # The oldest moves on in every step, or else computes its prompt again, once.
        bound = sum(2 * (len(s.tokens) + s.request.sampling.max_tokens) for s in self.live)
        while not self.scheduler.is_idle:
            plans.append(self.step())
            assert len(plans) <= bound
        assert self.live == []
        self.check_all_free()
        return plans

    def check_all_free(self) -> None:
        for pool in (self.pools.open, self.pools.sealed):
            assert (pool.num_held, pool.num_available) == (0, pool.num_total)

    def _check_victims(self, before: tuple[Sequence, ...], preempted: list[Sequence]) -> None:
        oldest = min(before, key=lambda s: s.arrival, default=None)
        order = sorted((s for s in before if s is not oldest), key=lambda s: (-s.request.priority, -s.arrival))
        assert set(preempted) == set(order[: len(preempted)])
        for sequence in preempted:
            assert (sequence.pages, sequence.num_computed_tokens, sequence.num_reserved_pages) == ([], 0, 0)

    def _check_admission(self, plan: StepPlan, preempted: list[Sequence], admitted: list[Sequence]) -> None:
        running = self.scheduler.running
        assert len(running) <= self.max_num_seqs
        assert list(running) == sorted(running, key=lambda s: (s.request.priority, s.arrival))
        waiting = [s for s in self.live if s not in running]
        if preempted:
            assert admitted == []
        elif waiting:
            first = min(waiting, key=lambda s: (s.request.priority, s.arrival))
            assert all((s.request.priority, s.arrival) < (first.request.priority, first.arrival) for s in admitted)
            left = self.max_step_tokens - plan.attention.num_rows
            pages = 1 + max(0, (len(first.tokens) - 1) // self.page_tokens - self.sink_pages)
            assert (
                len(running) == self.max_num_seqs
                or left < min(len(first.tokens), self.page_tokens)
                or self.pools.sealed.num_available < pages
                or self.pools.open.num_available < 1 + self.sink_pages
            ), "the first in the queue could have been admitted"

    def _check_budget(self, plan: StepPlan, admitted: list[Sequence]) -> None:
        """Every decoding sequence has a row; chunks take what is left, whole pages at a time, most urgent first."""
        running = self.scheduler.running
        decoding = [s for s in running if s.num_computed_tokens and len(s.tokens) == s.num_computed_tokens + 1]
        assert [item.sequence for item in plan.decode] == decoding
        left = self.max_step_tokens - len(decoding)
        old = [s for s in running if s not in admitted and s not in decoding]
        expected = []
        for sequence in [*old, *admitted]:
            pending = len(sequence.tokens) - sequence.num_computed_tokens
            length = pending if pending <= left else left // self.page_tokens * self.page_tokens
            if length:
                expected.append((sequence, sequence.num_computed_tokens, length, length == pending))
            left -= length
        assert left >= 0
        assert [(c.sequence, c.chunk.start, c.chunk.length, c.is_last) for c in plan.chunks] == expected
        for item in plan.chunks:
            assert item.chunk.start % self.page_tokens == 0
            assert item.is_last or (item.chunk.start + item.chunk.length) % self.page_tokens == 0
        assert plan.decode or plan.chunks, "a step without work"
        assert plan.sampled == decoding + [item.sequence for item in plan.chunks if item.is_last]

    def _check_pages(self, plan: StepPlan) -> None:
        held = [page for sequence in self.scheduler.running for page in sequence.pages]
        held += [item.seal_to for item in plan.decode if item.seal_to]
        assert len(held) == len(set(held))
        assert all(page.id != NULL_PAGE for page in held)
        for item in plan.decode:
            position = item.row.position
            assert position == len(item.sequence.tokens) - 1
            assert item.row.pages == tuple(item.sequence.pages)
            assert len(item.row.pages) == position // self.page_tokens + 1
            is_full = (position + 1) % self.page_tokens == 0
            is_sink = position // self.page_tokens < self.sink_pages
            assert (item.seal_to is not None) == (is_full and not is_sink)
            assert item.seal_to is None or item.seal_to.pool is Pool.SEALED
        for scheduled in plan.chunks:
            assert (*scheduled.chunk.context, *scheduled.chunk.targets) == tuple(scheduled.sequence.pages)
            assert len(scheduled.chunk.context) * self.page_tokens == scheduled.chunk.start
        for sequence in self.scheduler.running:
            for index, page in enumerate(sequence.pages):
                end = sequence.num_computed_tokens + sum(c.chunk.length for c in plan.chunks if c.sequence is sequence)
                is_sealed = index >= self.sink_pages and (index + 1) * self.page_tokens <= end
                assert page.pool is (Pool.SEALED if is_sealed else Pool.OPEN)

    def _run(self, plan: StepPlan) -> list[Sequence]:
        """Write and read the pages as a model would; returns who gets a token."""
        size = self.page_tokens
        for item in plan.decode:
            tokens, position = item.sequence.tokens, item.row.position
            own = item.row.pages[-1]
            content = self.memory[own] if position % size else []
            self.memory[own] = [*content, tokens[position]]
            assert [token for page in item.row.pages for token in self.memory[page]] == tokens
            if item.seal_to:
                self.memory[item.seal_to] = self.memory.pop(own)
        for scheduled in plan.chunks:
            chunk, tokens = scheduled.chunk, scheduled.sequence.tokens
            for index, page in enumerate(chunk.targets):
                start = chunk.start + index * size
                self.memory[page] = tokens[start : min(start + size, chunk.start + chunk.length)]
            read = [token for page in (*chunk.context, *chunk.targets) for token in self.memory[page]]
            assert read == tokens[: chunk.start + chunk.length]
        self.scheduler.commit(plan)
        return plan.sampled
