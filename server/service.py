"""What both front ends do with the engine: admit calls, follow their events, and know whether to take more."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from engine.errors import ErrorKind, RequestError
from engine.request import Delta, Event, Failed, Finished, FinishReason, Request
from server.errors import internal
from server.prompts import Prompt, encode
from server.validation import GenerationFields, Settings, build_forks, check_count, check_model

if TYPE_CHECKING:
    from engine.engine import Engine, Handle

log = logging.getLogger(__name__)

CLOSED = "server_unavailable"
# Events that may wait for a slow reader before they stay in the engine's own queue.
MAX_WAITING_EVENTS = 64


class Generation:
    """The running requests of one call, and their events merged in order of arrival."""

    def __init__(self, engine: "Engine"):
        self._engine = engine
        self._handles: list[Handle] = []
        self._pumps: list[asyncio.Task[None]] = []
        self._queue: asyncio.Queue[tuple[int, Event]] = asyncio.Queue(MAX_WAITING_EVENTS)

    def submit(self, forks: Sequence[Sequence[Request]]) -> None:
        """Queue the requests. Raises RequestError where the engine refuses a fork; `close` then ends the others."""
        for fork in forks:
            self._handles += self._engine.submit(fork)
        self._pumps = [asyncio.create_task(self._pump(index, handle)) for index, handle in enumerate(self._handles)]

    async def events(self) -> AsyncIterator[tuple[int, Delta | Finished]]:
        """(index of the request, event) until each has finished. Raises RequestError if one fails."""
        running = len(self._handles)
        while running:
            index, event = await self._queue.get()
            if isinstance(event, Failed):
                raise event.error
            if isinstance(event, Finished):
                if event.reason is FinishReason.CANCELLED:
                    raise RequestError(ErrorKind.CANCELLED, "the request was cancelled")
                running -= 1
            yield index, event

    async def close(self) -> None:
        """End whatever still runs. Safe to call at any time."""
        for handle in self._handles:
            handle.cancel()
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _pump(self, index: int, handle: "Handle") -> None:
        try:
            async for event in handle:
                await self._queue.put((index, event))
        except Exception:
            log.exception("the events of a request could not be read")
            await self._queue.put((index, Failed(internal())))


class Service:
    """The engine as the front ends see it. Lives in one event loop."""

    def __init__(self, engine: "Engine"):
        self.engine = engine
        self.is_draining = False
        self._num_open = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def is_ready(self) -> bool:
        return self.engine.is_ready and not self.is_draining

    def check_ready(self) -> None:
        if self.is_draining:
            raise RequestError(ErrorKind.UNAVAILABLE, "the server is shutting down; try another one", code=CLOSED)
        if not self.engine.is_ready:
            raise RequestError(ErrorKind.UNAVAILABLE, "the server is not ready; try again later", code=CLOSED)

    def drain(self) -> None:
        """Refuse new calls from now on."""
        self.is_draining = True

    async def wait_idle(self) -> None:
        """Return when no call runs."""
        await self._idle.wait()

    @asynccontextmanager
    async def generation(self) -> AsyncIterator[Generation]:
        """A `Generation` that has ended, with everything it held, when the block is left in whatever way."""
        self.check_ready()
        generation = Generation(self.engine)
        self._num_open += 1
        self._idle.clear()
        try:
            yield generation
        finally:
            try:
                await generation.close()
            finally:
                self._num_open -= 1
                if self._num_open == 0:
                    self._idle.set()

    def check_model(self, name: str) -> None:
        check_model(name, self.engine.info.model_name)

    async def forks(
        self,
        prompts: Sequence[Prompt],
        fields: GenerationFields,
        *,
        id: str,
        prompt_param: str,
        default_max_tokens: int | None,
    ) -> list[list[Request]]:
        """Check and tokenize: for each prompt its requests. Raises RequestError for the first thing wrong."""
        info = self.engine.info
        settings = Settings.check(fields, info, default_max_tokens=default_max_tokens)
        check_count(len(prompts), settings.n, info, prompt_param)
        ids = [await encode(prompt, self.engine.tokenizer, info, prompt_param) for prompt in prompts]
        return build_forks(id, ids, settings, prompt_param)
