"""Special tokens that a client spells out, broken up so that those of the template stand apart."""

import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any

from engine.errors import invalid

# Unicode reserves these 66 for use inside a program: no text needs them.
NONCHARACTERS = tuple(
    map(chr, (*range(0xFDD0, 0xFDF0), *(plane << 16 | end for plane in range(17) for end in (0xFFFE, 0xFFFF))))
)

# What templates look up and compare. Left whole where it is only a part of a special token: `user` in `<|user|>`.
FORMAT_WORDS = frozenset(
    {
        "role", "content", "name", "tool_calls", "tool_call_id", "id", "type", "function", "arguments", "parameters",
        "description", "strict", "properties", "required", "items", "enum", "return", "text", "object", "array",
        "string", "number", "integer", "boolean", "null", "system", "developer", "user", "assistant", "tool",
    }
)  # fmt: skip


class SpecialText:
    """Finds the text of special tokens in a client's strings.

    A string is broken inside each special token that it spells, and at an end (blanks aside) where a special token
    could go on in the text beside it. A template sees the inserted character, so one that searches or compares such a
    string may treat it otherwise. What a template makes anew out of a string (by replacing, or by writing `<|` and
    `|>` around one of `FORMAT_WORDS`) it makes itself.
    """

    def __init__(self, tokens: Iterable[str]):
        tokens = [token for token in tokens if token]
        rests = defaultdict(list)
        for token in tokens:
            rests[token[0]].append(re.escape(token[1:]))
        # First characters outside of the look-ahead: `re` skips quickly to where one stands.
        starts = [f"{re.escape(first)}(?={'|'.join(rest)})" for first, rest in rests.items()]
        self._inside = re.compile("|".join(starts) or "(?!)")
        self._alone = frozenset(token for token in tokens if len(token) == 1)
        self._prefixes = frozenset(token[:end] for token in tokens for end in range(1, len(token)))
        self._suffixes = frozenset(token[start:] for token in tokens for start in range(1, len(token)))
        self._longest = max(map(len, tokens), default=0)
        self._all = "\0".join(tokens)

    def break_up(self, client: Any, variables: Any = None) -> tuple[Any, Any, str | None]:
        """Copies of both JSON values with a sentinel in each string that was broken, and that sentinel; None if
        nothing was. Removing it gives back the client's text: it occurs nowhere else in the values.

        `variables` are compared by templates: a plain word there counts as one of `FORMAT_WORDS`. Raises RequestError
        where a string uses every possible sentinel, or holds a special token of one character, which has no inside.
        """
        text = json.dumps([client, variables], ensure_ascii=False)
        sentinel = next((char for char in NONCHARACTERS if char not in text), None)
        if sentinel is None:
            raise invalid("messages use all 66 noncharacters of Unicode; leave one of them out", "messages")
        is_broken = False

        def mark(string: str, is_word: bool) -> str:
            nonlocal is_broken
            marked = self._marked(string, sentinel, is_word)
            is_broken = is_broken or len(marked) > len(string)
            return marked

        client = _map_strings(client, lambda string: mark(string, string in FORMAT_WORDS))
        variables = _map_strings(variables, lambda string: mark(string, string.isidentifier()))
        return client, variables, sentinel if is_broken else None

    def _marked(self, string: str, sentinel: str, is_word: bool) -> str:
        if self._alone and not self._alone.isdisjoint(string):
            raise invalid("messages hold a special token of one character, which only a template may write", "messages")
        text = string.strip()
        if text and not is_word:
            start = string.index(text)
            before, after = string[:start], string[start + len(text) :]
            string = before + sentinel * self._can_begin_inside(text) + text + sentinel * self._can_go_on(text) + after
        return self._inside.sub(rf"\g<0>{sentinel}", string)

    def _can_begin_inside(self, text: str) -> bool:
        return any(text[:end] in self._suffixes for end in range(1, min(len(text), self._longest) + 1))

    def _can_go_on(self, text: str) -> bool:
        """Whether a special token can have begun at the end of `text`, or can surround the whole of it."""
        ends = range(1, min(len(text), self._longest) + 1)
        return any(text[-end:] in self._prefixes for end in ends) or (len(text) < self._longest and text in self._all)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """A JSON value with `change` applied to each string in it, names of objects included."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    if isinstance(value, dict):
        return {change(name): _map_strings(item, change) for name, item in value.items()}
    return value
