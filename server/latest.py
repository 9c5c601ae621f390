"""One answer for all who ask at about the same time."""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Latest(Generic[T]):
    """Asks for a value at most once in `seconds`; until then everybody gets the last one, or its error."""

    def __init__(self, ask: Callable[[], Coroutine[Any, Any, T]], seconds: float):
        self._ask = ask
        self._seconds = seconds
        self._asked = float("-inf")
        self._value: asyncio.Future[T] | None = None

    async def get(self) -> T:
        now = time.monotonic()
        if self._value is None or now - self._asked >= self._seconds:
            self._asked = now
            self._value = asyncio.ensure_future(self._ask())
        return await asyncio.shield(self._value)  # one who leaves does not end it for the others
