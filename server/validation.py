"""From what a client wrote to an engine `Request`: the one path that HTTP and gRPC share.

Messages name the field and its bound and never repeat the input, so that no answer grows with a bad request.
"""

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from engine.errors import ErrorKind, RequestError, invalid
from engine.request import Request, SamplingDefaults, SamplingParams

if TYPE_CHECKING:
    from engine.engine import EngineInfo

MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64

STOP_BOUND = f"a string or a list of at most {MAX_STOPS} strings, each of 1 to {MAX_STOP_CHARS} characters"


class Fields(BaseModel):
    """Base of everything parsed. Each field's description is the bound that an error message states."""

    model_config = ConfigDict(strict=True, extra="ignore", frozen=True)


Temperature = Annotated[float | None, Field(ge=0, le=2, description="a number from 0 to 2")]
TopP = Annotated[float | None, Field(gt=0, le=1, description="a number greater than 0 and at most 1")]
TopK = Annotated[
    int | None, Field(ge=-1, lt=2**31, description="an integer from -1 to the vocabulary size (-1 and 0: off)")
]
Seed = Annotated[int | None, Field(ge=-(2**63), lt=2**64, description="an integer from -2**63 to 2**64 - 1")]
MaxTokens = Annotated[
    int | None, Field(ge=1, lt=2**31, description=f"an integer from 1 to {2**31 - 1} (0 would generate nothing)")
]
Flag = Annotated[bool | None, Field(description="true or false")]


class SamplingFields(Fields):
    """Sampling as a client states it; None: not stated. The vocabulary's bounds are checked later."""

    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    seed: Seed = None
    max_tokens: MaxTokens = None
    stop: Any = None
    stop_token_ids: Any = None
    ignore_eos: Flag = None


FieldsT = TypeVar("FieldsT", bound=Fields)


