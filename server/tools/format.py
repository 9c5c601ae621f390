"""How models write tool calls, as told by their chat template."""

import re
from collections.abc import Collection
from dataclasses import dataclass

# Ways to write a call that share a marker with those known here.
OTHERS = ("<function=", "<arg_key>", "<|tool_call_argument_begin|>")
HERMES_OBJECT = re.compile(r"""["']arguments\\*["']\s*:""")
LLAMA_OBJECT = re.compile(r"""["']parameters\\*["']\s*:""")


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A call is `opening`, a JSON object and `closing`, with white space between them; calls are separated by
    `separator`. `optional_opening` may stand before the first. Without `opening` the calls are the whole answer."""

    opening: str
    closing: str
    separator: str
    optional_opening: str
    arguments_key: str


HERMES = ToolFormat("<tool_call>", "</tool_call>", "", "", "arguments")
LLAMA = ToolFormat("", "", ";", "<|python_tag|>", "parameters")


def tool_format(template: str, special_tokens: Collection[str] = ()) -> ToolFormat | None:
    """None: the template has no place for tools, or its model writes calls in a way not known here, or between special
    tokens, which have no text."""
    if not re.search(r"\btools\b", template) or any(other in template for other in OTHERS):
        return None
    if HERMES.opening in template and HERMES_OBJECT.search(template):
        return None if HERMES.opening in special_tokens else HERMES
    if "<|start_header_id|>" in template and LLAMA_OBJECT.search(template):
        return LLAMA
    return None
