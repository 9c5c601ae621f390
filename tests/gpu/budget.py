"""How much of the time that a check may take is left, and an end for one that hangs."""

import os
import threading
import time
from collections.abc import Callable


class Budget:
    """`seconds` from the making on."""

    def __init__(self, seconds: float):
        self._start = time.monotonic()
        self._seconds = seconds

    @property
    def spent(self) -> float:
        return time.monotonic() - self._start

    @property
    def left(self) -> float:
        return self._seconds - self.spent


def end_process_after(seconds: float, before: Callable[[], None] = lambda: None) -> threading.Timer:
    """Calls `before` and ends this process with code 1 when `seconds` are over, whatever it does then, a kernel that
    never returns included. `cancel` the result to let it live."""

    def end() -> None:
        try:
            before()
        finally:
            os._exit(1)

    timer = threading.Timer(max(0.0, seconds), end)
    timer.daemon = True
    timer.start()
    return timer
