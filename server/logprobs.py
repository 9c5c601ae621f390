"""Logprobs as the two endpoints word them, and the text of single tokens."""

import codecs
from collections.abc import Iterable, Sequence
from typing import Any

from engine.request import TokenLogprob
from engine.tokenizer import Tokenizer

# JSON has no -Infinity; OpenAI writes this number.
LEAST = -9999.0


class TokenTexts:
    """Single tokens as text. `as_ids`: as `token_id:123`, which tells tokens of equal text apart."""

    def __init__(self, tokenizer: Tokenizer, as_ids: bool):
        self._tokenizer = tokenizer
        self._as_ids = as_ids

    def name(self, token_id: int) -> str:
        """Bytes that are no whole characters are written out, as OpenAI's completions do."""
        if self._as_ids:
            return f"token_id:{token_id}"
        data = self._tokenizer.token_bytes(token_id)
        try:
            return data.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)

    def chat_name(self, token_id: int) -> str:
        """As `name`, but with U+FFFD for broken characters: the bytes stand beside it."""
        if self._as_ids:
            return f"token_id:{token_id}"
        return self._tokenizer.token_bytes(token_id).decode(errors="replace")

    def bytes(self, token_id: int) -> list[int] | None:
        """None for special tokens, which have no text: the others' join to the text."""
        is_special = token_id in self._tokenizer.special_ids
        return None if is_special else list(self._tokenizer.token_bytes(token_id))


class Offsets:
    """Where in a text each token begins, in characters; a token inside a character begins where that does. Special
    tokens have no text, but for those that a prompt spells.

    `prompt`: the text that the tokens are of, where it is known from the start; else they go on behind `start`
    characters of another one.
    """

    def __init__(self, tokenizer: Tokenizer, start: int = 0, prompt: str | None = None):
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._offset = start
        self._prompt = prompt
        self._strips_space = prompt is not None and tokenizer.strips_leading_space

    def take(self, token_id: int) -> int:
        """The next token's offset."""
        offset = self._offset
        data = self._tokenizer.token_bytes(token_id)
        if token_id in self._tokenizer.special_ids:
            written = data.decode(errors="replace")
            if self._prompt is not None and self._prompt.startswith(written, offset):
                self._offset += len(written)
        else:
            if self._strips_space and data:
                data, self._strips_space = data.removeprefix(b" "), False
            self._offset += len(self._decoder.decode(data))
        return offset


def completion_logprobs(
    texts: TokenTexts, offsets: Offsets, ids: Iterable[int], logprobs: Sequence[TokenLogprob | None]
) -> dict[str, Any]:
    """Four aligned lists. `logprobs`: None for the first token of a prompt, which nothing precedes."""
    return {
        "tokens": [texts.name(id) for id in ids],
        "token_logprobs": [None if logprob is None else _number(logprob.logprob) for logprob in logprobs],
        "top_logprobs": [None if logprob is None else _top(texts, logprob) for logprob in logprobs],
        "text_offset": [offsets.take(id) for id in ids],
    }


def _top(texts: TokenTexts, logprob: TokenLogprob) -> dict[str, float]:
    """The likeliest tokens, and the one that came where it is not among them. Of equal texts the likelier stays."""
    pairs = [*logprob.top, (logprob.token_id, logprob.logprob)]
    top: dict[str, float] = {}
    for token_id, value in pairs:
        top.setdefault(texts.name(token_id), _number(value))
    return top


def chat_logprobs(texts: TokenTexts, logprobs: Iterable[TokenLogprob]) -> dict[str, Any]:
    return {
        "content": [
            {
                **_chat_entry(texts, logprob.token_id, logprob.logprob),
                "top_logprobs": [_chat_entry(texts, *pair) for pair in logprob.top],
            }
            for logprob in logprobs
        ],
        "refusal": None,
    }


def _chat_entry(texts: TokenTexts, token_id: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.chat_name(token_id), "logprob": _number(logprob), "bytes": texts.bytes(token_id)}


def _number(logprob: float) -> float:
    return max(logprob, LEAST)
