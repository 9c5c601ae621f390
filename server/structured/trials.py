"""Finding out whether a grammar compiles, and at what cost, where nothing but a child process can be harmed.

Compiling releases the interpreter's lock, but a thread cannot be stopped, and a few dozen intersected patterns take
hours. So a grammar that a client wrote is compiled by a child first, which is killed when it takes too long.
"""

import asyncio
import contextlib
import hashlib
import json
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from pathlib import Path

from server.structured.worker import MAX_MEMORY

MAX_SECONDS = 5.0
MAX_VERDICTS = 1024
WORKER = Path(__file__).with_name("worker.py")
TOO_HEAVY = f"it takes more than {MAX_SECONDS:.0f} seconds or {MAX_MEMORY // 2**20} MiB to compile; simplify it"


class Trials:
    """Not bounded in how many run at once; the caller does that. What they found is remembered by content."""

    def __init__(self, max_seconds: float = MAX_SECONDS) -> None:
        self._max_seconds = max_seconds
        self._idle: list[Process] = []
        self._verdicts: OrderedDict[bytes, str | None] = OrderedDict()

    async def error_of(self, grammar: str) -> str | None:
        """What is wrong with `grammar`, in the library's words; None if it compiles within the bounds."""
        key = hashlib.sha256(grammar.encode()).digest()
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            return self._verdicts[key]
        try:
            verdict = await self._try(grammar)
        except (TimeoutError, OSError, ValueError):
            # Not remembered: a machine that was busy for a moment is no reason to refuse the next one.
            return TOO_HEAVY
        self._verdicts[key] = verdict
        if len(self._verdicts) > MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        return verdict

    async def close(self) -> None:
        while self._idle:
            await _kill(self._idle.pop())

    async def _take(self) -> Process:
        """An idle process that still lives, or a new one."""
        while self._idle:
            process = self._idle.pop()
            assert process.stdout
            if process.returncode is None and not process.stdout.at_eof():
                return process
            await _kill(process)
        return await _start()

    async def _try(self, grammar: str) -> str | None:
        process = await self._take()
        assert process.stdin and process.stdout
        try:
            async with asyncio.timeout(self._max_seconds):
                process.stdin.write(json.dumps(grammar).encode() + b"\n")
                await process.stdin.drain()
                # An empty line is one that died; ValueError.
                verdict: str | None = json.loads(await process.stdout.readline())
        except (Exception, asyncio.CancelledError):
            await _kill(process)
            raise
        self._idle.append(process)
        return verdict


async def _start() -> Process:
    # In a session of its own: an interrupt from the terminal is the server's to handle.
    return await asyncio.create_subprocess_exec(
        sys.executable, "-I", str(WORKER), stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True
    )


async def _kill(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
