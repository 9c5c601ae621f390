"""GPUs by name: what their data sheets say."""

import re
from dataclasses import dataclass

from engine.errors import StartupError
from engine.prescription import Processor

MAX_CARDS = 1024


@dataclass(frozen=True, slots=True)
class Card:
    """`gigabytes` is the data sheet's figure, of 10^9 bytes each; drivers show up to 7 % more on some cards."""

    name: str
    gigabytes: int
    generation: Processor

    @property
    def num_bytes(self) -> int:
        return self.gigabytes * 10**9


@dataclass(frozen=True, slots=True)
class Gpus:
    """`count` equal cards whose memory counts as one."""

    count: int
    card: Card

    @property
    def name(self) -> str:
        return self.card.name if self.count == 1 else f"{self.count}x{self.card.name}"

    @property
    def num_bytes(self) -> int:
        return self.count * self.card.num_bytes


CARDS = (
    Card("A10", 24, Processor.AMPERE),
    Card("A40", 48, Processor.AMPERE),
    Card("A100-40GB", 40, Processor.AMPERE),
    Card("A100-80GB", 80, Processor.AMPERE),
    Card("RTX3090", 24, Processor.AMPERE),
    Card("L4", 24, Processor.ADA),
    Card("L40S", 48, Processor.ADA),
    Card("RTX4090", 24, Processor.ADA),
    Card("H100", 80, Processor.HOPPER),
    Card("H200", 141, Processor.HOPPER),
    Card("B200", 180, Processor.HOPPER),
    Card("RTX5090", 32, Processor.HOPPER),
)


def parse_gpus(text: str) -> Gpus:
    """`L40S` or `4xL40S`. Raises StartupError with the names that are known."""
    match = re.fullmatch(r"(?:(\d{1,6})\s*[xX*×]\s*)?(\S+)", text.strip(), re.ASCII)
    cards = {_plain(card.name): card for card in CARDS}
    card = cards.get(_plain(match[2])) if match else None
    if match is None or card is None:
        names = ", ".join(card.name for card in CARDS)
        raise StartupError(f"--gpu is {text!r}; it must be one of {names}, or several of one kind as in 4xL40S")
    count = int(match[1] or 1)
    if not 1 <= count <= MAX_CARDS:
        raise StartupError(f"--gpu is {text!r}; the number of cards must be from 1 to {MAX_CARDS}")
    return Gpus(count, card)


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()
