"""Levels of load: who sends when, and for how long."""

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from server.bench.client import Client
from server.bench.endpoints import Prompt
from server.bench.recording import Recording, RequestFailed

LEAST_REQUESTS = 8
REQUESTS_PER_WORKER = 4
SECONDS_OF_ARRIVALS = 30

Send = Callable[[Prompt], Awaitable[None]]


class Load(Protocol):
    """One level: how requests come. `name` is what `amount` counts."""

    @property
    def name(self) -> str: ...

    @property
    def amount(self) -> float: ...

    @property
    def num_requests(self) -> int:
        """Where the user gives no number."""

    async def drive(self, prompts: Sequence[Prompt], send: Send, seed: int) -> None:
        """Send each prompt once and return when all are answered."""


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """Workers that send their next request as soon as the last is answered."""

    concurrency: int

    @property
    def name(self) -> str:
        return "concurrency"

    @property
    def amount(self) -> int:
        return self.concurrency

    @property
    def num_requests(self) -> int:
        return max(LEAST_REQUESTS, REQUESTS_PER_WORKER * self.concurrency)

    async def drive(self, prompts: Sequence[Prompt], send: Send, seed: int) -> None:
        queue = iter(prompts)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(self.concurrency, len(prompts))):
                group.create_task(_work(queue, send))


async def _work(queue: Iterator[Prompt], send: Send) -> None:
    for prompt in queue:
        await send(prompt)


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests that come at random, `rate` a second on average (a Poisson process), however many are running."""

    rate: float

    @property
    def name(self) -> str:
        return "rate"

    @property
    def amount(self) -> float:
        return self.rate

    @property
    def num_requests(self) -> int:
        return max(LEAST_REQUESTS, round(SECONDS_OF_ARRIVALS * self.rate))

    async def drive(self, prompts: Sequence[Prompt], send: Send, seed: int) -> None:
        gaps = random.Random(f"{seed}/arrivals")
        loop = asyncio.get_running_loop()
        due = loop.time()
        async with asyncio.TaskGroup() as group:
            for prompt in prompts:
                await asyncio.sleep(due - loop.time())
                group.create_task(_work(iter([prompt]), send))
                due += gaps.expovariate(self.rate)


@dataclass(slots=True)
class Level:
    """What happened at one load. `client_seconds`: CPU time of this process meanwhile; `seconds`: all of it."""

    load: Load
    num_requests: int
    recordings: list[Recording] = field(default_factory=list)
    seconds: float = 0.0
    client_seconds: float = 0.0


class Runner:
    """Runs levels with one client. `clock` gives seconds of a monotonic clock."""

    def __init__(self, client: Client, clock: Callable[[], float], *, max_seconds: float, seed: int):
        self._client = client
        self._clock = clock
        self._max_seconds = max_seconds
        self._seed = seed

    async def run(self, level: Level, prompts: Sequence[Prompt]) -> None:
        """Send the prompts; after the bound, abandon what is running. Cancelling leaves what came so far in `level`."""

        async def send(prompt: Prompt) -> None:
            recording = Recording(prompt.num_tokens)
            level.recordings.append(recording)
            await self.record(prompt, recording)

        start, cpu_start = time.perf_counter(), time.process_time()
        try:
            async with asyncio.timeout(self._max_seconds):
                await level.load.drive(prompts, send, self._seed)
        except TimeoutError:
            pass
        finally:
            level.seconds = time.perf_counter() - start
            level.client_seconds = time.process_time() - cpu_start

    async def record(self, prompt: Prompt, recording: Recording) -> None:
        """One request, whose failure is recorded and goes no further."""
        recording.send(self._clock())
        try:
            await self._client.generate(prompt, recording)
        except RequestFailed as failure:
            recording.failure = failure
        except asyncio.CancelledError:
            recording.is_abandoned = True
            raise
