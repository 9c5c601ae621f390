"""Chat templates rendered in processes of their own, because a template's work has no bound that a thread could keep.

The rest of the server only waits for them: a template that runs too long, or takes too much memory, ends its process
and fails one request.
"""

import asyncio
import os
import sys
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any

from engine.chat_template import MAX_RENDERED_BYTES, ChatPrompt, ChatTemplate, Rendered
from engine.errors import ErrorKind, RequestError, StartupError, invalid
from server.template_child import LENGTH, decode, encode

ROOT = Path(__file__).parents[1]
# A control character takes six in JSON.
MAX_ANSWER_BYTES = 6 * MAX_RENDERED_BYTES + 1024
BUFFER_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateBounds:
    render_seconds: float = 5
    wait_seconds: float = 5
    """For a process that has nothing else to do."""
    start_seconds: float = 60
    max_memory: int = 2**30
    """Bytes of address space."""
    max_processes: int = 2


class TemplateWorkers:
    """Up to `max_processes` processes that render one template; they start when they are needed. For one event loop."""

    def __init__(self, template: ChatTemplate, special_tokens: tuple[str, ...], bounds: TemplateBounds | None = None):
        self._bounds = bounds or TemplateBounds()
        self._setup = encode(
            {
                "source": template.source,
                "tokens": template.tokens,
                "special_tokens": special_tokens,
                "max_memory": self._bounds.max_memory,
                "alarm_seconds": ceil(self._bounds.render_seconds) + 1,
            }
        )
        self._turns = asyncio.Semaphore(self._bounds.max_processes)
        self._idle: list[_Child] = []
        self._renders: set[asyncio.Task[Rendered]] = set()
        self._is_closed = False

    async def start(self) -> None:
        """Start the first process, so that no request waits for it. Raises StartupError."""
        try:
            self._idle.append(await self._start())
        except RequestError as error:
            raise StartupError(error.message) from error

    async def render(self, prompt: ChatPrompt) -> Rendered:
        """Raises RequestError: INVALID for what the template refuses and for what ends a process, OVERLOADED."""
        try:
            job = encode(
                {
                    "messages": prompt.messages,
                    "tools": prompt.tools,
                    "variables": prompt.variables,
                    "add_generation_prompt": prompt.add_generation_prompt,
                }
            )
        except RecursionError as error:
            raise invalid("messages are nested too deeply", "messages") from error
        try:
            async with asyncio.timeout(self._bounds.wait_seconds):
                await self._turns.acquire()
        except TimeoutError as error:
            message = f"no chat template could be rendered for {self._bounds.wait_seconds:g} s; try again later"
            raise RequestError(ErrorKind.OVERLOADED, message, code="queue_full", retry_after=1) from error
        render = asyncio.create_task(self._render(job))
        self._renders.add(render)
        render.add_done_callback(self._end)
        # A client that goes leaves a process that is about to answer: it stays in use until then.
        return await asyncio.shield(render)

    def _end(self, render: asyncio.Task[Rendered]) -> None:
        self._renders.discard(render)
        self._turns.release()

    async def _render(self, job: bytes) -> Rendered:
        child = await self._take()
        try:
            async with asyncio.timeout(self._bounds.render_seconds):
                answer = await child.ask(job)
        except TimeoutError as error:
            await child.end()
            seconds = f"{self._bounds.render_seconds:g} s"
            raise invalid(
                f"the model's chat template takes more than {seconds} for the messages; send less", "messages"
            ) from error
        except (EOFError, OSError) as error:
            await child.end()
            raise invalid(
                "the messages ended the process that renders the model's chat template", "messages"
            ) from error
        except BaseException:
            await child.end()
            raise
        self._idle.append(child)
        if "refusal" in answer:
            raise invalid(answer["refusal"], "messages")
        return Rendered(answer["text"], answer["sentinel"])

    async def _take(self) -> "_Child":
        while self._idle:
            child = self._idle.pop()
            if child.is_alive:
                return child
            await child.end()
        return await self._start()

    async def _start(self) -> "_Child":
        if self._is_closed:
            raise RequestError(ErrorKind.UNAVAILABLE, "the server is shutting down; try another one")
        child = await _Child.start()
        try:
            async with asyncio.timeout(self._bounds.start_seconds):
                await child.ask(self._setup)
        except (TimeoutError, EOFError, OSError) as error:
            await child.end()
            raise RequestError(ErrorKind.INTERNAL, "the process for chat templates does not start") from error
        except BaseException:
            await child.end()
            raise
        return child

    async def close(self) -> None:
        """End all processes; what they were rendering fails as cancelled."""
        self._is_closed = True
        for render in self._renders:
            render.cancel()
        await asyncio.gather(*self._renders, return_exceptions=True)
        await asyncio.gather(*(child.end() for child in self._idle))
        self._idle.clear()


class _Child:
    """One process; it has one question at a time."""

    def __init__(self, process: asyncio.subprocess.Process):
        assert process.stdin and process.stdout
        self._process = process
        self._stdin = process.stdin
        self._stdout = process.stdout

    @classmethod
    async def start(cls) -> "_Child":
        return cls(
            await asyncio.create_subprocess_exec(
                sys.executable,
                "-P",  # no module of the working directory
                "-m",
                "server.template_child",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=BUFFER_BYTES,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                start_new_session=True,  # an interrupt from the terminal is the server's to handle
            )
        )

    @property
    def is_alive(self) -> bool:
        return self._process.returncode is None and not self._stdout.at_eof()

    async def ask(self, frame: bytes) -> dict[str, Any]:
        """Raises EOFError or OSError if the process ends."""
        self._stdin.write(frame)
        await self._stdin.drain()
        (length,) = LENGTH.unpack(await self._stdout.readexactly(LENGTH.size))
        if length > MAX_ANSWER_BYTES:
            raise EOFError
        answer: dict[str, Any] = decode(await self._stdout.readexactly(length))
        return answer

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        self._stdin.close()
        await self._process.wait()
