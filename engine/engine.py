"""The engine's thread. Nothing but messages crosses its border: requests and cancels go in through one inbox, and the
events of a step come out together, in one call for each event loop that listens.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from engine.config import EngineConfig
from engine.core import EngineCore, Sink
from engine.errors import ErrorKind, RequestError
from engine.info import EngineInfo
from engine.kv.keeper import CacheKeeper
from engine.kv.map import PoolMap
from engine.kv.stats import PoolSnapshot
from engine.request import Event, Failed, Request
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

T = TypeVar("T")

CHECK_SECONDS = 60.0  # between checks of an idle pool: one of 20 000 pages takes 0.1 s, which a request may wait for


@dataclass(frozen=True, slots=True)
class _Submit:
    requests: List[Request]
    sinks: List[Sink]


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Job:
    """Something to do between two steps, and who is told that it will not be done."""

    run: Callable[[], None]
    refuse: Callable[[RequestError], None]


class _Stop:
    """Ends the thread."""


class _Outbox:
    """Events on their way from the engine's thread to the event loops of their listeners."""

    def __init__(self) -> None:
        self._batches: dict[asyncio.AbstractEventLoop, list[tuple[Sink, Event]]] = {}

    def sink(self, loop: asyncio.AbstractEventLoop, sink: Sink) -> Sink:
        """A sink for the engine's thread whose events `sink` gets in `loop`, in order, after `flush`."""
        return lambda event: self._batches.setdefault(loop, []).append((sink, event))

    def flush(self) -> None:
        """A loop that is closed is left out: whoever listened there is gone and misses nothing."""
        for loop, batch in self._batches.items():
            with contextlib.suppress(RuntimeError):  # what a closed loop raises
                loop.call_soon_threadsafe(_deliver, batch)
        self._batches.clear()


def _deliver(batch: list[tuple[Sink, Event]]) -> None:
    for sink, event in batch:
        sink(event)


