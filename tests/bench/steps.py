"""Decode steps of an engine over contexts of a given length, and what of a step goes where."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from engine.core import EngineCore
from engine.engine import Engine
from engine.plan import StepPlan
from engine.request import Request, SamplingParams
from engine.runner import StepOutput
from kernels.format.layout import PageRef, Pool

PARTS = ("plan", "build", "model", "attention", "sample", "emit")


class Copies:
    """Stands for a runner: prompts are not computed, each page of theirs gets the bytes of one that was. So contexts of
    any length are there at once, each in memory of its own."""

    def __init__(self, core: EngineCore, template: StepPlan):
        pool = core.runner.backend.pool
        targets = [ref for item in template.chunks for ref in item.chunk.targets]
        self._pool = pool
        self._mover = core.runner.mover
        self._bytes = {kind: pool.record(next(ref for ref in targets if ref.pool is kind)).clone() for kind in Pool}

    def run(self, plan: StepPlan) -> StepOutput:
        self._mover.run(plan.moves)
        refs = [ref for item in plan.chunks for ref in item.chunk.targets]
        for ref in (*refs, *(PageRef(Pool.SEALED, page) for _, page in plan.seals)):
            self._pool.record(ref).copy_(self._bytes[ref.pool])
        return StepOutput([100] * len(plan.sampled), [[] for _ in plan.items], [])


class Clock:
    """Seconds of each part of the steps that ran while it watched."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    @contextmanager
    def watching(self, core: EngineCore) -> Iterator[None]:
        runner = core.runner
        watched: list[tuple[Any, str]] = [
            (core, "step"),
            (core.scheduler, "plan"),
            (runner, "run"),
            (runner, "_sample"),
            (runner.model, "forward"),
            (runner.model, "logits"),
            (runner.backend, "append"),
            (runner.backend, "attend"),
        ]
        for owner, name in watched:
            setattr(owner, name, self._timed(getattr(owner, name), name))
        try:
            yield
        finally:
            for owner, name in watched:
                delattr(owner, name)

    def _timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self.seconds[name] += time.perf_counter() - start
            return result

        return call

    @property
    def parts(self) -> dict[str, float]:
        """PARTS. `build`: from a plan to tensors, and what is sealed and copied; `emit`: from tokens to events."""
        s = self.seconds
        attention = s["append"] + s["attend"]
        build = s["run"] - s["forward"] - s["logits"] - s["_sample"]
        emit = s["step"] - s["plan"] - s["run"]
        model = s["forward"] + s["logits"] - attention
        return dict(zip(PARTS, (s["plan"], build, model, attention, s["_sample"], emit), strict=True))


def random_prompt(seed: object, length: int) -> tuple[int, ...]:
    source = random.Random(repr(seed))
    return tuple(source.randrange(100, 40000) for _ in range(length))


def seat(engine: Engine, num_sequences: int, context: int, num_tokens: int = 1000) -> None:
    """Requests with contexts of so many tokens, each of which goes on to generate. They end with `clear`."""
    core = engine.core
    page = engine.info.page_tokens
    compute, plan = core.runner.run, StepPlan()

    def watch(watched: StepPlan) -> StepOutput:
        nonlocal plan
        plan = watched
        return compute(watched)

    # one prompt is computed: three pages and a part of one, so that pages of both kinds are there
    core.runner.run = watch  # type: ignore[method-assign]
    _add(core, "template", random_prompt("template", 3 * page + page // 2), 1)
    while not core.is_idle:
        core.step()
    core.runner.run = Copies(core, plan).run  # type: ignore[method-assign]
    for number in range(num_sequences):
        _add(core, str(number), random_prompt((context, number), context), num_tokens)
    while len(core.scheduler.running) < num_sequences or not all(
        sequence.num_generated_tokens for sequence in core.scheduler.running
    ):
        core.step()
    core.runner.run = compute  # type: ignore[method-assign]


def _add(core: EngineCore, name: str, prompt: tuple[int, ...], num_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    core.add([Request(id=name, prompt=prompt, sampling=sampling)], [lambda event: None])


def clear(core: EngineCore) -> None:
    for sequence in list(core.scheduler.running):
        core.cancel(sequence.request.id)
