"""Which tokens penalties are about, kept up to date as a sequence grows. No torch."""

from array import array
from collections.abc import Iterable


class TokenCounts:
    """`tokens`, each once, and the `counts` of how often each was generated: int64 arrays of equal length. 0 for those
    that only the prompt has."""

    def __init__(self, prompt: Iterable[int]):
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self.tokens = array("q", self._places)
        self.counts = array("q", bytes(8 * len(self._places)))

    def add(self, token: int) -> None:
        """Count a generated token."""
        place = self._places.setdefault(token, len(self.tokens))
        if place == len(self.tokens):
            self.tokens.append(token)
            self.counts.append(0)
        self.counts[place] += 1
