"""Grammars as text, from what a client asked for. In the library's variant of Lark; JSON schemas stand inside it."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.errors import RequestError, invalid
from server.structured.worker import QUOTES_GRAMMAR

MAX_SCHEMA_BYTES = 2**16
MAX_SCHEMA_DEPTH = 64
PARAM = "response_format"
PATTERN_FAULT = "\nerror: "

# Tokens that the grammar leaves no choice about are the model's to split, as all others are.
HEADER = '%llguidance {"no_forcing": true}\n'

# One space at most where JSON allows white space: `": 1` is what models learned, and a weak model that may write blanks
# writes nothing else.
GUIDANCE = {"whitespace_pattern": " "}


@dataclass(frozen=True, slots=True)
class GrammarText:
    """`param` names the request's field in errors."""

    lark: str
    param: str


def json_object() -> GrammarText:
    return json_schema({"type": "object"})


def json_schema(schema: object, param: str = PARAM) -> GrammarText:
    """Values that `schema` allows, their properties in its order. Raises RequestError for what is no schema."""
    return GrammarText(f"{HEADER}start: {schema_rule(schema, param)}", param)


def schema_rule(schema: object, param: str) -> str:
    """`schema` as part of a rule."""
    if not isinstance(schema, Mapping):
        raise invalid(f"{param}: a JSON schema must be an object", param, "invalid_schema")
    if size(schema, param) > MAX_SCHEMA_BYTES:
        raise invalid(f"{param}: the JSON schema is larger than {MAX_SCHEMA_BYTES} bytes", param, "invalid_schema")
    return f"%json {json.dumps({**schema, 'x-guidance': GUIDANCE})}"


def size(value: Mapping[str, Any], param: str) -> int:
    """Bytes of `value` as JSON. Raises RequestError if it is too deep, or none."""
    if _depth(value) > MAX_SCHEMA_DEPTH:
        raise invalid(f"{param}: nested deeper than {MAX_SCHEMA_DEPTH} levels", param, "invalid_schema")
    try:
        return len(json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode())
    except (ValueError, TypeError):
        # Lone surrogates, and numbers that JSON has not or that Python does not write out.
        raise invalid(f"{param}: not valid JSON", param, "invalid_schema") from None


def _depth(value: object) -> int:
    """Levels of objects and lists, without recursion."""
    depth, level = 0, [value]
    while level := [item for item in level if isinstance(item, Mapping | list)]:
        depth += 1
        level = [child for item in level for child in (item.values() if isinstance(item, Mapping) else item)]
    return depth


def refusal(error: str, param: str) -> RequestError:
    """What a client is told: one line of what the library said, without the schema that it quotes."""
    reason = error.split(QUOTES_GRAMMAR)[0].split("failed to compile JSON schema: ")[-1]
    if PATTERN_FAULT in reason:
        reason = "a pattern: " + reason.split(PATTERN_FAULT)[-1]
    reason = " ".join(reason.removesuffix("<non-verbose/>").split())[:200]
    return invalid(f"{param}: the schema cannot be used: {reason}", param, "invalid_schema")
