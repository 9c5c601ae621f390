"""What crosses the border of the engine: a `Request` goes in, events come out. No torch here."""

from dataclasses import dataclass
from enum import Enum

from engine.errors import RequestError
from engine.kv.shrink import Shrink


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when a request ends. Already validated by the front end.

    `temperature` 0 means greedy; `top_k` 0 means off; `seed` is a number below 2**64.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """What a model's makers want where a request does not say. Bounds are those of `SamplingParams`."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One prompt to continue. `id` is made by the server, never taken from a client.

    A lower `priority` is more urgent. Pages are shared only between requests of equal `salt`.
    """

    id: str
    prompt: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    salt: str = ""
    shrink: Shrink | None = None


class FinishReason(Enum):
    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Usage:
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and the ids behind it. Text lags the ids while it could still change or be a stop string."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Finished:
    """The terminal event of a request that ended as asked. `matched_stop` is the stop string or id that ended it."""

    reason: FinishReason
    usage: Usage
    matched_stop: str | int | None = None


@dataclass(frozen=True, slots=True)
class Failed:
    """The terminal event of a request that the engine could not finish."""

    error: RequestError


Event = Delta | Finished | Failed
