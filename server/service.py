"""What both front ends do with the engine: admit calls, follow their events, and know whether to take more."""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from engine.errors import ErrorKind, RequestError
from engine.request import Delta, Failed, Finished, FinishReason, Request
from server.mailbox import Mailbox
from server.prompts import Prompt, encode
from server.validation import GenerationFields, Settings, build_forks, check_count, check_model

if TYPE_CHECKING:
    from engine.engine import Engine

log = logging.getLogger(__name__)

CLOSED = "server_unavailable"


class Generation:
    """The running requests of one call, and their events merged in order of arrival."""

    def __init__(self, engine: "Engine"):
        self._engine = engine
        self._running: dict[int, str] = {}
        self._mailbox = Mailbox()

    def submit(self, forks: Sequence[Sequence[Request]]) -> None:
        """Queue the requests. Raises RequestError where the engine refuses a fork; `close` then ends the others."""
        for fork in forks:
            indices = range(len(self._running), len(self._running) + len(fork))
            self._engine.submit(fork, [partial(self._mailbox.put, index) for index in indices])
            self._running |= zip(indices, (request.id for request in fork), strict=True)

    async def events(self) -> AsyncIterator[tuple[int, Delta | Finished]]:
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
        """End the call with `error`, whatever the engine does."""
        self._mailbox.put(0, Failed(error))

    def close(self) -> None:
        """End whatever still runs. Safe to call at any time."""
        for id in self._running.values():
            self._engine.cancel(id)


class Service:
    """The engine as the front ends see it. Lives in one event loop."""

    def __init__(self, engine: "Engine"):
        self.engine = engine
        self.is_draining = False
        self._open: set[Generation] = set()
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
        self._open.add(generation)
        self._idle.clear()
        try:
            yield generation
        finally:
            generation.close()
            self._open.remove(generation)
            if not self._open:
                self._idle.set()

    def fail_all(self, error: RequestError) -> None:
        """End every call that is open with `error`: the engine will not."""
        for generation in self._open:
            generation.fail(error)

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
