"""An engine without a model: it plays a script, and remembers what it was asked and told to stop."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from engine.config import EngineConfig
from engine.errors import ErrorKind, RequestError
from engine.request import Delta, Event, Failed, Finished, FinishReason, Request, SamplingDefaults, Usage

Script = Callable[[Request], AsyncIterator[Event]]
BOS = 256


@dataclass(frozen=True)
class FakeInfo:
    model_name: str = "tiny"
    max_model_len: int = 128
    vocab_size: int = 300
    page_tokens: int = 64
    sink_pages: int = 1
    recipe: str = "int4"
    dtype: str = "float32"
    device: str = "cpu"
    num_sealed_pages: int = 10
    num_slots: int = 4
    bytes_per_token: float = 12.5
    max_num_seqs: int = 4
    max_queued_requests: int = 64
    sampling_defaults: SamplingDefaults = SamplingDefaults()


class FakeTokenizer:
    """A token is a byte; 256 starts a text, and ids from 257 have no text."""

    vocab_size = 300

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def encode_chat(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.encode("".join(f"<{m['role']}>{m['content']}" for m in messages))


def usage(request: Request, generated: int) -> Usage:
    return Usage(len(request.prompt), 3, generated)


async def say_hello(request: Request) -> AsyncIterator[Event]:
    """`Héllo`, an empty delta in between as while a character is incomplete, cut at max_tokens."""
    pieces = ["H", "", "é", "llo"][: request.sampling.max_tokens]
    for number, text in enumerate(pieces):
        yield Delta(text, (number + 1,))
    reason = FinishReason.STOP if len(pieces) == 4 else FinishReason.LENGTH
    yield Finished(reason, usage(request, len(pieces)))


async def echo_params(request: Request) -> AsyncIterator[Event]:
    """The sampling parameters and the prompt as text, so that two protocols can be compared."""
    yield Delta(repr((request.sampling, request.prompt)), (1,))
    yield Finished(FinishReason.STOP, usage(request, 1), "END")


def hang_after(deltas: int) -> Script:
    async def script(request: Request) -> AsyncIterator[Event]:
        for number in range(deltas):
            yield Delta(f"t{number} ", (number,))
        await asyncio.Event().wait()

    return script


def fail_after(deltas: int, error: RequestError | None = None) -> Script:
    async def script(request: Request) -> AsyncIterator[Event]:
        for number in range(deltas):
            yield Delta(f"t{number} ", (number,))
        yield Failed(error or RequestError(ErrorKind.INTERNAL, "the step failed", code="internal_error"))

    return script


class FakeHandle:
    def __init__(self, engine: "FakeEngine", request: Request):
        self._engine = engine
        self._request = request
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._play())

    async def _play(self) -> None:
        async for event in self._engine.script(self._request):
            self._events.put_nowait(event)
        self._engine.running.discard(self)

    async def __aiter__(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            yield event
            if not isinstance(event, Delta):
                return

    def cancel(self) -> None:
        if self in self._engine.running:
            self._end(Finished(FinishReason.CANCELLED, usage(self._request, 0)))
            self._engine.cancelled.append(self._request.id)
            self._engine.saw_cancel.set()

    def fail(self, error: RequestError) -> None:
        self._loop.call_soon_threadsafe(self._end, Failed(error))

    def _end(self, event: Event) -> None:
        self._engine.running.discard(self)
        self._task.cancel()
        self._events.put_nowait(event)


class FakeEngine:
    """Implements what the server uses of `engine.engine.Engine`."""

    def __init__(self, script: Script = say_hello, info: FakeInfo | None = None):
        self.config = EngineConfig(model="tiny")
        self.info = info or FakeInfo()
        self.tokenizer = FakeTokenizer()
        self.script = script
        self.is_ready = True
        self.refusal: RequestError | None = None
        self.requests: list[Request] = []
        self.running: set[FakeHandle] = set()
        self.cancelled: list[str] = []
        self.saw_cancel = asyncio.Event()
        self.saw_submit = asyncio.Event()

    def start(self) -> None:
        self.is_ready = True

    def submit(self, request: Request) -> FakeHandle:
        if self.refusal:
            raise self.refusal
        self.requests.append(request)
        handle = FakeHandle(self, request)
        self.running.add(handle)
        self.saw_submit.set()
        return handle

    def stop(self) -> None:
        self.is_ready = False
        for handle in list(self.running):
            handle.fail(RequestError(ErrorKind.UNAVAILABLE, "the server is shutting down"))

    def describe_start(self) -> list[tuple[str, str]]:
        return [("model", self.info.model_name)]
