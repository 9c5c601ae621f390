"""Runs an engine step by step and notes what it computes and what full pages hold."""

from collections import Counter
from collections.abc import Sequence as List

from engine.core import EngineCore
from engine.kv.sizing import num_slots
from engine.plan import StepPlan
from engine.request import Finished, Request, Usage
from engine.runner import StepOutput
from engine.sequence import Sequence
from kernels.format.layout import PageLayout
from tests.helpers import Recorder, pool_of

Pages = dict[int, bytes]


class Watch:
    """`num_prompt_rows`: prompt tokens computed, by request. `pages`: bytes of each request's full pages, by their
    index in it; only for requests that drop none."""

    def __init__(self, core: EngineCore):
        self.core = core
        self.num_prompt_rows: Counter[str] = Counter()
        self.pages: dict[str, Pages] = {}
        self.recorders: dict[str, Recorder] = {}
        self._run = core.runner.run
        core.runner.run = self._count  # type: ignore[method-assign]

    def add(self, *fork: Request) -> None:
        recorders = [Recorder() for _ in fork]
        self.recorders |= {request.id: recorder for request, recorder in zip(fork, recorders, strict=True)}
        self.core.add(fork, recorders)

    def step(self) -> None:
        self.core.step()
        self.core.scheduler.check()
        for sequence in self.core.scheduler.running:
            self._note(sequence)

    def run(self, *requests: Request) -> None:
        """Run requests that have no siblings together to their ends, and whatever else is there."""
        for request in requests:
            self.add(request)
        while not self.core.is_idle:
            self.step()

    def tokens(self, id: str) -> tuple[int, ...]:
        return self.recorders[id].token_ids

    def usage(self, id: str) -> Usage:
        terminal = self.recorders[id].terminal
        assert isinstance(terminal, Finished)
        return terminal.usage

    def tell(self, *requests: Request) -> list[tuple[int, ...]]:
        """The tokens of requests that run together; the core is left as it was."""
        self.run(*requests)
        self.close()
        return [self.tokens(request.id) for request in requests]

    def close(self) -> None:
        """Leave the core as it was."""
        self.core.runner.run = self._run  # type: ignore[method-assign]

    def _count(self, plan: StepPlan) -> StepOutput:
        for scheduled in plan.chunks:
            start, end = scheduled.chunk.start, scheduled.chunk.start + scheduled.chunk.length
            sequence = scheduled.sequence
            self.num_prompt_rows[sequence.request.id] += max(0, min(end, sequence.num_prompt_tokens) - start)
        for item in plan.decode:
            self.num_prompt_rows[item.sequence.request.id] += item.row.position < item.sequence.num_prompt_tokens
        return self._run(plan)

    def _note(self, sequence: Sequence) -> None:
        known = self.pages.setdefault(sequence.request.id, {})
        pool = pool_of(self.core)
        for index in range(sequence.num_computed_tokens // pool.layout.page_tokens):
            content = pool.record(sequence.pages[index]).numpy().tobytes()
            assert known.setdefault(index, content) == content, "a full page has changed"


def memory_for(layout: PageLayout, num_pages: int, max_num_seqs: int = 8) -> int:
    """Bytes of a pool with slots for `max_num_seqs` and just `num_pages` sealed pages."""
    slots = num_slots(max_num_seqs, layout.recipe.sink_pages, layout.recipe.window_pages)
    return slots * layout.slot_bytes + (1 + num_pages) * layout.page_bytes


def run_alone(core: EngineCore, requests: List[Request]) -> tuple[dict[str, tuple[int, ...]], dict[str, Pages]]:
    """Tokens and pages of requests that run one after the other and share nothing, by id."""
    watch = Watch(core)
    for request in requests:
        watch.run(request)
    watch.close()
    return {request.id: watch.tokens(request.id) for request in requests}, watch.pages
