"""What a request must generate, from the definitions alone: no pages, no pools, no scheduler.

The K and V of a token are one number: a hash of the token, its position, and all K and V that its query reads. So a
number that is wrong anywhere changes every later token. A number read from a sealed page is marked as such.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.kv.shrink import HeavyHitters, Shrink, SnapKV, Streaming


def compute(token: int, position: int, read: Sequence[int]) -> int:
    return hash((token, position, *read))


def sealed(value: int) -> int:
    return hash((17, value))


def next_token(value: int, seed: int, vocab: int) -> int:
    return hash((value, seed)) % vocab


def attention_mass(query: int, first_of_page: int) -> float:
    """What a query gives to a page: an integer, so that sums are exact. `first_of_page`: its first number, unsealed."""
    return float(hash((query, first_of_page)) % 1000)


@dataclass
class Page:
    index: int
    values: list[int] = field(default_factory=list)
    mass: float = 0.0


def continuation(
    prompt: Sequence[int],
    num_tokens: int,
    seed: int,
    vocab: int,
    *,
    page_tokens: int,
    sink_pages: int,
    shrink_sinks: int,
    window_pages: int = 0,
    shrink: Shrink | None = None,
) -> list[int]:
    """The tokens that follow `prompt`."""
    pages: list[Page] = []
    tokens, out = list(prompt), []
    position = 0
    while len(out) < num_tokens:
        index = position // page_tokens
        if not pages or pages[-1].index != index:
            pages.append(Page(index))
            if isinstance(shrink, Streaming):
                pages = [page for page in pages if page.index < shrink_sinks or page.index >= index - shrink.recent]
        own = pages[-1]
        read = [
            value if page.index < sink_pages or page.index >= index - window_pages else sealed(value)
            for page in pages
            for value in page.values
        ]
        value = compute(tokens[position], position, read)
        own.values.append(value)
        is_observed = isinstance(shrink, HeavyHitters | SnapKV) and (
            len(prompt) - shrink.window <= position < len(prompt)
            or (position >= len(prompt) and isinstance(shrink, HeavyHitters))
        )
        if is_observed:
            for page in pages:
                page.mass += attention_mass(value, page.values[0])
        position += 1
        if position == len(prompt) and isinstance(shrink, SnapKV):
            pages = _snap(pages, shrink, page_tokens, shrink_sinks)
        ends_page = position % page_tokens == 0 and position >= len(prompt)
        if isinstance(shrink, HeavyHitters) and (position == len(prompt) or ends_page):
            pages = _heavy(pages, shrink, page_tokens, shrink_sinks)
        if position == len(tokens):
            tokens.append(next_token(value, seed, vocab))
            out.append(tokens[-1])
    return out


def _full(pages: list[Page], page_tokens: int) -> list[Page]:
    return [page for page in pages if len(page.values) == page_tokens]


def _heavy(pages: list[Page], shrink: HeavyHitters, page_tokens: int, sinks: int) -> list[Page]:
    full = _full(pages, page_tokens)
    middle = full[sinks : max(sinks, len(full) - shrink.recent)]
    best = sorted(middle, key=lambda page: (page.mass, page.index), reverse=True)[: shrink.heavy]
    return [page for page in pages if page not in middle or page in best]


def _snap(pages: list[Page], shrink: SnapKV, page_tokens: int, sinks: int) -> list[Page]:
    full = _full(pages, page_tokens)
    recent = (shrink.window + page_tokens - 1) // page_tokens
    middle = full[sinks : max(sinks, len(full) - recent)]
    reach = (shrink.kernel - 1) // 2

    def vote(page: Page) -> tuple[float, int]:
        near = [other.mass for other in middle if abs(other.index - page.index) <= reach]
        return max(near), page.index

    best = sorted(middle, key=vote, reverse=True)[: shrink.keep]
    return [page for page in pages if page not in middle or page in best]
