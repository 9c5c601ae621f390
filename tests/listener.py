"""Hears the events of one request of an engine, in the event loop that submits it."""

import asyncio

from engine.engine import Engine
from engine.request import Event, Failed, Finished, Request


class Listener:
    """Submits one request. Its events end with the terminal one."""

    def __init__(self, engine: Engine, request: Request):
        self._engine = engine
        self._id = request.id
        self._queue: asyncio.Queue[Event] = asyncio.Queue()
        engine.submit([request], [self._queue.put_nowait])

    async def events(self) -> list[Event]:
        events = [await self._queue.get()]
        while not isinstance(events[-1], Finished | Failed):
            events.append(await self._queue.get())
        return events

    def cancel(self) -> None:
        self._engine.cancel(self._id)
