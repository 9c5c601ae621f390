"""Prompts of a run: random words of a wanted length in the server's tokens, with a part that all share."""

import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from server.bench.client import Client
from server.bench.endpoints import Prompt
from server.bench.recording import Recording, RequestFailed

# Common enough to be one token each, with the space before, in the vocabularies of today.
VOCABULARY = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company question work government number night point home water room mother "
    "area money story fact month lot right study book eye job word business issue side kind head house service friend "
    "father power hour game line end member law car city community name president team minute idea body information "
    "back parent face others level office door health person art war history party result change morning reason "
    "research girl guy moment air teacher force education foot boy age policy music market"
)
FEW_WORDS, MANY_WORDS = 16, 272
MAX_CORRECTIONS = 8
MAX_CUT_LETTERS = 12

Count = Callable[[str], Awaitable[int | None]]


class Words:
    """An endless list of random words; equal names give equal words."""

    def __init__(self, *name: object):
        self._random = random.Random("/".join(map(str, name)))
        self._words: list[str] = []

    def text(self, length: int) -> str:
        if len(self._words) < length:
            self._words += self._random.choices(VOCABULARY.split(), k=length - len(self._words))
        return " ".join(self._words[:length])


@dataclass(frozen=True, slots=True)
class Ruler:
    """How many tokens words make: `offset + per_word * words`. `count` is exact, where the server counts for free."""

    per_word: float
    offset: float
    count: Count | None
    is_known: bool

    def num_words(self, num_tokens: float) -> int:
        return max(0, round(num_tokens / self.per_word))


async def make_ruler(client: Client, seed: int) -> Ruler:
    """Measure two texts by the server's /tokenize, else by the usage of two requests for one token."""
    words = Words(seed, "ruler")
    is_free = await client.count_tokens(words.text(FEW_WORDS)) is not None

    async def generate(text: str) -> int | None:
        recording = Recording(None)
        try:
            await client.generate(Prompt(text, 1), recording)
        except RequestFailed:
            return None
        return recording.num_prompt_tokens

    count = client.count_tokens if is_free else generate
    for many in (MANY_WORDS, 2 * FEW_WORDS):  # the second for a server whose context is short
        few_tokens, many_tokens = await count(words.text(FEW_WORDS)), await count(words.text(many))
        if few_tokens is not None and many_tokens is not None and few_tokens < many_tokens:
            per_word = (many_tokens - few_tokens) / (many - FEW_WORDS)
            offset = few_tokens - per_word * FEW_WORDS
            return Ruler(per_word, offset, client.count_tokens if is_free else None, is_known=True)
    return Ruler(1.0, 0.0, None, is_known=False)


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Prompts of `num_tokens` tokens, of which the share `prefix_share` is the same in all prompts of a run.

    The rest differs by level and request, so that no level finds more in a cache than the shared part.
    """

    num_tokens: int
    max_tokens: int
    prefix_share: float
    seed: int
    ruler: Ruler

    async def take(self, level: int, num_prompts: int) -> list[Prompt]:
        return [await self._prompt(level, index) for index in range(num_prompts)]

    async def _prompt(self, level: int, index: int) -> Prompt:
        ruler = self.ruler
        num_words = max(1, ruler.num_words(self.num_tokens - ruler.offset))
        shared_words = min(num_words, ruler.num_words(self.prefix_share * self.num_tokens))
        shared = Words(self.seed, "shared").text(shared_words)
        own = Words(self.seed, "own") if self.prefix_share == 1 else Words(self.seed, level, index)

        def text(length: int) -> str:
            return f"{shared} {own.text(length)}".strip()

        if ruler.count is None:
            told = round(ruler.offset + ruler.per_word * num_words) if ruler.is_known else None
            return Prompt(text(num_words - shared_words), self.max_tokens, told)
        fitted, length = await fit(text, num_words - shared_words, self.num_tokens, ruler)
        return Prompt(fitted, self.max_tokens, length)


async def fit(text: Callable[[int], str], num_words: int, num_tokens: int, ruler: Ruler) -> tuple[str, int | None]:
    """The text nearest to `num_tokens` tokens that a few counts find, and its length.

    `text` gives a text for a number of words. Where whole words cannot hit it, letters are cut off the end.
    """
    assert ruler.count is not None
    found: dict[int, tuple[int, str]] = {}
    for _ in range(MAX_CORRECTIONS):
        candidate = text(num_words)
        length = await ruler.count(candidate) if candidate else 0
        if length is None:
            return candidate, None
        found[num_words] = length, candidate
        missing = num_tokens - length
        step = max(1, round(abs(missing) / ruler.per_word))
        num_words = max(0, num_words + (step if missing > 0 else -step))
        if missing == 0 or num_words in found:
            break
    best, best_text = min(found.values(), key=lambda item: (abs(item[0] - num_tokens), item))
    longer = min((item for item in found.values() if item[0] > num_tokens), default=None)
    if best == num_tokens or longer is None:
        return best_text, best
    for cut in range(1, MAX_CUT_LETTERS + 1):
        candidate = longer[1][:-cut]
        length = await ruler.count(candidate) if candidate else None
        if length is not None and abs(length - num_tokens) < abs(best - num_tokens):
            best, best_text = length, candidate
        if best == num_tokens or length is None or length < num_tokens:
            break
    return best_text, best
