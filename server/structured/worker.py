"""Tries grammars in a process of its own, which may be killed. Run as a script: one JSON string a line in, one out.

A line in is a grammar; a line out is what is wrong with it, or null. Only the standard library and llguidance, so that
it starts fast. It ends when its input does, so also when the server is killed, whatever it is at.
"""

import json
import os
import resource
import sys
import threading
from queue import SimpleQueue

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MAX_MEMORY = 256 * 2**20
MAX_REPLY_CHARS = 2000
QUOTES_GRAMMAR = "\n   1 | "


def parser_limits() -> LLParserLimits:
    """What an answer may cost: about 7 ms of lexer work a token, and about 40 MB of lexer states."""
    return LLParserLimits(
        step_lexer_fuel=100_000, max_lexer_states=20_000, precompute_large_lexemes=False, verbose_errors=False
    )


class _Bytes:
    """A vocabulary of the 256 bytes and an end: what is wrong with a grammar does not depend on the vocabulary."""

    tokens = tuple(bytes([byte]) for byte in range(256)) + (b"",)
    special_token_ids = (256,)
    eos_token_id = 256
    bos_token_id = None

    def __call__(self, text: bytes) -> list[int]:
        return list(text)


def _read(lines: "SimpleQueue[bytes]") -> None:
    """A thread of its own: compiling does not hold the interpreter's lock."""
    for line in sys.stdin.buffer:
        lines.put(line)
    os._exit(0)


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_MEMORY, MAX_MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer(TokenizerWrapper(_Bytes()), slices=[])
    limits = parser_limits()
    lines: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read, args=(lines,), daemon=True).start()
    while True:
        line = lines.get()
        error = LLMatcher(tokenizer, json.loads(line), log_level=0, limits=limits).get_error()
        reason = error.split(QUOTES_GRAMMAR)[0]
        print(json.dumps(reason[-MAX_REPLY_CHARS:] or None), flush=True)


if __name__ == "__main__":
    main()
