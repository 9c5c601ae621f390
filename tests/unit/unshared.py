"""A simulation of requests that share nothing, where more can be said about each step: who is admitted, how the budget
is spent, and which page lies where."""

from engine.kv.sizing import num_sequence_pages
from engine.plan import StepPlan
from engine.sequence import Sequence
from engine.waiting import MAX_CANDIDATES, MAX_PASSED_OVER
from kernels.format.layout import Pool
from tests.unit.simulation import Geometry, Simulation


class UnsharedSimulation(Simulation):
    """Add requests with `add_unique`. All that a sequence can find in the tree is what it computed itself before it was
    preempted."""

    def __init__(
        self, *, page_tokens: int, sink_pages: int, max_num_seqs: int, max_step_tokens: int, num_pages: int
    ) -> None:
        geometry = Geometry(
            page_tokens=page_tokens,
            sink_pages=sink_pages,
            max_num_seqs=max_num_seqs,
            max_step_tokens=max_step_tokens,
            num_pages=num_pages,
        )
        super().__init__(geometry)
        self._before: tuple[Sequence, ...] = ()
        self._preemptions = 0

    def step(self) -> StepPlan:
        self._before, self._preemptions = self.scheduler.running, self.scheduler.num_preemptions
        return super().step()

    def _check_plan(self, plan: StepPlan) -> None:
        super()._check_plan(plan)
        admitted = [sequence for sequence in self.scheduler.running if sequence not in self._before]
        if self.scheduler.num_preemptions > self._preemptions:
            assert admitted == []
        else:
            self._check_admission(plan)
            self._check_budget(plan, admitted)
        self._check_pages(plan)

    def _check_admission(self, plan: StepPlan) -> None:
        """Whoever is next in line could not be admitted."""
        running, g = self.scheduler.running, self.geometry
        waiting = sorted((s for s in self.live if s not in running), key=lambda s: (s.request.priority, s.arrival))
        if not waiting:
            return
        equals = [s for s in waiting if s.request.priority == waiting[0].request.priority][:MAX_CANDIDATES]
        late = [s for s in equals if s.num_passed_over >= MAX_PASSED_OVER]
        first = late[0] if late else max(equals, key=self._num_cached_pages)
        cached = self._num_cached_pages(first)
        left = g.max_step_tokens - plan.attention.num_rows
        pages = num_sequence_pages(len(first.tokens), g.page_tokens, g.sink_pages)
        assert (
            len(running) == g.max_num_seqs
            or left < min(len(first.tokens) - cached * g.page_tokens, g.page_tokens)
            or self.cache.sealed.num_available < pages
            or self.cache.open.num_available < 1 + g.sink_pages
        ), "the first in the queue could have been admitted"

    def _num_cached_pages(self, sequence: Sequence) -> int:
        """Leading pages, but for that of the last token, that the tree holds."""
        node, count, size = self.cache.tree.root(""), 0, self.geometry.page_tokens
        while (count + 1) * size < len(sequence.tokens):
            child = node.children.get(tuple(sequence.tokens[count * size : (count + 1) * size]))
            if child is None or child.page is None:
                break
            node, count = child, count + 1
        return count

    def _check_budget(self, plan: StepPlan, admitted: list[Sequence]) -> None:
        """Every decoding sequence has a row; chunks take what is left, whole pages at a time, most urgent first."""
        running, size = self.scheduler.running, self.geometry.page_tokens

        def is_decoding(sequence: Sequence) -> bool:
            return sequence.num_computed_tokens > 0 and len(sequence.tokens) == sequence.num_computed_tokens + 1

        rows = [s for s in running if s not in admitted and is_decoding(s)]
        assert [item.sequence for item in plan.decode][: len(rows)] == rows
        resumed = [item.sequence for item in plan.decode][len(rows) :]
        assert sorted(s.arrival for s in resumed) == sorted(s.arrival for s in admitted if is_decoding(s))
        left = self.geometry.max_step_tokens - len(rows)
        starting = list(dict.fromkeys(item.sequence for item in plan.chunks if item.sequence in admitted))
        expected = []
        for sequence in [s for s in running if s not in admitted and s not in rows] + starting:
            pending = len(sequence.tokens) - sequence.num_computed_tokens
            length = pending if pending <= left else left // size * size
            if length:
                expected.append((sequence, sequence.num_computed_tokens, length, length == pending))
            left -= length
        assert left >= len(resumed)
        assert [(c.sequence, c.chunk.start, c.chunk.length, c.is_last) for c in plan.chunks] == expected
        assert plan.sampled == rows + resumed + [item.sequence for item in plan.chunks if item.is_last]

    def _check_pages(self, plan: StepPlan) -> None:
        size, sinks = self.geometry.page_tokens, self.geometry.sink_pages
        held = [page for sequence in self.scheduler.running for page in sequence.pages]
        held += [item.seal_to for item in plan.decode if item.seal_to]
        assert len(held) == len(set(held))
        assert not any(item.is_shared for item in plan.decode)
        for item in plan.decode:
            assert len(item.row.pages) == item.row.position // size + 1
        for scheduled in plan.chunks:
            assert (*scheduled.chunk.context, *scheduled.chunk.targets) == tuple(scheduled.sequence.pages)
            assert len(scheduled.chunk.context) * size == scheduled.chunk.start
        for sequence in self.scheduler.running:
            end = sequence.num_computed_tokens
            end += sum(item.chunk.length for item in plan.chunks if item.sequence is sequence)
            for index, page in enumerate(sequence.pages):
                is_sealed = index >= sinks and (index + 1) * size <= end
                assert page.pool is (Pool.SEALED if is_sealed else Pool.OPEN)
