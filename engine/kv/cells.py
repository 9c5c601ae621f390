"""The pages of a pool as a line of characters, made of a copy and away from the engine's thread."""

from collections.abc import Sequence as List

import numpy as np
import numpy.typing as npt

from engine.kv.map import Pages

MAX_CELLS = 2**16

# Of several pages in one cell the one with the largest character is shown, so they are in order: `.` free, `0` cached,
# `1` to `9` held by so many sequences (9: or more), then the marks of held slots.
FREE, CACHED, MOST_HELD = ord("."), ord("0"), 9


def pages_per_cell(pages: Pages) -> int:
    return max(1, -(-len(pages.holders) // MAX_CELLS))


def cells(pages: Pages) -> str:
    """A character for each page, or for `pages_per_cell` of them."""
    held = CACHED + np.minimum(_small(pages.holders), MOST_HELD)
    codes = np.where(held > CACHED, held, np.where(_small(pages.is_kept), CACHED, FREE)).astype(np.uint8)
    for page, mark in pages.marks.items():
        codes[page - 1] = ord(mark)
    return _largest(codes, pages_per_cell(pages)).tobytes().decode("ascii")


def _small(numbers: List[int]) -> npt.NDArray[np.uint8]:
    """The numbers, or 255 for what is larger. Much faster than np.array where all are small."""
    try:
        return np.frombuffer(bytes(numbers), np.uint8)
    except ValueError:
        large: npt.NDArray[np.int64] = np.array(numbers, np.int64)
        return np.minimum(large, 255).astype(np.uint8)


def _largest(codes: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    """The largest of each `size` codes; the last group may be smaller."""
    if size > 1:
        codes = np.pad(codes, (0, -len(codes) % size)).reshape(-1, size).max(axis=1)
    return codes
