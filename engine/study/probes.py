"""Retrieval probes: what perplexity, a mean over easy tokens, does not show. No torch.

Passkey: a number hidden in a text, asked for at its end (arXiv 2305.16300). Quote: a passage of the text
begins again at its end; is it continued to the letter?
"""

import random
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from engine.study.windows import Tokens
from engine.tokenizer import Tokenizer

SHORTEST = 1024
NUM_ANSWER_TOKENS = 12
NUM_CUE_TOKENS = 64
NUM_QUOTED_TOKENS = 16
DIGITS = 5


class Asked(Protocol):
    """An engine that answers probes."""

    def answer(self, prompt: Sequence[int], num_tokens: int) -> str:
        """The text of a greedy continuation."""

    def continue_as(self, prompt: Sequence[int], expected: Sequence[int]) -> tuple[bool, float]:
        """Whether the greedy continuation is `expected`, and the log-likelihood of that in nats a token."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """`log_likelihood`: of the expected continuation in nats a token, where the probe has one."""

    is_passed: bool
    log_likelihood: float | None


class Case(Protocol):
    @property
    def probe(self) -> str: ...

    @property
    def name(self) -> str:
        """Names the case among all cases of a study."""

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that asking it computes in prefill."""

    def ask(self, engine: Asked) -> Outcome: ...


@dataclass(frozen=True, slots=True)
class PasskeyCase:
    name: str
    prompt: Tokens
    key: str
    probe: str = "passkey"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt)

    def ask(self, engine: Asked) -> Outcome:
        found = re.match(r"\s*(\d+)", engine.answer(self.prompt, NUM_ANSWER_TOKENS))
        return Outcome(found is not None and found[1] == self.key, None)


@dataclass(frozen=True, slots=True)
class QuoteCase:
    name: str
    prompt: Tokens
    quoted: Tokens
    probe: str = "quote"

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) + len(self.quoted) - 1

    def ask(self, engine: Asked) -> Outcome:
        return Outcome(*engine.continue_as(self.prompt, self.quoted))


@dataclass(frozen=True, slots=True)
class ProbePlan:
    """`names` of `PROBES`; each at `num_depths` depths of each length, `num_repeats` times with other text."""

    names: tuple[str, ...]
    num_depths: int
    num_repeats: int

    def cases(self, tokens: Tokens, context: int, tokenizer: Tokenizer) -> list[Case]:
        """The cases over the text `tokens`, of at least `context` tokens: the same for the same text and plan."""
        cases: list[Case] = []
        for probe in self.names:
            for length in _lengths(context):
                for repeat in range(self.num_repeats):
                    source = random.Random(f"{probe} {length} {repeat}")
                    start = source.randint(0, len(tokens) - length)
                    filler = tokens[start : start + length]
                    for index in range(self.num_depths):
                        depth = (index + 0.5) / self.num_depths
                        name = f"{probe} {length} tokens, depth {index + 1} of {self.num_depths}, repeat {repeat}"
                        cases.append(PROBES[probe](name, filler, depth, source, tokenizer))
        return cases


def _lengths(context: int) -> list[int]:
    """Powers of two from 1024 below `context`, and `context`."""
    lengths = [SHORTEST]
    while lengths[-1] * 2 < context:
        lengths.append(lengths[-1] * 2)
    return [length for length in lengths if length < context] + [context]


def _passkey(name: str, filler: Tokens, depth: float, source: random.Random, tokenizer: Tokenizer) -> Case:
    key = str(source.randrange(10 ** (DIGITS - 1), 10**DIGITS))

    def encode(text: str) -> Tokens:
        return tuple(tokenizer.encode(text, add_special_tokens=False))

    needle = encode(f"\n\nThe pass key is {key}. Remember it. {key} is the pass key.\n\n")
    question = encode("\n\nWhat is the pass key? The pass key is")
    room = len(filler) - len(needle) - len(question) - NUM_ANSWER_TOKENS
    place = int(depth * room)
    return PasskeyCase(name, filler[:place] + needle + filler[place:room] + question, key)


def _quote(name: str, filler: Tokens, depth: float, source: random.Random, tokenizer: Tokenizer) -> Case:
    """The passage lies in the first half, so that it is in sealed pages far from its repetition."""
    length = NUM_CUE_TOKENS + NUM_QUOTED_TOKENS
    paragraph = tuple(tokenizer.encode("\n\n", add_special_tokens=False))
    room = len(filler) - len(paragraph) - length
    place = int(depth * max(0, room // 2 - length))
    passage = filler[place : place + length]
    return QuoteCase(name, filler[:room] + paragraph + passage[:NUM_CUE_TOKENS], passage[NUM_CUE_TOKENS:])


MakeCase = Callable[[str, Tokens, float, random.Random, Tokenizer], Case]
"""From a name, the text around it, a depth from 0 to 1, a source of random numbers and a tokenizer."""

PROBES: dict[str, MakeCase] = {"passkey": _passkey, "quote": _quote}
