"""What both front ends do with the engine: admit calls, follow their events, and know whether to take more."""

import asyncio
import importlib.metadata
import logging
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from engine.errors import ErrorKind, RequestError
from engine.request import Delta, Event, Failed, Finished, FinishReason, Request, Scored
from server.ask import Ask, Settings
from server.dialect import Dialect
from server.keys import KeyFile, OpenDoor, Tenant
from server.log_lines import log_call
from server.mailbox import Mailbox
from server.pool import PoolWatch
from server.pool_map import MapWatch, Previews
from server.prompts import ChatPrompt, encode
from server.quota import Quota
from server.record import Caller, CallRecord, ChoiceRecord
from server.telemetry import Telemetry
from server.tracing import Traces
from server.validation import check_model

if TYPE_CHECKING:
    from engine.engine import Engine

log = logging.getLogger(__name__)

CLOSED = "server_unavailable"


def shutting_down() -> RequestError:
    return RequestError(ErrorKind.UNAVAILABLE, "the server is shutting down; try another one", code=CLOSED)


class Generation:
    """The running requests of one call, and their events merged in order of arrival."""

    def __init__(self, engine: "Engine", record: CallRecord, quota: Quota, telemetry: Telemetry):
        self.record = record
        self._engine = engine
        self._quota = quota
        self._telemetry = telemetry
        self._running: dict[int, str] = {}
        self._mailbox = Mailbox()
        self.task = asyncio.current_task()
        self.failure: RequestError | None = None

    def submit(self, forks: Sequence[Sequence[Request]]) -> None:
        """Queue the requests. Raises RequestError where the engine refuses a fork; `close` then ends the others."""
        record = self.record
        for fork in forks:
            indices = range(len(self._running), len(self._running) + len(fork))
            self._engine.submit(fork, [partial(self._hear, index) for index in indices])
            self._running |= zip(indices, (request.id for request in fork), strict=True)
            record.choices += [ChoiceRecord() for _ in fork]
            record.num_prompt_tokens += len(fork[0].prompt)
        record.submitted = time.monotonic()
        self._quota.spend(record.num_prompt_tokens)

    def _hear(self, index: int, event: Event) -> None:
        gap = self.record.hear(index, event)
        if isinstance(event, Delta):
            self._quota.spend(len(event.token_ids))
            self._telemetry.hear_token(gap, time.monotonic() - self.record.opened)
        self._mailbox.put(index, event)

    async def events(self) -> AsyncIterator[tuple[int, Scored | Delta | Finished]]:
        """(index of the request, event) until each has finished; deltas that nobody took in time come as one. Raises
        RequestError if a request fails."""
        while self._running:
            for index, event in await self._mailbox.take():
                if isinstance(event, Failed):
                    raise event.error
                if isinstance(event, Finished):
                    if event.reason is FinishReason.CANCELLED:
                        raise RequestError(ErrorKind.CANCELLED, "the request was cancelled")
                    del self._running[index]
                yield index, event

    def fail(self, error: RequestError) -> None:
        """End the call with `error`, whatever it waits for."""
        self._mailbox.put(0, Failed(error))
        if self.record.submitted is None and self.task is not None:
            self.failure = error
            self.task.cancel()

    def close(self) -> None:
        """End whatever still runs. Safe to call at any time."""
        for id in self._running.values():
            self._engine.cancel(id)


