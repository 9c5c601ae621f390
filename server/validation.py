"""From what a client wrote to an engine `Request`: the one path that HTTP and gRPC share.

Messages name the field and its bound and never repeat the input, so that no answer grows with a bad request.
"""

from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, WithJsonSchema

from engine.errors import ErrorKind, RequestError, invalid
from engine.kv.shrink import Shrink, parse_shrink

if TYPE_CHECKING:
    from engine.info import EngineInfo

MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 64
MAX_BIASED_TOKENS = 1024
MAX_LOGPROBS = 20

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
MinP = Annotated[float | None, Field(ge=0, le=1, description="a number from 0 to 1")]
MinTokens = Annotated[int | None, Field(ge=0, lt=2**31, description="an integer from 0 to max_tokens")]
Penalty = Annotated[float | None, Field(ge=-2, le=2, description="a number from -2 to 2")]
Repetition = Annotated[float | None, Field(ge=0.01, le=10, description="a number from 0.01 to 10 (1: off)")]
NumChoices = Annotated[
    int | None,
    Field(ge=1, lt=2**31, description="an integer from 1 to the number of sequences this server runs at once"),
]
Priority = Annotated[
    int | None, Field(ge=-(2**31), lt=2**31, description="an integer from -2**31 to 2**31 - 1 (lower is more urgent)")
]
KvShrink = Annotated[str | None, Field(description="a string such as streaming:recent=32, or none")]
TOKEN_IDS_SCHEMA = {"type": "array", "items": {"type": "integer", "minimum": 0}}
# Checked by hand, because the bounds of several kinds of value go into one message.
Stop = Annotated[
    Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "maxItems": 4}]})
]
StopTokenIds = Annotated[Any, WithJsonSchema({**TOKEN_IDS_SCHEMA, "maxItems": 64})]
LogitBias = Annotated[
    Any,
    WithJsonSchema(
        {
            "type": "object",
            "propertyNames": {"pattern": "^[0-9]+$"},
            "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
        }
    ),
]
Flag = Annotated[bool | None, Field(description="true or false")]


class GenerationFields(Fields):
    """Generation as a client states it; None: not stated. Bounds that the model or server sets are checked later."""

    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    presence_penalty: Penalty = None
    frequency_penalty: Penalty = None
    repetition_penalty: Repetition = None
    logit_bias: LogitBias = None
    seed: Seed = None
    max_tokens: MaxTokens = None
    min_tokens: MinTokens = None
    stop: Stop = None
    stop_token_ids: StopTokenIds = None
    ignore_eos: Flag = None
    n: NumChoices = None
    priority: Priority = None
    kv_shrink: KvShrink = None


class ScoringFields(GenerationFields):
    """Generation that may be none: with logprobs of the prompt alone."""

    max_tokens: Annotated[
        int | None, Field(ge=0, lt=2**31, description=f"an integer from 1 to {2**31 - 1}, or 0 to score the prompt")
    ] = None


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


def check_logit_bias(raw: object, vocab_size: int) -> tuple[tuple[int, float], ...]:
    """An object from token ids, as JSON writes keys, to numbers."""
    if raw is None:
        return ()
    bound = f"an object of at most {MAX_BIASED_TOKENS} token ids, each with a number from -100 to 100"
    if not isinstance(raw, dict) or len(raw) > MAX_BIASED_TOKENS:
        raise invalid(f"logit_bias must be {bound}", "logit_bias")
    pairs = []
    for key, value in raw.items():
        if type(value) not in (int, float) or not -100 <= value <= 100:
            raise invalid(f"logit_bias must be {bound}", "logit_bias")
        token = int(key) if isinstance(key, int) or (key.isascii() and key.isdecimal() and len(key) < 11) else -1
        if not 0 <= token < vocab_size:
            raise invalid(f"each key of logit_bias must be a token id from 0 to {vocab_size - 1}", "logit_bias")
        pairs.append((token, float(value)))
    if len({token for token, _ in pairs}) != len(pairs):
        raise invalid("logit_bias names a token twice", "logit_bias")
    return tuple(sorted(pairs))


def check_shrink(text: str, info: "EngineInfo") -> Shrink | None:
    try:
        shrink = parse_shrink(text)
    except ValueError as error:
        raise invalid(f"kv_shrink: {error}", "kv_shrink") from None
    if shrink and info.why_none_is_dropped:
        raise invalid(f"kv_shrink: {info.why_none_is_dropped}; leave it out, or send none", "kv_shrink")
    if shrink and not shrink.is_positional and not info.has_host_memory:
        raise invalid(
            "kv_shrink: pages dropped by attention mass cannot be computed again, so this policy needs host memory; "
            "start the server with --host-memory, or use streaming",
            "kv_shrink",
        )
    return shrink


def check_count(num_prompts: int, n: int, info: "EngineInfo", param: str) -> None:
    """Refuse a call whose requests could never all run or wait; trying again would not help."""
    if n > info.max_num_seqs:
        raise invalid(f"n is {n}; this server runs at most {info.max_num_seqs} sequences at once", "n")
    most = info.max_queued_requests
    if num_prompts > most:
        raise invalid(f"{param} has {num_prompts} prompts; this server queues at most {most}", param)
    if num_prompts * n > most:
        what = f"{num_prompts} prompts with n = {n} are {num_prompts * n} sequences"
        raise invalid(f"{what}; this server queues at most {most}", "n")


def check_length(num_prompt_tokens: int, max_tokens: int, info: "EngineInfo", param: str) -> None:
    """Refuse what the context cannot hold. `max_tokens` 0: one generated token must fit."""
    if num_prompt_tokens == 0:
        raise invalid("the prompt is empty; it must have at least one token", param)
    longest = info.max_model_len
    if num_prompt_tokens >= longest:
        what = f"the prompt has {num_prompt_tokens} tokens, which leaves no room for output"
    elif num_prompt_tokens + max_tokens > longest:
        total = num_prompt_tokens + max_tokens
        what = f"the prompt has {num_prompt_tokens} tokens and max_tokens is {max_tokens}, together {total}"
    else:
        return
    raise invalid(f"{what}; this server's context is {longest} tokens", param, "context_length_exceeded")


def check_model(name: str, served: str) -> None:
    if not name:
        raise invalid("model is required", "model", "missing_required_parameter")
    if name != served:
        raise RequestError(
            ErrorKind.NOT_FOUND,
            f"this server has one model, {served}",
            param="model",
            code="model_not_found",
        )