def parse(model: type[FieldsT], raw: object, where: str = "") -> FieldsT:
    """Check `raw` against `model`. Raises RequestError for the first bad field; `where` prefixes its name."""
    try:
        return model.model_validate(raw)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False, include_context=False)[0]
    field = model.model_fields.get(str(first["loc"][0])) if first["loc"] else None
    if field is None:
        raise invalid(f"{where or 'the request'} must be an object", where or None, "invalid_type")
    name = f"{where}.{first['loc'][0]}" if where else str(first["loc"][0])
    if first["type"] == "missing":
        raise invalid(f"{name} is required", name, "missing_required_parameter")
    code = "invalid_type" if first["type"].endswith("_type") else "invalid_value"
    raise invalid(f"{name} must be {field.description}", name, code)


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a request: the longest prompt plus output in tokens, and the number of token ids. `defaults` stand
    in for what it does not say."""

    max_model_len: int
    vocab_size: int
    defaults: SamplingDefaults = SamplingDefaults()

    @classmethod
    def of(cls, info: "EngineInfo") -> "Limits":
        return cls(info.max_model_len, info.vocab_size, info.sampling_defaults)


def check_token_ids(raw: object, name: str, vocab_size: int) -> tuple[int, ...]:
    """A list of token ids. Booleans, floats and numbers outside [0, vocab_size) are refused."""
    if not isinstance(raw, list | tuple):
        raise invalid(f"{name} must be a list of token ids", name, "invalid_type")
    for index, token in enumerate(raw):
        if type(token) is not int or not 0 <= token < vocab_size:
            raise invalid(f"{name}[{index}] must be a token id from 0 to {vocab_size - 1}", name)
    return tuple(raw)


def check_stop(raw: object) -> tuple[str, ...]:
    if raw is None:
        return ()
    strings = [raw] if isinstance(raw, str) else raw
    if not isinstance(strings, list | tuple) or len(strings) > MAX_STOPS:
        raise invalid(f"stop must be {STOP_BOUND}", "stop")
    for string in strings:
        if not isinstance(string, str) or not 1 <= len(string) <= MAX_STOP_CHARS:
            raise invalid(f"stop must be {STOP_BOUND}", "stop")
    return tuple(strings)


def check_stop_token_ids(raw: object, vocab_size: int) -> frozenset[int]:
    if raw is None:
        return frozenset()
    if isinstance(raw, list | tuple) and len(raw) > MAX_STOP_TOKEN_IDS:
        raise invalid(f"stop_token_ids may hold at most {MAX_STOP_TOKEN_IDS} ids", "stop_token_ids")
    return frozenset(check_token_ids(raw, "stop_token_ids", vocab_size))


def check_length(num_prompt_tokens: int, max_tokens: int, limits: Limits, param: str) -> None:
    """Refuse what the context cannot hold. `max_tokens` 0: not stated, one generated token must fit."""
    if num_prompt_tokens == 0:
        raise invalid("the prompt is empty; it must have at least one token", param)
    longest = limits.max_model_len
    if num_prompt_tokens >= longest:
        what = f"the prompt has {num_prompt_tokens} tokens, which leaves no room for output"
    elif num_prompt_tokens + max_tokens > longest:
        total = num_prompt_tokens + max_tokens
        what = f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together {total}"
    else:
        return
    raise invalid(f"{what}; this server's context is {longest} tokens", param, "context_length_exceeded")


@dataclass(frozen=True, slots=True)
class Sampling:
    """Checked sampling values that do not depend on the prompt. `max_tokens` None: what is left of the context."""

    fields: SamplingFields
    limits: Limits
    stop: tuple[str, ...]
    stop_token_ids: frozenset[int]
    max_tokens: int | None

    @classmethod
    def check(cls, fields: SamplingFields, limits: Limits, *, default_max_tokens: int | None) -> "Sampling":
        if (fields.top_k or 0) > limits.vocab_size:
            raise invalid(f"top_k must be at most the vocabulary size, {limits.vocab_size} (-1 and 0: off)", "top_k")
        stop = check_stop(fields.stop)
        stop_token_ids = check_stop_token_ids(fields.stop_token_ids, limits.vocab_size)
        max_tokens = default_max_tokens if fields.max_tokens is None else fields.max_tokens
        return cls(fields, limits, stop, stop_token_ids, max_tokens)

    def params(self, num_prompt_tokens: int, param: str) -> SamplingParams:
        """Sampling for a prompt of this many tokens; `param` names the prompt's field in errors."""
        explicit = self.fields.max_tokens
        check_length(num_prompt_tokens, explicit or 0, self.limits, param)
        left = self.limits.max_model_len - num_prompt_tokens
        fields, defaults = self.fields, self.limits.defaults
        return SamplingParams(
            max_tokens=left if self.max_tokens is None else min(self.max_tokens, left),
            temperature=defaults.temperature if fields.temperature is None else fields.temperature,
            top_k=defaults.top_k if fields.top_k is None else max(0, fields.top_k),
            top_p=defaults.top_p if fields.top_p is None else fields.top_p,
            seed=secrets.randbits(64) if fields.seed is None else fields.seed % 2**64,
            stop=self.stop,
            stop_token_ids=self.stop_token_ids,
            ignore_eos=bool(fields.ignore_eos),
        )


def build_requests(id: str, prompts: Sequence[tuple[int, ...]], sampling: Sampling, param: str) -> list[Request]:
    """One engine request per prompt, named `id` or `id-0`, `id-1`, ..."""
    names = [id] if len(prompts) == 1 else [f"{id}-{index}" for index in range(len(prompts))]
    return [
        Request(id=name, prompt=prompt, sampling=sampling.params(len(prompt), param))
        for name, prompt in zip(names, prompts, strict=True)
    ]


def check_model(name: str, served: str) -> None:
    if name != served:
        raise RequestError(
            ErrorKind.NOT_FOUND,
            f"this server has one model, {served}",
            param="model",
            code="model_not_found",
        )
