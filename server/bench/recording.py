"""What one request of a run did: when its parts came, and how it ended."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

MAX_DETAIL_CHARS = 200


class RequestFailed(Exception):
    """A request that did not end well. `reason` is counted; `detail` is what the server said of it, shortened."""

    def __init__(self, reason: str, detail: str = ""):
        super().__init__(reason)
        self.reason = reason
        self.detail = "".join(c if c.isprintable() else " " for c in detail[:MAX_DETAIL_CHARS])

    def __str__(self) -> str:
        return f"{self.reason}: {self.detail}" if self.detail else self.reason


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Token counts as the server gives them; None: it does not say."""

    num_prompt_tokens: int | None
    num_generated_tokens: int | None
    num_cached_tokens: int | None


class Unit(Enum):
    """What lies between the ends of an interval."""

    TOKEN = "token"
    CHUNK = "chunk"


@dataclass(slots=True)
class Recording:
    """One request. Times are in seconds of one monotonic clock; a chunk is a message that carries text or tokens."""

    num_planned_tokens: int | None
    sent: float = 0.0
    last: float = 0.0
    chunk_times: list[float] = field(default_factory=list)
    chunk_tokens: list[int] = field(default_factory=list)
    usage: TokenUsage | None = None
    failure: RequestFailed | None = None
    is_abandoned: bool = False

    def send(self, now: float) -> None:
        self.sent = self.last = now

    def add(self, now: float, num_tokens: int | None) -> None:
        """Take a chunk; None: the protocol does not say how many tokens it carries."""
        self.chunk_times.append(now)
        if num_tokens is not None:
            self.chunk_tokens.append(num_tokens)

    @property
    def is_done(self) -> bool:
        return self.failure is None and not self.is_abandoned

    @property
    def time_to_first_token(self) -> float | None:
        return self.chunk_times[0] - self.sent if self.chunk_times else None

    @property
    def num_prompt_tokens(self) -> int | None:
        """As the server counted, else as planned."""
        told = self.usage.num_prompt_tokens if self.usage else None
        return self.num_planned_tokens if told is None else told

    @property
    def tokens_per_chunk(self) -> Sequence[int] | None:
        """None: unknown. As many chunks as generated tokens means one in each."""
        if len(self.chunk_tokens) == len(self.chunk_times):
            return self.chunk_tokens
        if self.usage and self.usage.num_generated_tokens == len(self.chunk_times):
            return [1] * len(self.chunk_times)
        return None

    @property
    def num_output_tokens(self) -> int | None:
        """As the server counted, else the sum over chunks; None: unknown."""
        if self.usage and self.usage.num_generated_tokens is not None:
            return self.usage.num_generated_tokens
        return None if self.tokens_per_chunk is None else sum(self.tokens_per_chunk)

    def intervals(self, unit: Unit) -> list[float]:
        """Times between chunks or tokens. A chunk of k tokens that came t after the one before it is k times t / k.

        The first chunk ends no interval: it belongs to the time to first token. `Unit.TOKEN` needs known counts; a
        chunk without tokens (text that was held back) ends no interval either.
        """
        counts = self.tokens_per_chunk if unit is Unit.TOKEN else [1] * len(self.chunk_times)
        assert counts is not None, "the counts are unknown"
        found: list[float] = []
        before = self.chunk_times[0] if self.chunk_times else 0.0
        for time, count in zip(self.chunk_times[1:], counts[1:], strict=True):
            if count:
                found += [(time - before) / count] * count
                before = time
        return found
