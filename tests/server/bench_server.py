"""A server of the OpenAI API that plays a script against a clock of its own."""

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n"
STREAM = HEAD + b"\r\n"
DONE = b"data: [DONE]\n\n"
Script = Sequence[tuple[float, bytes]]


def event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def text(content: str, **more: Any) -> bytes:
    return event({"choices": [{"index": 0, "text": content, "finish_reason": None, **more}], "usage": None})


def finish(reason: str = "length") -> bytes:
    return event({"choices": [{"index": 0, "text": "", "finish_reason": reason}], "usage": None})


def usage(prompt: int, generated: int, cached: int | None = None) -> bytes:
    details = {} if cached is None else {"prompt_tokens_details": {"cached_tokens": cached}}
    counts = {"prompt_tokens": prompt, "completion_tokens": generated, **details}
    return event({"choices": [], "usage": counts})


def status(code: int, body: bytes = b"{}") -> bytes:
    head = f"HTTP/1.1 {code} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    return head.encode() + b"connection: close\r\n\r\n" + body


class Clock:
    """Stands still until told otherwise; says when it was read."""

    def __init__(self) -> None:
        self.now = 64.0
        self._was_read = asyncio.Event()

    def __call__(self) -> float:
        self._was_read.set()
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds
        self._was_read.clear()

    async def wait_for_read(self) -> None:
        await asyncio.wait_for(self._was_read.wait(), 10)


class ScriptedServer:
    """Answers each generation with the next script, the last again and again.

    A script is made of waits, which move the clock, and of bytes that follow them; the head comes with the first bytes.
    An empty script never answers.
    """

    def __init__(self, *scripts: Script, clock: Clock | None = None, models: bytes | None = None):
        self._scripts = list(scripts)
        self._clock = clock
        self._models = models or status(200, b'{"data": [{"id": "tiny"}, {"id": "other"}]}')
        self.bodies: list[dict[str, Any]] = []
        self.heads: list[str] = []
        self.saw_silence = asyncio.Event()
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                lines = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:-2])
                body = await reader.readexactly(int(lines.get("content-length", "0")))
                if head.startswith("GET /v1/models "):
                    writer.write(self._models)
                elif head.startswith("POST /v1/"):
                    self.heads.append(head)
                    self.bodies.append(json.loads(body))
                    await self._play(writer)
                    return
                else:
                    writer.write(status(404))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    async def _play(self, writer: asyncio.StreamWriter) -> None:
        script = self._scripts.pop(0) if len(self._scripts) > 1 else self._scripts[0]
        if not script:
            self.saw_silence.set()
            await asyncio.Event().wait()
        for wait, part in script:
            if self._clock is not None:
                self._clock.move(wait)
            writer.write(part)
            await writer.drain()
            if self._clock is not None:
                await self._clock.wait_for_read()


@asynccontextmanager
async def running(server: ScriptedServer) -> AsyncIterator[ScriptedServer]:
    tasks: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        with suppress(asyncio.CancelledError):  # which asyncio's own callback would log
            await server.handle(reader, writer)

    listener = await asyncio.start_server(handle, "127.0.0.1", 0)
    server.url = f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    try:
        yield server
    finally:
        listener.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
