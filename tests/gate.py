"""A place between the engine's thread and its runner where a test can hold a step."""

import asyncio
import threading
from typing import Any

from engine.engine import Engine
from engine.plan import StepPlan
from engine.runner import StepOutput


class Gate:
    """Stands in front of a runner: steps wait until they are let through, so that a test can act between them."""

    def __init__(self, runner: Any):
        self.num_steps = 0
        self._runner = runner
        self._permits = threading.Semaphore(0)
        self._arrivals = threading.Semaphore(0)
        self.error: BaseException | None = None

    @classmethod
    def before(cls, engine: Engine) -> "Gate":
        """Put a gate in front of the engine's runner."""
        gate = cls(engine.core.runner)
        engine.core.runner = gate  # type: ignore[assignment]
        return gate

    def run(self, plan: StepPlan) -> StepOutput:
        self.num_steps += 1
        self._arrivals.release()
        self._permits.acquire()
        if self.error:
            raise self.error
        output: StepOutput = self._runner.run(plan)
        return output

    async def wait_for_step(self) -> None:
        """Return when a step stands at the gate."""
        assert await asyncio.to_thread(self._arrivals.acquire, timeout=10)

    def let_through(self, count: int = 1) -> None:
        self._permits.release(count)

    def open(self) -> None:
        self.let_through(1_000_000)
