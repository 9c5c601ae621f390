"""Continuous batching: which tokens the next step computes. Pure Python over counters and page ids, no torch.

Decode rows come first, prefill chunks fill what is left of `max_step_tokens`. Chunks start on a page boundary, and
every chunk but a sequence's last ends on one.
"""

import bisect
from dataclasses import dataclass, field

from engine.kv.pages import PagePools
from engine.sequence import Sequence
from kernels.format.layout import PageRef
from kernels.format.step import AttentionStep, DecodeRow, PrefillChunk


@dataclass(frozen=True, slots=True)
class ScheduledDecode:
    """One token of a running sequence. `seal_to`: where its page goes after the step, if the token fills it."""

    sequence: Sequence
    row: DecodeRow
    seal_to: PageRef | None


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """A prefill chunk. `is_last`: no known token is left behind it, so its last row is sampled."""

    sequence: Sequence
    chunk: PrefillChunk
    is_last: bool


@dataclass(slots=True)
class StepPlan:
    """What one step does. Row order: `decode`, then the tokens of `chunks`."""

    decode: list[ScheduledDecode] = field(default_factory=list)
    chunks: list[ScheduledChunk] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        return not self.decode and not self.chunks

    @property
    def attention(self) -> AttentionStep:
        return AttentionStep(tuple(item.row for item in self.decode), tuple(item.chunk for item in self.chunks))

    @property
    def sampled(self) -> list[Sequence]:
        """Sequences that get a token from this step, in row order."""
        return [item.sequence for item in self.decode] + [item.sequence for item in self.chunks if item.is_last]


class Scheduler:
    """The waiting queue, the running set, and the planning of steps."""

    def __init__(self, pools: PagePools, *, max_num_seqs: int, max_step_tokens: int):
        self.pools = pools
        self._max_num_seqs = max_num_seqs
        self._max_step_tokens = max_step_tokens
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self.num_preemptions = 0

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def running(self) -> tuple[Sequence, ...]:
        """Admitted sequences, most urgent first."""
        return tuple(self._running)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    def add(self, sequence: Sequence) -> None:
        bisect.insort(self._waiting, sequence, key=lambda other: other.urgency)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence between steps, waiting or running, and free its pages."""
        (self._running if sequence in self._running else self._waiting).remove(sequence)
        self.pools.free(sequence)

    def plan(self) -> StepPlan:
        """Reserve pages for the next step. Preempts where a running sequence could not go on otherwise."""
        plan = StepPlan()
        preemptions = self.num_preemptions
        for sequence in list(self._running):
            if sequence.is_decoding and self._make_room(sequence, plan):
                seal_to = self.pools.extend_decode(sequence)
                row = DecodeRow(sequence.num_computed_tokens, tuple(sequence.pages))
                plan.decode.append(ScheduledDecode(sequence, row, seal_to))
        budget = self._max_step_tokens - len(plan.decode)
        for sequence in self._running:
            if not sequence.is_decoding:
                budget -= self._plan_chunk(sequence, budget, plan)
        if self.num_preemptions == preemptions:  # what was just freed is for those who ran short
            self._admit(budget, plan)
        return plan

    def _admit(self, budget: int, plan: StepPlan) -> None:
        while self._waiting and len(self._running) < self._max_num_seqs:
            sequence = self._waiting[0]
            if self._chunk_length(sequence, budget) == 0 or not self.pools.can_admit(sequence):
                return
            self.pools.admit(self._waiting.pop(0))
            bisect.insort(self._running, sequence, key=lambda other: other.urgency)
            budget -= self._plan_chunk(sequence, budget, plan)

    def _chunk_length(self, sequence: Sequence, budget: int) -> int:
        pending = sequence.num_pending_tokens
        return pending if pending <= budget else budget - budget % self.pools.page_tokens

    def _plan_chunk(self, sequence: Sequence, budget: int, plan: StepPlan) -> int:
        """Plan the next chunk of a sequence if budget and pages allow. Returns its tokens."""
        length = self._chunk_length(sequence, budget)
        if length == 0 or not self.pools.can_extend(sequence, length):
            return 0
        start, context = sequence.num_computed_tokens, tuple(sequence.pages)
        targets = self.pools.extend_prefill(sequence, length)
        chunk = PrefillChunk(start, length, context, targets)
        plan.chunks.append(ScheduledChunk(sequence, chunk, length == sequence.num_pending_tokens))
        return length

    def _make_room(self, sequence: Sequence, plan: StepPlan) -> bool:
        """Preempt others until the next token of `sequence` finds pages. False where it was itself preempted."""
        while sequence in self._running and not self.pools.can_extend(sequence, 1):
            self._preempt(self._victim(), plan)
        return sequence in self._running

    def _victim(self) -> Sequence:
        """The newest of the least urgent, but never the oldest one running: so that one always finishes."""
        oldest = min(self._running, key=lambda sequence: sequence.arrival)
        others = [sequence for sequence in self._running if sequence is not oldest]
        if not others:
            raise RuntimeError("the pool cannot hold one sequence; its size was checked at start")
        return max(others, key=lambda sequence: sequence.urgency)

    def _preempt(self, victim: Sequence, plan: StepPlan) -> None:
        """Give up a sequence's pages, planned ones too; it waits and computes its tokens again."""
        for item in [item for item in plan.decode if item.sequence is victim]:
            plan.decode.remove(item)
            if item.seal_to is not None:
                self.pools.release(item.seal_to)
        self._running.remove(victim)
        self.pools.free(victim)
        victim.num_computed_tokens = 0
        self.num_preemptions += 1
        self.add(victim)

    def commit(self, plan: StepPlan) -> None:
        """The step ran: count its tokens and move filled pages to the sealed pool."""
        for item in plan.decode:
            item.sequence.num_computed_tokens += 1
            if item.seal_to is not None:
                self.pools.seal(item.sequence, item.seal_to)
        for chunk in plan.chunks:
            chunk.sequence.num_computed_tokens += chunk.chunk.length

    def check(self) -> None:
        """Raise RuntimeError unless every page is accounted for. Call between steps."""
        self.pools.check(self._running)
        if any(sequence.pages or sequence.num_reserved_pages for sequence in self._waiting):
            raise RuntimeError("a waiting sequence holds pages")
