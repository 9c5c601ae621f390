"""Shrink hooks: which full pages of a running sequence are dropped. No torch.

A page holds all layers and heads, so a policy chooses for all of them at once, unlike the papers, whose choice is per
head (docs/hooks.md says what that costs). Tokens keep their positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Protocol

from kernels.format.recipe import Recipe


@dataclass(frozen=True, slots=True)
class ShrinkView:
    """What a policy sees of a sequence after a step.

    `mass`: for each full page that the sequence still has, in order, the attention weight that observed queries gave
    it, summed over layers, heads and queries. The first `num_sinks` of them are sink pages. `is_prefilled`: no prompt
    token is left to compute; `is_first`: for the first time.
    """

    mass: Sequence[float]
    num_sinks: int
    page_tokens: int
    is_prefilled: bool
    is_first: bool


class Shrink(Protocol):
    """`window`: the last prompt tokens whose attention is observed. `observes_decode`: that of generated ones, too.

    `is_positional`: what is dropped follows from positions alone, so a sequence can be computed again after preemption.
    """

    @property
    def window(self) -> int: ...
    @property
    def observes_decode(self) -> bool: ...
    @property
    def is_positional(self) -> bool: ...

    def num_whole_pages(self, num_sinks: int) -> int | None:
        """Leading pages that are always computed with nothing dropped; None: all before the first drop. Those behind
        are never shared."""

    def num_kept_pages(self, num_sinks: int) -> int | None:
        """Most full pages that a sequence keeps once its prompt is done; None: no bound."""

    def drop(self, view: ShrinkView) -> Sequence[int]:
        """Places in `view.mass`, ascending, of the pages to drop; never of sink pages."""


@dataclass(frozen=True, slots=True)
class Streaming:
    """Sink pages and the `recent` full pages before a token's own (StreamingLLM, arXiv 2309.17453, but positions are
    kept). It holds in prefill too, so that a page's content follows from positions alone."""

    recent: int = 16

    @property
    def window(self) -> int:
        return 0

    @property
    def observes_decode(self) -> bool:
        return False

    @property
    def is_positional(self) -> bool:
        return True

    def num_whole_pages(self, num_sinks: int) -> int:
        return num_sinks + self.recent + 1

    def num_kept_pages(self, num_sinks: int) -> int:
        return num_sinks + self.recent

    def drop(self, view: ShrinkView) -> Sequence[int]:
        return range(view.num_sinks, len(view.mass) - self.recent)

    def __str__(self) -> str:
        return f"streaming:recent={self.recent}"


@dataclass(frozen=True, slots=True)
class HeavyHitters:
    """Sink pages, the `recent` newest full pages, and the `heavy` of the others with the largest mass over the queries
    so far (H2O, arXiv 2306.14048, section 4). The prompt's part of the mass is that of its last `window` tokens."""

    heavy: int = 16
    recent: int = 8
    window: int = 32

    @property
    def observes_decode(self) -> bool:
        return True

    @property
    def is_positional(self) -> bool:
        return False

    def num_whole_pages(self, num_sinks: int) -> None:
        return None

    def num_kept_pages(self, num_sinks: int) -> int:
        return num_sinks + self.heavy + self.recent

    def drop(self, view: ShrinkView) -> Sequence[int]:
        if not view.is_prefilled:
            return ()
        return _lightest(view.mass, view.num_sinks, len(view.mass) - self.recent, self.heavy)

    def __str__(self) -> str:
        return f"h2o:heavy={self.heavy},recent={self.recent},window={self.window}"


@dataclass(frozen=True, slots=True)
class SnapKV:
    """Once, when the prompt is done: the `keep` pages with the largest mass in the prompt's last `window` tokens, each
    page counting as much as the largest of the `kernel` (odd) pages around it that may go, too (SnapKV, arXiv
    2404.14469, section 4)."""

    keep: int = 16
    window: int = 32
    kernel: int = 3

    @property
    def observes_decode(self) -> bool:
        return False

    @property
    def is_positional(self) -> bool:
        return False

    def num_whole_pages(self, num_sinks: int) -> None:
        return None

    def num_kept_pages(self, num_sinks: int) -> None:
        return None

    def drop(self, view: ShrinkView) -> Sequence[int]:
        if not view.is_first:
            return ()
        start, end = view.num_sinks, len(view.mass) - -(-self.window // view.page_tokens)
        reach = self.kernel // 2
        pooled = list(view.mass)
        for place in range(start, end):  # sinks and the newest stay anyway; their weight would only help neighbours
            pooled[place] = max(view.mass[max(start, place - reach) : min(end, place + reach + 1)])
        return _lightest(pooled, start, end, self.keep)

    def __str__(self) -> str:
        return f"snapkv:keep={self.keep},window={self.window},kernel={self.kernel}"


def _lightest(mass: Sequence[float], start: int, end: int, num_kept: int) -> list[int]:
    """The places in [start, end) but for the `num_kept` of largest mass; of equal ones the newer stay."""
    ranked = sorted(range(start, end), key=lambda place: (mass[place], place))
    return sorted(ranked[: max(0, len(ranked) - num_kept)])


def why_none_is_dropped(recipe: Recipe) -> str | None:
    """The reason that pages of `recipe` cannot be dropped; None where they can."""
    if recipe.window_pages:
        return f"a server with a window (--window-pages {recipe.window_pages}) drops no pages"
    if not recipe.renumbers and any(layer.before_rope for layer in recipe.layers):
        return (
            f"recipe {recipe.name} stores K before RoPE in some layers and after it in others, "
            "so positions of what is left could be neither kept nor numbered anew"
        )
    return None


SHRINKS: dict[str, type[Streaming | HeavyHitters | SnapKV]] = {
    "streaming": Streaming,
    "h2o": HeavyHitters,
    "snapkv": SnapKV,
}
LARGEST = 2**20


def parse_shrink(text: str) -> Shrink | None:
    """`none`, `streaming:recent=32`, `h2o:heavy=16,recent=8`, `snapkv:keep=16`: options left out have their defaults.

    Raises ValueError with what is accepted.
    """
    name, _, rest = text.partition(":")
    if text == "none":
        return None
    if name not in SHRINKS:
        raise ValueError(f"must be none, or one of {', '.join(SHRINKS)} with options such as streaming:recent=32")
    known = [field.name for field in fields(SHRINKS[name])]
    options: dict[str, int] = {}
    for part in rest.split(",") if rest else ():
        key, _, value = part.partition("=")
        if key not in known or key in options:
            raise ValueError(f"{name} takes each of {', '.join(known)} at most once")
        if not (value.isascii() and value.isdigit() and len(value) <= 7 and 1 <= int(value) <= LARGEST):
            raise ValueError(f"{key} of {name} must be an integer from 1 to {LARGEST}")
        options[key] = int(value)
    if options.get("kernel", 1) % 2 == 0:
        raise ValueError(f"kernel of {name} must be odd: a page and as many on either side of it")
    return SHRINKS[name](**options)
