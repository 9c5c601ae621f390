"""The engine's thread, and the handles through which front ends listen to their requests.

Nothing but messages crosses the thread's border: requests and cancels go in through one inbox, events come out
through one queue a request.
"""

import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as List
from dataclasses import dataclass
from functools import partial

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.errors import ErrorKind, RequestError
from engine.kv.keeper import CacheKeeper
from engine.kv.report import PageSizes
from engine.kv.shrink import Shrink
from engine.kv.stats import PoolSnapshot
from engine.request import Delta, Event, Failed, Request, SamplingDefaults
from engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

CHECK_SECONDS = 60.0  # between checks of an idle pool: one of 20 000 pages takes 0.1 s, which a request may wait for


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What the engine serves, after `auto` was resolved. Sizes do not count the null page and slot."""

    model_name: str
    max_model_len: int
    vocab_size: int
    page_tokens: int
    sink_pages: int
    recipe: str
    dtype: str
    device: str
    num_sealed_pages: int
    num_slots: int
    bytes_per_token: float
    max_num_seqs: int
    max_queued_requests: int
    sampling_defaults: SamplingDefaults
    shrink: Shrink | None
    why_none_is_dropped: str | None
    """The reason that a request may have no shrink hook; None where it may."""
    has_host_memory: bool
    page_sizes: PageSizes


@dataclass(frozen=True, slots=True)
class _Submit:
    requests: List[Request]
    emits: List[Callable[[Event], None]]


@dataclass(frozen=True, slots=True)
class _Cancel:
    request_id: str


@dataclass(frozen=True, slots=True)
class _Inspect:
    should_check: bool
    answer: Callable[[PoolSnapshot | RequestError], None]


class _Stop:
    """Ends the thread."""


class Handle:
    """The events of one request, for the event loop that submitted it. Ends after exactly one terminal event."""

    def __init__(self, cancel: Callable[[], None]):
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._cancel = cancel

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            yield event
            if not isinstance(event, Delta):
                return

    def cancel(self) -> None:
        """Ask the engine to end the request; nothing happens if it has ended."""
        self._cancel()

    def push(self, event: Event) -> None:
        """Called on the engine's thread. A listener whose loop is closed is gone and misses nothing."""
        with contextlib.suppress(RuntimeError):  # what a closed loop raises
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)


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
        self._inbox: queue.SimpleQueue[_Submit | _Cancel | _Inspect | _Stop] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="quire-engine", daemon=True)
        self._lock = threading.Lock()  # orders submissions against the thread's end
        self._is_open = False
        self._num_submitted = 0
        self._num_taken = 0  # of those submitted, by the thread

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

    def start(self) -> None:
        self._is_open = True
        self._thread.start()

    def stop(self) -> None:
        """End the thread after its current step; what still runs fails, what is cached is saved."""
        self._inbox.put(_Stop())
        if self._thread.is_alive():
            self._thread.join()

    def submit(self, requests: List[Request]) -> list[Handle]:
        """Queue requests with the same prompt, which is computed once. Call inside a running event loop.

        Raises RequestError OVERLOADED or UNAVAILABLE, for all of them."""
        handles = [Handle(partial(self._inbox.put, _Cancel(request.id))) for request in requests]
        with self._lock:
            self._check_open()
            if self.num_waiting + len(requests) > self.config.max_queued_requests:
                most = self.config.max_queued_requests
                message = f"{self.num_waiting} requests are waiting, at most {most} may; try again later"
                raise RequestError(ErrorKind.OVERLOADED, message, code="queue_full")
            self._inbox.put(_Submit(requests, [handle.push for handle in handles]))
            self._num_submitted += len(requests)
        return handles

    async def inspect(self, check: bool = False) -> PoolSnapshot:
        """The pool between two steps. With `check`, raises RequestError INTERNAL unless every page is accounted for."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[PoolSnapshot] = loop.create_future()

        def settle(result: PoolSnapshot | RequestError) -> None:
            if future.done():  # whoever asked has left
                return
            if isinstance(result, RequestError):
                future.set_exception(result)
            else:
                future.set_result(result)

        def answer(result: PoolSnapshot | RequestError) -> None:
            with contextlib.suppress(RuntimeError):  # what a closed loop raises
                loop.call_soon_threadsafe(settle, result)

        with self._lock:
            self._check_open()
            self._inbox.put(_Inspect(check, answer))
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
                    self.core.step()
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
                message = self._inbox.get(block=self.core.is_idle)
            except queue.Empty:
                return True
            match message:
                case _Submit(requests, emits):
                    self.core.add(requests, emits)
                    self._num_taken += len(requests)
                case _Cancel(request_id):
                    self.core.cancel(request_id)
                case _Inspect(should_check, answer):
                    answer(self._inspect(should_check))
                case _Stop():
                    return False

    def _inspect(self, should_check: bool) -> PoolSnapshot | RequestError:
        try:
            if should_check:
                self.core.scheduler.check()
        except RuntimeError as error:
            logger.error("the pool is inconsistent: %s", error)
            return RequestError(ErrorKind.INTERNAL, f"the pool is inconsistent: {error}", code="pool_inconsistent")
        return self.core.scheduler.snapshot(self.info.page_sizes)

    def _close(self, error: RequestError) -> None:
        with self._lock:
            self._is_open = False
        self.core.fail_all(error)
        while not self._inbox.empty():
            match self._inbox.get():
                case _Submit(_, emits):
                    for emit in emits:
                        emit(Failed(error))
                case _Inspect(_, answer):
                    answer(error)
        if self._keeper is not None:
            self._keeper.close()