class Service:
    """The engine as the front ends see it. Lives in one event loop."""

    def __init__(
        self,
        engine: "Engine",
        door: KeyFile | OpenDoor | None = None,
        dialect: Dialect | None = None,
        traces: Traces | None = None,
        *,
        shows_previews: bool = False,
    ):
        """`shows_previews`: whoever has a key may see the beginnings of all cached text."""
        self.engine = engine
        self.dialect = dialect or Dialect(engine.tokenizer, engine.info)
        self.door = door or OpenDoor()
        self.telemetry = Telemetry()
        self.version = importlib.metadata.version("quire")
        self.pool_watch = PoolWatch(engine.inspect, self.check_ready)
        previews = Previews(engine.tokenizer) if shows_previews else None
        self.map_watch = MapWatch(engine.map_pool, engine.info, self.telemetry.totals, previews)
        self._traces = traces
        self.is_draining = False
        self._failure: RequestError | None = None
        self._open: set[Generation] = set()
        self._quotas: dict[str, Quota] = defaultdict(Quota)
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_answering(self) -> bool:
        """Whether what runs may still come to its end."""
        return self.engine.is_ready and self._failure is None

    @property
    def is_ready(self) -> bool:
        return self.is_answering and not self.is_draining

    def check_ready(self) -> None:
        if self.is_draining:
            raise shutting_down()
        if not self.is_ready:
            raise RequestError(ErrorKind.UNAVAILABLE, "the server is not ready; try again later", code=CLOSED)

    def tenant(self, authorization: str | None) -> Tenant:
        """Who asks, by an `Authorization` header. Raises RequestError UNAUTHENTICATED."""
        try:
            return self.door.tenant(authorization)
        except RequestError as error:
            self.telemetry.hear_refusal(error)
            log.info("refused a call: %s", error.code)
            raise

    def refuse(self, caller: Caller, error: RequestError) -> None:
        """A call was refused before it began: it is counted and logged as others are."""
        self._end(CallRecord(caller, error=error))

    def _end(self, record: CallRecord) -> None:
        record.closed = time.monotonic()
        self.telemetry.hear_end(record)
        log_call(record)
        if self._traces is not None:
            self._traces.hear_end(record)

    def drain(self) -> None:
        """Refuse new calls from now on."""
        self.is_draining = True

    def fail(self, error: RequestError) -> None:
        """The engine will answer nothing more: end every open call with `error`, and refuse new ones."""
        self._failure = error
        for generation in self._open:
            generation.fail(error)

    async def wait_idle(self) -> None:
        """Return when no call runs."""
        await self._idle.wait()

    @contextmanager
    def generation(self, caller: Caller) -> Iterator[Generation]:
        """A `Generation` that has ended, with everything it held, when the block is left in whatever way. Raises
        RequestError where the server is not ready or the caller has no room left."""
        record = CallRecord(caller)
        quota = self._quotas[caller.tenant.name]
        try:
            with self._admitted(caller.tenant, quota):
                generation = Generation(self.engine, record, quota, self.telemetry)
                self._open.add(generation)
                self._idle.clear()
                try:
                    yield generation
                except asyncio.CancelledError:
                    if generation.failure is None or generation.task is None or generation.task.uncancel():
                        raise
                    raise generation.failure from None
                finally:
                    generation.close()
                    self._open.remove(generation)
                    if not self._open:
                        self._idle.set()
        except BaseException as error:
            record.error = error
            raise
        finally:
            self._end(record)

    @contextmanager
    def _admitted(self, tenant: Tenant, quota: Quota) -> Iterator[None]:
        self.check_ready()
        quota.open(tenant)
        try:
            yield
        finally:
            quota.close()

    def check_model(self, name: str) -> None:
        check_model(name, self.engine.info.model_name)

    @property
    def fingerprint(self) -> str:
        """What must be equal for equal seeds to give equal text."""
        info = self.engine.info
        return f"quire-{self.version}-{info.recipe}-{info.dtype}"

    async def forks(self, ask: Ask, id: str, record: CallRecord) -> list[list[Request]]:
        """Check and tokenize: for each prompt its requests. Raises RequestError for the first thing wrong, or because
        the queue is full."""
        self.check_model(ask.model)
        record.model = ask.model
        record.is_chat = isinstance(ask.prompts[0], ChatPrompt)
        info = self.engine.info
        settings = Settings.check(ask, info)
        self.engine.check_room(ask.num_choices)
        grammar = await self.dialect.grammar(ask)
        ids = [
            await encode(prompt, self.engine.tokenizer, info, ask.prompt_param, templates=self.dialect.templates)
            for prompt in ask.prompts
        ]
        return settings.forks(id, ids, record.caller.tenant.salt, grammar)
