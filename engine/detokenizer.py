"""From generated ids to text that can be sent as it grows."""

import codecs
from collections.abc import Sequence

from engine.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"


class TextStream:
    """The text of one request, released as soon as later tokens cannot change it.

    Held back are the bytes of an incomplete character and the longest suffix that begins a stop string; nothing else.
    The pieces join to the text of all generated ids as a continuation of `prompt`, up to a stop string. Special tokens
    have no text. The stop string that is complete first ends the text; of several that end at the same character, the
    longest. So the result does not depend on where tokens end. `stop` strings must not be empty. What the first
    `num_unsearched` ids complete is not searched for them.

    Of `prompt` only the end matters: it decides whether a first space is text, and may hold the first bytes of a
    character that the generated ids complete.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...], prompt: Sequence[int], num_unsearched: int = 0):
        self.matched: str | None = None
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._num_unsearched = num_unsearched
        self._is_searching = False
        self._matchers = [_StopMatcher(text) for text in stop]
        self._held = ""
        tail = _tail_bytes(tokenizer, prompt)
        self._strips_space = tokenizer.strips_leading_space and not tail
        self._decoder.decode(tail)
        # Bytes since the start of a character that the prompt began; empty when there is none.
        self._begun = self._decoder.getstate()[0]

    def feed(self, token_id: int) -> str:
        """Take one generated id; return the text that is now certain, maybe none. Nothing after a match."""
        self._is_searching = self._num_unsearched == 0
        self._num_unsearched = max(0, self._num_unsearched - 1)
        if self.matched is not None or token_id in self._tokenizer.special_ids:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if self._strips_space and data:
            data = data.removeprefix(b" ")
            self._strips_space = False
        return self._release(self._decode(data))

    def finish(self) -> str:
        """The rest of the text: what was held back in case more would come."""
        if self.matched is not None:
            return ""
        text = self._release(self._decode(b"", final=True))
        rest, self._held = self._held, ""
        return text + rest

    def _decode(self, data: bytes, final: bool = False) -> str:
        text = self._decoder.decode(data, final)
        if not self._begun:
            return text
        self._begun += data
        if not text:
            return ""
        # If the prompt's character was not completed, its U+FFFD belongs to the prompt. A real one is EF BF BD.
        is_completed = text[0] != REPLACEMENT or self._begun.startswith(REPLACEMENT.encode())
        self._begun = b""
        return text if is_completed else text[1:]

    def _release(self, text: str) -> str:
        if not self._is_searching:
            return text
        start = len(self._held)
        self._held += text
        for end, char in enumerate(text, start + 1):
            complete = [matcher.stop for matcher in self._matchers if matcher.advance(char)]
            if complete:
                self.matched = max(complete, key=len)
                released, self._held = self._held[: end - len(self.matched)], ""
                return released
        num_held = max((matcher.num_matched for matcher in self._matchers), default=0)
        split = len(self._held) - num_held
        released, self._held = self._held[:split], self._held[split:]
        return released


def _tail_bytes(tokenizer: Tokenizer, prompt: Sequence[int]) -> bytes:
    """The last bytes of the prompt's text, at least 4 if there are as many: no character is longer."""
    tail = b""
    for token_id in reversed(prompt):
        if len(tail) >= 4:
            break
        if token_id not in tokenizer.special_ids:
            tail = tokenizer.token_bytes(token_id) + tail
    return tail


class _StopMatcher:
    """Finds one stop string in a text read character by character, in constant time each (Knuth-Morris-Pratt).

    `num_matched` is the length of the longest prefix of `stop` that the text read so far ends with.
    """

    def __init__(self, stop: str):
        self.stop = stop
        self.num_matched = 0
        # For a mismatch after i + 1 matched characters: how many of them still count.
        self._fallback = [0] * len(stop)
        length = 0
        for i in range(1, len(stop)):
            while length and stop[i] != stop[length]:
                length = self._fallback[length - 1]
            length += stop[i] == stop[length]
            self._fallback[i] = length

    def advance(self, char: str) -> bool:
        """Read one character; true when it completes the stop string."""
        while self.num_matched and self.stop[self.num_matched] != char:
            self.num_matched = self._fallback[self.num_matched - 1]
        self.num_matched += self.stop[self.num_matched] == char
        return self.num_matched == len(self.stop)
