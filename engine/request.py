"""What crosses the border of the engine: a `Request` goes in, events come out. No torch here."""

from dataclasses import dataclass, field, replace
from enum import Enum

from engine.errors import RequestError
from engine.grammar import Grammar
from engine.kv.shrink import Shrink


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the next token is chosen and when a request ends. Already validated by the front end.

    `temperature` 0 means greedy; `top_k` 0 means off; `min_p`: tokens with less than this share of the likeliest one's
    probability go; `seed` is a number below 2**64. Before `min_tokens` are there, no end of sequence and none of
    `stop_token_ids` comes, and their text is not searched for `stop`.

    `repetition_penalty` is about tokens of prompt and answer, `presence_penalty` and `frequency_penalty` about those of
    the answer; `logit_bias`: (token id, what is added to its logit). engine/sampler.py says in which order.

    `num_logprobs`: None for no logprobs, else those of each token and of this many likeliest in its place;
    `num_prompt_logprobs`: the same of the prompt. Only with the latter may `max_tokens` be 0.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    num_logprobs: int | None = None
    num_prompt_logprobs: int | None = None


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
    grammar: Grammar | None = None


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
class TokenLogprob:
    """The natural logarithm of a token's probability, as the model gave it: before bias, penalties, masks and
    temperature. `top`: (token id, logprob) of the likeliest tokens in its place, of equal ones the lower id first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def limited(self, num_top: int) -> "TokenLogprob":
        """With no more than `num_top` likeliest tokens."""
        return self if len(self.top) <= num_top else replace(self, top=self.top[:num_top])


@dataclass(frozen=True, slots=True)
class Scored:
    """What the model thought of the prompt: of each token but the first, which is None. Comes once, before all
    `Delta`."""

    logprobs: tuple[TokenLogprob | None, ...]


@dataclass(frozen=True, slots=True)
class Delta:
    """New text and the ids behind it. Text lags the ids while it could still change or be a stop string. Where asked
    for, `logprobs` has one for each id."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The terminal event of a request that ended as asked. `matched_stop` is the stop string or id that ended it;
    `started`, in the monotonic clock's seconds: when its first step began, if any did."""

    reason: FinishReason
    usage: Usage
    matched_stop: str | int | None = None
    started: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Failed:
    """The terminal event of a request that the engine could not finish."""

    error: RequestError


Event = Scored | Delta | Finished | Failed
