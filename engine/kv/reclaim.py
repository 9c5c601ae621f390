"""Reclaim hooks: which cached page goes first when memory is needed. No torch. docs/hooks.md shows how to write one."""

import importlib.util
import logging
import math
import reprlib
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Protocol

from engine.errors import StartupError

logger = logging.getLogger(__name__)

MAX_KEY_LENGTH = 8


@dataclass(frozen=True, slots=True)
class PageUse:
    """A cached page as a policy sees it. Times are in seconds of a monotonic clock.

    `num_hits`: requests that found it cached. `priority`: of the most urgent request that used it (lower is more
    urgent). `depth`: pages in front of it in its prefix.
    """

    created: float
    last_use: float
    num_hits: int
    priority: int
    depth: int


class Reclaim(Protocol):
    """Gives each cached page a key; the page with the smallest key goes first, but never before the pages behind it.

    `key` is a number or a tuple of numbers, always of one length. It is evaluated when the page was let go by the last
    request that used it, or by the last page behind it, and again `ttl` seconds after its last use where that is not
    None, in case the key depends on `now`.
    """

    @property
    def ttl(self) -> float | None: ...

    def key(self, page: PageUse, now: float) -> float | Sequence[float]: ...


@dataclass(frozen=True, slots=True)
class Lru:
    """The page that was not used for the longest time."""

    @property
    def ttl(self) -> None:
        return None

    def key(self, page: PageUse, now: float) -> float:
        return page.last_use


@dataclass(frozen=True, slots=True)
class Lfu:
    """The page that was hit least often; of those, the one not used for the longest time."""

    @property
    def ttl(self) -> None:
        return None

    def key(self, page: PageUse, now: float) -> Sequence[float]:
        return page.num_hits, page.last_use


@dataclass(frozen=True, slots=True)
class Fifo:
    """The page that was cached first."""

    @property
    def ttl(self) -> None:
        return None

    def key(self, page: PageUse, now: float) -> float:
        return page.created


@dataclass(frozen=True, slots=True)
class Slru:
    """LRU in two segments (segmented LRU, Karedla et al. 1994): pages that were hit outlast those that were not.

    A protected page that is not used for `ttl` seconds is in probation again. The bound is a time and not a number of
    pages, because only pages with nothing behind them are ranked.
    """

    ttl: float | None = 600.0

    def key(self, page: PageUse, now: float) -> Sequence[float]:
        assert self.ttl is not None
        is_protected = page.num_hits > 0 and now - page.last_use < self.ttl
        return is_protected, page.last_use


@dataclass(frozen=True, slots=True)
class Priority:
    """Pages of the least urgent requests; of those, the one not used for the longest time. A page that is not used for
    `ttl` seconds goes before all of them."""

    ttl: float | None = None

    def key(self, page: PageUse, now: float) -> Sequence[float]:
        is_live = self.ttl is None or now - page.last_use < self.ttl
        return is_live, -page.priority if is_live else 0, page.last_use


RECLAIMS: dict[str, type[Lru | Lfu | Slru | Fifo | Priority]] = {
    "lru": Lru,
    "lfu": Lfu,
    "slru": Slru,
    "fifo": Fifo,
    "priority": Priority,
}


def make_reclaim(text: str, flag: str) -> Reclaim:
    """`lru`, `slru:ttl=60`, or `path.py:Class` for a class of the user's own, made without arguments.

    Raises StartupError, which names `flag`.
    """
    path, _, class_name = text.rpartition(":")
    if path.endswith(".py"):
        return _load(Path(path), class_name, flag)
    name, _, rest = text.partition(":")
    if name not in RECLAIMS:
        names = ", ".join(RECLAIMS)
        raise StartupError(f"{flag} is {text!r}; it must be one of {names}, or path.py:Class for a policy of your own")
    policy = RECLAIMS[name]
    if not rest:
        return policy()
    key, _, value = rest.partition("=")
    if key not in [field.name for field in fields(policy)]:
        raise StartupError(f"{flag} is {text!r}; only slru and priority have an option, ttl=SECONDS")
    try:
        seconds = float(value)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise StartupError(f"{flag} is {text!r}; ttl must be a number of seconds above 0")
    return policy(ttl=seconds)  # type: ignore[call-arg]


class Guard:
    """A policy that cannot fail: where the user's raises or returns nonsense for a page, `lru` decides, and such a page
    goes before all that have a key. `name` is for the log."""

    def __init__(self, hook: Reclaim, ttl: float | None, name: str):
        self.ttl = ttl
        self._hook = hook
        self._name = name
        self._length: int | None = None
        self._was_logged = False

    def key(self, page: PageUse, now: float) -> Sequence[float]:
        try:
            numbers = self._numbers(self._hook.key(page, now))
        except BaseException:  # whatever class it raises, the engine's thread must go on
            if not self._was_logged:
                self._was_logged = True
                logger.exception("%s failed for a page; lru is used wherever it does (logged once)", self._name)
            return 0.0, page.last_use
        return 1.0, *numbers

    def _numbers(self, raw: Any) -> tuple[float, ...]:
        """One number or a few as floats. Raises ValueError or what the hook's own types raise."""
        values = raw if isinstance(raw, tuple | list) else (raw,)
        length = len(values)
        if not 0 < length <= MAX_KEY_LENGTH or not all(isinstance(value, int | float) for value in values):
            what = f"an int or a float, or a tuple of 1 to {MAX_KEY_LENGTH} of them"
            raise ValueError(f"a key must be {what}, not {reprlib.repr(raw)}")
        if self._length not in (None, length):
            raise ValueError(f"a key has {length} numbers and the first one had {self._length}")
        numbers = tuple(map(float, values))
        if any(map(math.isnan, numbers)):
            raise ValueError(f"a key is {reprlib.repr(raw)}; NaN has no order")
        self._length = length
        return numbers


def _load(path: Path, name: str, flag: str) -> Guard:
    """Run the user's file, which may do anything, and make one object of the class. It need not have a `ttl`."""
    if not path.is_file():
        raise StartupError(f"{flag}: there is no file {str(path)!r}")
    spec = importlib.util.spec_from_file_location(f"quire{flag}", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look for it there
    try:
        spec.loader.exec_module(module)
        has_class = hasattr(module, name)
        hook: Any = getattr(module, name)() if has_class else None
        has_key = callable(getattr(hook, "key", None))
        ttl: Any = getattr(hook, "ttl", None)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        what = " ".join("".join(traceback.format_exception_only(error)).split())
        raise StartupError(f"{flag}: {path}:{name} failed: {what}") from error
    if not has_class:
        raise StartupError(f"{flag}: {str(path)!r} has no class {name!r}")
    if not has_key:
        raise StartupError(f"{flag}: {path}:{name} has no method key(page, now)")
    if ttl is not None and not (type(ttl) in (int, float) and 0 < ttl < math.inf):
        raise StartupError(f"{flag}: ttl of {path}:{name} must be None or a number of seconds above 0")
    return Guard(hook, ttl, f"{flag} {path}:{name}")
