"""Request fields that clients know and this server does not implement.

Those that would change the output are refused unless they ask for what happens anyway; the rest is accepted.
"""

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from engine.errors import invalid

log = logging.getLogger(__name__)

# Values that ask for nothing special. null always does, and so it is not listed.
NO_OP: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "length_penalty": (1,),
    "typical_p": (1,),
    "prompt_logprobs": (),
    "echo": (False,),
    "top_logprobs": (0,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "include_stop_str_in_output": (False,),
    "no_stop_trim": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    "cache_salt": (),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "grammar": (),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
}

HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
        "prediction", "request_id", "rid",
    }
)  # fmt: skip


def is_same(value: object, no_op: object) -> bool:
    """Equality that tells true from 1, and takes 0.0 for 0."""
    return value == no_op and isinstance(value, bool) == isinstance(no_op, bool)


def refuse_unsupported(raw: Mapping[str, Any], known: Iterable[str]) -> None:
    """Raise RequestError for the first field that would change the output; log the names nobody knows."""
    known = set(known)
    unknown: list[str] = []
    for name, value in raw.items():
        if name in known or name in HARMLESS:
            continue
        if name not in NO_OP:
            unknown.append(name)
        elif value is not None and not any(is_same(value, no_op) for no_op in NO_OP[name]):
            raise invalid(f"this value of {name} is not supported; leave the field out", name, "unsupported_parameter")
    if unknown:
        # Never values, and of names (which a client also chose) no more than a line.
        log.info("ignored unknown fields of a request: %r", [name[:40] for name in unknown[:8]])
