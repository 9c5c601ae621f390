"""Continuous batching: which tokens the next step computes. Pure Python over counters and page ids, no torch.

Decode rows come first, prefill chunks fill what is left of `max_step_tokens`. Chunks start on a page boundary, and
every chunk but a sequence's last ends on one. A sequence whose next page another one is computing waits for it.
"""

import bisect
from collections.abc import Sequence as List

from engine.errors import invalid
from engine.kv.map import PoolMap, pool_map
from engine.kv.pages import PagePools
from engine.kv.report import PageSizes, snapshot
from engine.kv.stats import PoolSnapshot
from engine.plan import Fork, ScheduledChunk, ScheduledDecode, StepPlan
from engine.sequence import Sequence
from engine.waiting import WaitingQueue
from kernels.format.layout import Pool
from kernels.format.step import DecodeRow


class Scheduler:
    """The waiting queue, the running set, and the planning of steps."""

    def __init__(self, pools: PagePools, *, max_num_seqs: int, max_step_tokens: int):
        self.pools = pools
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_step_tokens
        self._waiting = WaitingQueue(pools)
        self._running: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        return self._waiting.num_sequences

    @property
    def num_waiting_tokens(self) -> int:
        return sum(len(sequence.tokens) for sequence in self._waiting.sequences)

    @property
    def num_preemptions(self) -> int:
        return self.pools.cache.stats.num_preemptions

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Admitted sequences, most urgent first."""
        return tuple(self._running)

    @property
    def is_idle(self) -> bool:
        return not self._waiting.num_sequences and not self._running

    def refuse_oversized(self, sequence: Sequence) -> None:
        """Raise RequestError where a sequence, with its siblings, could never run."""
        if sequence.num_seats > self._max_num_seqs:
            raise invalid(f"n is {sequence.num_seats}; this server runs at most {self._max_num_seqs} sequences", "n")
        self.pools.refuse_oversized(sequence)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence, with its siblings if it leads a fork."""
        self._waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence between steps, waiting or running, and free its pages. If siblings wait for it, the first
        of them leads in its place, and finds in the tree what was computed."""
        if sequence.leader is not None:
            sequence.leader.siblings.remove(sequence)
            return
        if sequence.is_running:
            self._halt(sequence)
        else:
            self._waiting.remove(sequence)
        self.pools.free(sequence)
        if sequence.siblings:
            self._waiting.add(sequence.abdicate())

    def plan(self) -> StepPlan:
        """Reserve pages for the next step. Preempts where a running sequence could not go on otherwise."""
        plan = StepPlan()
        preemptions = self.num_preemptions
        in_prefill: list[Sequence] = []
        for sequence in list(self._running):
            if not sequence.is_decoding:
                in_prefill.append(sequence)
            elif self._make_room(sequence, 1, plan):
                self._plan_decode(sequence, plan)
        budget = self._max_step_tokens - len(plan.decode)
        for sequence in in_prefill:
            if sequence.is_running:
                budget -= self._plan_prefill(sequence, budget, plan)
        if self.num_preemptions == preemptions:  # what was just freed is for those who ran short
            self._admit(budget, plan)
        plan.moves = self.pools.cache.take_moves()
        return plan

    def _admit(self, budget: int, plan: StepPlan) -> None:
        num_seats = self._max_num_seqs - sum(sequence.num_seats for sequence in self._running)
        while num_seats > 0 and (sequence := self._waiting.next()) is not None:
            if self._chunk_length(sequence, len(sequence.matched) * self.pools.page_tokens, budget) == 0:
                return
            if sequence.num_seats > num_seats or not self.pools.can_admit(sequence):
                return
            self._waiting.take(sequence)
            self.pools.admit(sequence)
            self._run(sequence)
            num_seats -= sequence.num_seats
            if sequence.is_decoding:
                self._plan_decode(sequence, plan)
                budget -= 1
            else:
                budget -= self._plan_prefill(sequence, budget, plan)

    def _run(self, sequence: Sequence) -> None:
        bisect.insort(self._running, sequence, key=lambda other: other.urgency)
        sequence.is_running = True

    def _halt(self, sequence: Sequence) -> None:
        self._running.remove(sequence)
        sequence.is_running = False

    def _chunk_length(self, sequence: Sequence, start: int, budget: int) -> int:
        size = self.pools.page_tokens
        pending = len(sequence.tokens) - max(start, sequence.num_computed_tokens)
        most = min(budget, self.pools.rules.chunk_pages(sequence) * size)
        return pending if pending <= most else most - most % size

    def _plan_decode(self, sequence: Sequence, plan: StepPlan) -> None:
        seal_to, is_shared = self.pools.step.extend_decode(sequence)
        row = DecodeRow(sequence.num_computed_tokens, self.pools.step.row_pages(sequence), sequence.is_row_observed)
        plan.decode.append(ScheduledDecode(sequence, row, seal_to, is_shared, self._forks(sequence)))

    def _plan_prefill(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """Plan the next tokens of a sequence if the budget allows. Returns how many."""
        length = self._chunk_length(sequence, sequence.num_computed_tokens, budget)
        if length == 0 or not self._make_room(sequence, length, plan):
            return 0
        is_last = length == sequence.num_pending_tokens
        chunks = self.pools.step.extend_prefill(sequence, length)
        for number, (chunk, seal_to) in enumerate(chunks, start=1):
            is_end = is_last and number == len(chunks)
            forks = self._forks(sequence) if is_end else ()
            plan.chunks.append(ScheduledChunk(sequence, chunk, is_end, forks, seal_to))
        return length

    def _forks(self, sequence: Sequence) -> tuple[Fork, ...]:
        """Slots for siblings, where the leader's last page will not be full. Their seats were taken at admission."""
        if not sequence.siblings:
            return ()
        cache = self.pools.cache
        is_full = len(sequence.tokens) % self.pools.page_tokens == 0
        return tuple(Fork(sibling, None if is_full else cache.allocate(Pool.OPEN)) for sibling in sequence.siblings)

    def _make_room(self, sequence: Sequence, length: int, plan: StepPlan) -> bool:
        """Preempt others until the next `length` tokens of `sequence` find pages. False where it was itself
        preempted."""
        while sequence.is_running and not self.pools.step.can_extend(sequence, length):
            self._preempt(self._victim(), plan)
        return sequence.is_running

    def _victim(self) -> Sequence:
        """The newest of the least urgent, but never the oldest one running: so that one always finishes."""
        oldest = min(self._running, key=lambda sequence: sequence.arrival)
        others = [sequence for sequence in self._running if sequence is not oldest]
        if not others:
            raise RuntimeError("the pool cannot hold one sequence; its size was checked at start")
        return max(others, key=lambda sequence: sequence.urgency)

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        """Give up a sequence's pages, planned ones too. It waits, and computes again what does not stay cached; where
        that is not possible, it takes its pages with it to host memory."""
        for page in plan.cancel(victim):
            self.pools.cache.release(page)
        self._halt(victim)
        self.pools.preempt(victim)
        self._waiting.add(victim)

    def commit(self, plan: StepPlan, mass: List[List[float]] = (), marks: List[List[int]] = ()) -> None:
        """The step ran: count its tokens, seal, share and drop pages, and start forks.

        For each of `plan.items`, `mass`: what its observed queries gave to its pages; `marks`: places of marked tokens
        in the last page of its tokens.
        """
        for item, seen in zip(plan.items, mass, strict=False):
            if seen:
                self.pools.observe(item.sequence, seen)
        marked = iter(marks)
        changed: dict[Sequence, None] = {}  # those with a page that is full now, or a prompt that is done, in order
        for row in plan.decode:
            sequence = row.sequence
            sequence.advance(1, next(marked, ()), self.pools.page_tokens)
            if row.seal_to is not None:
                self.pools.seal(sequence, row.seal_to)
            if sequence.num_computed_tokens % self.pools.page_tokens == 0 or not sequence.is_prefilled:
                changed[sequence] = None
        for chunk in plan.chunks:
            chunk.sequence.advance(chunk.chunk.length, next(marked, ()), self.pools.page_tokens)
            changed[chunk.sequence] = None
        self.pools.cache.stats.num_sealed_pages += plan.num_sealed_pages
        for sequence in changed:
            self.pools.slide(sequence)
            self.pools.share(sequence)
        for leading in plan.last_rows:
            for fork in leading.forks:
                self.pools.fork(leading.sequence, fork.sequence, fork.slot)
                self._run(fork.sequence)
                changed[fork.sequence] = None
        for sequence in changed:
            self.pools.shrink(sequence)

    def snapshot(self, sizes: PageSizes) -> PoolSnapshot:
        return snapshot(self.pools, self._running, self._waiting.sequences, self.num_waiting, sizes)

    def map(self, sizes: PageSizes) -> PoolMap:
        return pool_map(self.pools, self._running, sizes)

    def check(self) -> None:
        """Raise RuntimeError unless every page is accounted for. Call between steps."""
        waiting = self._waiting.sequences
        if any(sequence.pages or sequence.window or sequence.num_reserved_pages for sequence in waiting):
            raise RuntimeError("a waiting sequence holds pages")
        self.pools.check(self._running, waiting)
