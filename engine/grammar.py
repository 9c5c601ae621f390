"""What a request's answer must look like, token by token. No torch, and no library that knows grammars."""

from typing import Protocol


class Constraint(Protocol):
    """Where one answer stands in its grammar. What raises here fails that request alone."""

    def fill_mask(self, words: memoryview) -> None:
        """Say which tokens may come next. `words`: int32 [ceil(vocab / 32)], zeros at first; bit i % 32 of word i // 32
        allows token i."""

    def accept(self, token: int) -> None:
        """Take the token that came."""

    @property
    def is_complete(self) -> bool:
        """Whether nothing may follow."""


class Grammar(Protocol):
    """May be shared by requests."""

    def start(self) -> Constraint:
        """One more answer, of which nothing is there."""
