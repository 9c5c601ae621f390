"""Constrained answers: what the engine asks of a grammar, answered by llguidance."""

import asyncio
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from engine.errors import ErrorKind, RequestError
from engine.tokenizer import Tokenizer
from server.structured.texts import GrammarText, refusal
from server.structured.trials import Trials
from server.structured.worker import parser_limits

MAX_AT_ONCE = 4
MAX_WAIT_SECONDS = 15.0
NUM_FIRST_TOKENS = 3
NO_TOKEN = 2**32 - 1


class Answer:
    """Where one answer stands (`engine.grammar.Constraint`). Used by one thread."""

    def __init__(self, matcher: LLMatcher):
        self._matcher = matcher

    def fill_mask(self, words: memoryview) -> None:
        array = np.asarray(words)
        self._matcher.unsafe_compute_mask_ptr(array.ctypes.data, array.nbytes)
        self._check()

    def accept(self, token: int) -> None:
        self._matcher.consume_token(token)
        self._check()

    @property
    def is_complete(self) -> bool:
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise RuntimeError(self._matcher.get_error())


@dataclass(frozen=True, slots=True)
class CompiledGrammar:
    """For one call (`engine.grammar.Grammar`): its answers share the states of a lexer, which may run out."""

    matcher: LLMatcher

    def start(self) -> Answer:
        return Answer(self.matcher.deep_copy())


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """A vocabulary as the library wants it."""

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_id: int
    bos_token_id: None = None

    def __call__(self, text: bytes) -> list[int]:
        raise NotImplementedError("only for tokens that a grammar forces, and ours force none")


class Grammars:
    """Compiles grammars for a model whose logits have `vocab_size` entries.

    No id of a special token is ever allowed, but for one of `eos_token_ids` where an answer may end.
    """

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: Iterable[int], vocab_size: int):
        self._source = tokenizer
        self._eos_token_ids = sorted(id for id in eos_token_ids if id < vocab_size)
        self._vocab_size = vocab_size
        self._tokenizer: LLTokenizer | None = None
        self._lock = threading.Lock()
        self._limits = parser_limits()
        self._trials = Trials()
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)

    def prepare(self) -> LLTokenizer:
        """Build the library's view of the vocabulary, if that is not done yet. Takes a while; use any thread."""
        with self._lock:
            if self._tokenizer is None:
                self._tokenizer = self._build()
            return self._tokenizer

    async def compile(self, text: GrammarText) -> CompiledGrammar:
        """Raises RequestError, naming `text.param`, for what cannot be compiled within the bounds."""
        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                await self._slots.acquire()
        except TimeoutError:
            message = f"too many grammars are being compiled; this one waited {MAX_WAIT_SECONDS:.0f} seconds"
            raise RequestError(ErrorKind.OVERLOADED, message, code="queue_full") from None
        try:
            if error := await self._trials.error_of(text.lark):
                raise refusal(error, text.param)
            return await asyncio.to_thread(self._compile, text)
        finally:
            self._slots.release()

    async def close(self) -> None:
        """End the processes that try grammars."""
        await self._trials.close()

    def _compile(self, text: GrammarText) -> CompiledGrammar:
        matcher = LLMatcher(self.prepare(), text.lark, log_level=0, limits=self._limits)
        if not self._can_begin(matcher.deep_copy()):
            raise refusal(matcher.get_error() or "it allows no value, or is too large to begin one", text.param)
        return CompiledGrammar(matcher)

    def _can_begin(self, matcher: LLMatcher) -> bool:
        """Whether the first tokens of an answer can be had: what fails later fails in the middle of an answer."""
        for number in range(NUM_FIRST_TOKENS):
            mask = np.frombuffer(matcher.compute_bitmask(), np.uint8)
            allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
            token = next((int(id) for id in allowed if id not in self._eos_token_ids), None)
            if matcher.is_error() or token is None:
                return number > 0 and not matcher.is_error()
            matcher.consume_token(token)
        return True

    def _build(self) -> LLTokenizer:
        tokens = [self._source.token_bytes(id) for id in range(self._vocab_size)]
        # An end that is no special token would be text of a string, and end the answer inside of it.
        special = self._source.special_ids.union(self._eos_token_ids)
        ends = self._eos_token_ids
        vocabulary = _Vocabulary(
            tokens, sorted(id for id in special if id < self._vocab_size), ends[0] if ends else NO_TOKEN
        )
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=ends or None, slices=LLTokenizer.json_slices())
