"""Steps through answers that a grammar holds, over a vocabulary of bytes."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

from engine.grammar import Constraint, Grammar
from server.structured.grammars import Grammars
from server.structured.texts import GrammarText
from tests.helpers import byte_tokenizer

END = 256
VOCAB = 300  # more than the tokenizer has, as in models that pad
Compile = Callable[[GrammarText], Grammar]


@contextmanager
def compiler() -> Iterator[Compile]:
    """Compiles for a vocabulary of the 256 bytes and END."""
    with asyncio.Runner() as runner:
        grammars = Grammars(byte_tokenizer(), {END}, VOCAB)
        yield lambda text: runner.run(grammars.compile(text))
        runner.run(grammars.close())


def allowed(answer: Constraint, vocab: int = VOCAB) -> set[int]:
    words = np.zeros(-(-vocab // 32), np.int32)
    answer.fill_mask(words.data)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def take(answer: Constraint, text: str) -> None:
    """Accept `text` byte by byte, each of them allowed."""
    tokenizer = byte_tokenizer()
    ids = {tokenizer.token_bytes(id): id for id in range(256)}
    for byte in text.encode():
        token = ids[bytes([byte])]
        assert token in allowed(answer), (text, bytes([byte]))
        answer.accept(token)


def can_take(answer: Constraint, text: str) -> bool:
    try:
        take(answer, text)
    except AssertionError:
        return False
    return True