class Engine:
    """Owns the thread that steps an `EngineCore`. `start` it once, `stop` it once."""

    def __init__(
        self,
        core: EngineCore,
        *,
        config: EngineConfig,
        info: EngineInfo,
        tokenizer: Tokenizer,
        start_table: list[tuple[str, str]],
        keeper: CacheKeeper | None = None,
    ):
        self.config = config
        self.info = info
        self.tokenizer = tokenizer
        self.core = core
        self._start_table = start_table
        self._keeper = keeper
        self._inbox: queue.SimpleQueue[_Submit | _Cancel | _Job | _Stop] = queue.SimpleQueue()
        self._outbox = _Outbox()
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._lock = threading.Lock()  # orders submissions against the thread's end
        self._is_open = False
        self._num_submitted = 0
        self._num_taken = 0  # of those submitted, by the thread
        self._num_submitted_tokens = self._num_taken_tokens = 0
        self._step_began: float | None = None

    def describe_start(self) -> list[tuple[str, str]]:
        """Rows of the table that is printed at start: name and value."""
        return list(self._start_table)

    @property
    def is_ready(self) -> bool:
        return self._is_open

    @property
    def num_waiting(self) -> int:
        """Requests that were submitted and have not started."""
        return self._num_submitted - self._num_taken + self.core.scheduler.num_waiting

    @property
    def num_waiting_tokens(self) -> int:
        """Prompt tokens of those that wait; requests with one prompt count it once."""
        return self._num_submitted_tokens - self._num_taken_tokens + self.core.scheduler.num_waiting_tokens

    @property
    def step_seconds(self) -> float:
        """How long the step that is running has taken so far; 0 between steps. Safe in any thread."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def start(self) -> None:
        self._is_open = True
        self._thread.start()

    def stop(self, timeout: float | None = None) -> None:
        """End the thread after its current step; what still runs fails, what is cached is saved. A step that never ends
        is left behind after `timeout` seconds."""
        self._inbox.put(_Stop())
        if self._thread.is_alive():
            self._thread.join(timeout)

    def submit(self, requests: List[Request], sinks: List[Sink]) -> None:
        """Queue requests with the same prompt, which is computed once. Each of `sinks` is called in the running event
        loop with the events of its request, of which exactly the last is terminal.

        Raises RequestError OVERLOADED or UNAVAILABLE, for all of them."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._check_open()
            self.check_room(len(requests), len(requests[0].prompt))
            self._inbox.put(_Submit(requests, [self._outbox.sink(loop, sink) for sink in sinks]))
            self._num_submitted += len(requests)
            self._num_submitted_tokens += len(requests[0].prompt)

    def check_room(self, num_requests: int, num_tokens: int = 0) -> None:
        """Raise RequestError OVERLOADED if `submit` would now refuse as many requests with one prompt of `num_tokens`.

        For a busy server to refuse before it has tokenized."""
        num_waiting, most = self.num_waiting, self.config.max_queued_requests
        if num_waiting + num_requests > most:
            message = f"{num_waiting} requests are waiting, at most {most} may; try again later"
            raise RequestError(ErrorKind.OVERLOADED, message, code="queue_full")
        num_waiting_tokens, most = self.num_waiting_tokens, self.config.max_queued_tokens
        # A prompt longer than the bound may wait alone: else it could never run.
        if num_waiting_tokens and num_waiting_tokens + num_tokens > most:
            message = f"prompts of {num_waiting_tokens} tokens are waiting, at most {most} may; try again later"
            raise RequestError(ErrorKind.OVERLOADED, message, code="queue_full")

    def cancel(self, request_id: str) -> None:
        """Ask the engine to end a request; nothing happens if it has ended."""
        self._inbox.put(_Cancel(request_id))

    async def inspect(self, check: bool = False) -> PoolSnapshot:
        """The pool between two steps. With `check`, raises RequestError INTERNAL unless every page is accounted for."""
        return await self._between_steps(lambda: self._inspect(check))

    async def map_pool(self) -> PoolMap:
        """The pool in detail between two steps."""
        return await self._between_steps(lambda: self.core.scheduler.map(self.info.page_sizes))

    async def flush(self) -> int:
        """Forget every cached page that nobody holds. Returns how many."""
        return await self._between_steps(self.core.scheduler.pools.cache.flush)

    async def _between_steps(self, job: Callable[[], T]) -> T:
        """Run `job` on the engine's thread. Raises the RequestError that it raises, or UNAVAILABLE."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(set_outcome: Callable[[], None]) -> None:
            if not future.done():  # else whoever asked has left
                set_outcome()

        def answer(set_outcome: Callable[[], None]) -> None:
            with contextlib.suppress(RuntimeError):  # what a closed loop raises
                loop.call_soon_threadsafe(settle, set_outcome)

        def refuse(error: RequestError) -> None:
            answer(partial(future.set_exception, error))

        def run() -> None:
            try:
                answer(partial(future.set_result, job()))
            except RequestError as error:
                refuse(error)

        with self._lock:
            self._check_open()
            self._inbox.put(_Job(run, refuse))
        return await future

    def _check_open(self) -> None:
        if not self._is_open:
            raise RequestError(ErrorKind.UNAVAILABLE, "the engine is not running", code="server_unavailable")

    def _run(self) -> None:
        reason = "the server is stopping"
        next_check = 0.0
        try:
            while self._drain():
                if not self.core.is_idle:
                    self._step_began = time.monotonic()
                    self.core.step()
                    self._step_began = None
                    self._outbox.flush()
                    if self.core.is_idle and time.monotonic() >= next_check:
                        self.core.scheduler.check()  # a page that was lost or mixed up is found before it is used
                        next_check = time.monotonic() + CHECK_SECONDS
            if self._keeper is not None:
                self._keeper.save()
        except BaseException:
            # After a fault in a step (a device error, most likely) no page can be trusted. Whatever it was, nobody must
            # be left waiting for a thread that is gone.
            logger.exception("the engine failed and stops")
            reason = "the engine failed"
        self._close(RequestError(ErrorKind.UNAVAILABLE, reason, code="server_unavailable"))

    def _drain(self) -> bool:
        """Take what the inbox holds, waiting for something where there is no work. False when told to stop."""
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                self._outbox.flush()
                if not self.core.is_idle:
                    return True
                message = self._inbox.get()
            match message:
                case _Submit(requests, sinks):
                    self.core.add(requests, sinks)
                    self._num_taken += len(requests)
                    self._num_taken_tokens += len(requests[0].prompt)
                case _Cancel(request_id):
                    self.core.cancel(request_id)
                case _Job(run):
                    run()
                case _Stop():
                    return False

    def _inspect(self, should_check: bool) -> PoolSnapshot:
        try:
            if should_check:
                self.core.scheduler.check()
        except RuntimeError as error:
            logger.error("the pool is inconsistent: %s", error)
            message = f"the pool is inconsistent: {error}"
            raise RequestError(ErrorKind.INTERNAL, message, code="pool_inconsistent") from error
        return self.core.scheduler.snapshot(self.info.page_sizes)

    def _close(self, error: RequestError) -> None:
        with self._lock:
            self._is_open = False
        self.core.fail_all(error)
        while not self._inbox.empty():
            match self._inbox.get():
                case _Submit(_, sinks):
                    for sink in sinks:
                        sink(Failed(error))
                case _Job(_, refuse):
                    refuse(error)
        self._outbox.flush()
        if self._keeper is not None:
            self._keeper.close()
