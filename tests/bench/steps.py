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

PARTS = ("plan", "build", "model", "sample", "emit")
NUM_TOKENS = 10_000  # more than any measurement takes


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
    """Seconds of each part of the steps that run while it watches."""

    def __init__(self) -> None:
        self._seconds: Counter[str] = Counter()

    @contextmanager
    def watching(self, core: EngineCore) -> Iterator[None]:
        runner = core.runner
        watched: list[tuple[Any, str, str]] = [
            (core, "step", "step"),
            (core.scheduler, "plan", "plan"),
            (runner, "run", "run"),
            (runner, "_sample", "sample"),
            (runner.model, "forward", "model"),
            (runner.model, "logits", "model"),
        ]
        if runner.replay is not None:
            watched.append((runner.replay, "logits", "model"))
        for owner, name, part in watched:
            setattr(owner, name, self._timed(getattr(owner, name), part))
        try:
            yield
        finally:
            for owner, name, _ in watched:
                delattr(owner, name)

    def _timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = function(*args)
            self._seconds[part] += time.perf_counter() - start
            return result

        return call

    @property
    def step(self) -> float:
        return self._seconds["step"]

    @property
    def parts(self) -> dict[str, float]:
        """PARTS. `model`: with attention; `build`: from a plan to tensors, and what is sealed and copied; `emit`: from
        tokens to events."""
        s = self._seconds
        build, emit = s["run"] - s["model"] - s["sample"], s["step"] - s["plan"] - s["run"]
        return dict(zip(PARTS, (s["plan"], build, s["model"], s["sample"], emit), strict=True))


def random_prompt(seed: object, length: int) -> tuple[int, ...]:
    source = random.Random(repr(seed))
    return tuple(source.randrange(100, 40000) for _ in range(length))


def add(core: EngineCore, name: str, prompt: tuple[int, ...], num_tokens: int) -> None:
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True)
    core.add([Request(id=name, prompt=prompt, sampling=sampling)], [lambda event: None])


def seat(engine: Engine, num_sequences: int, context: int) -> None:
    """Requests with contexts of so many tokens, each of which goes on to generate, until `clear`."""
    core = engine.core
    page = engine.info.page_tokens
    compute, plan = core.runner.run, StepPlan()

    def watch(watched: StepPlan) -> StepOutput:
        nonlocal plan
        plan = watched
        return compute(watched)

    # one prompt is computed: three pages and a part of one, so that pages of both kinds are there
    core.runner.run = watch  # type: ignore[method-assign]
    add(core, "template", random_prompt(("template", time.monotonic()), 3 * page + page // 2), 1)
    while not core.is_idle:
        core.step()
    core.runner.run = Copies(core, plan).run  # type: ignore[method-assign]
    for number in range(num_sequences):
        add(core, str(number), random_prompt((context, number, time.monotonic()), context), NUM_TOKENS)
    while not all_generate(core, num_sequences):
        core.step()
    core.runner.run = compute  # type: ignore[method-assign]


def all_generate(core: EngineCore, num_sequences: int) -> bool:
    running = core.scheduler.running
    return len(running) == num_sequences and all(sequence.num_generated_tokens for sequence in running)


def clear(engine: Engine) -> None:
    for sequence in list(engine.core.scheduler.running):
        engine.core.cancel(sequence.request.id)
