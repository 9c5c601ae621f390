"""Random trees of pages for tests of the archive, and what should be left of one when some pages are damaged."""

import logging
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.kv.archive import Archive
from engine.kv.archive_format import SavedPage
from kernels.format.codec import Integer, per_channel, per_token, raw
from kernels.format.layout import PageLayout, Pool
from kernels.format.recipe import LayerRecipe, Recipe

PAGE_TOKENS = 4
INT8 = LayerRecipe(per_channel(Integer(8)), per_token(Integer(8)))


def layout(layer: LayerRecipe = INT8, *, page_tokens: int = PAGE_TOKENS, sink_pages: int = 1) -> PageLayout:
    """Pages of a few hundred bytes."""
    recipe = Recipe("test", (layer,), page_tokens, 0 if layer.is_raw else sink_pages)
    return PageLayout(recipe, num_kv_heads=1, head_dim=8, dtype="float32")


LAYOUT = layout()
RAW = layout(LayerRecipe(raw(), raw()))


@dataclass(frozen=True)
class Tree:
    """Pages, parents first, with the bytes of each."""

    pages: list[SavedPage]
    data: list[Tensor]

    def read(self, index: int) -> Tensor:
        return self.data[index]

    def without(self, lost: set[int]) -> list[tuple[SavedPage, bytes]]:
        """What is left, as an archive gives it, when `lost` and all below is gone."""
        names: dict[int, int] = {}
        left = []
        for index, page in enumerate(self.pages):
            if index in lost or (page.parent is not None and page.parent not in names):
                continue
            names[index] = len(names)
            parent = None if page.parent is None else names[page.parent]
            left.append((replace(page, parent=parent), self.data[index].numpy().tobytes()))
        return left

    @property
    def contents(self) -> list[tuple[SavedPage, bytes]]:
        return self.without(set())


def random_tree(seed: int, num_pages: int, layout: PageLayout = LAYOUT) -> Tree:
    rng = random.Random(seed)
    pages: list[SavedPage] = []
    depths: list[int] = []
    data = []
    for index in range(num_pages):
        parent = rng.choice([None, *range(index)]) if rng.random() < 0.3 else (index - 1 if index else None)
        depth = 0 if parent is None else depths[parent] + 1
        pool = Pool.OPEN if depth < layout.recipe.sink_pages else Pool.SEALED
        salt = rng.choice(["", "a", 'käse\n"', "7" * 64]) if parent is None else pages[parent].salt
        tokens = tuple(rng.randrange(2**17) for _ in range(layout.page_tokens))
        pages.append(SavedPage(parent, salt, tokens, pool, rng.randrange(-5, 5), rng.randrange(1000)))
        depths.append(depth)
        size = layout.slot_bytes if pool is Pool.OPEN else layout.page_bytes
        data.append(torch.frombuffer(bytearray(rng.randbytes(size)), dtype=torch.uint8))
    return Tree(pages, data)


TREE = random_tree(3, 14)


def opened(folder: Path, layout: PageLayout = LAYOUT, model: str = "m") -> Archive:
    archive = Archive.open(folder, layout, model)
    assert archive is not None
    return archive


def write(folder: Path, tree: Tree, layout: PageLayout = LAYOUT, model: str = "m") -> Path:
    """Returns the sub-folder that holds the archive."""
    archive = opened(folder, layout, model)
    archive.write(tree.pages, tree.read)
    archive.close()
    return folder / "quire-pages" / (folder / "quire-pages" / "current").read_text()


def read(folder: Path, layout: PageLayout = LAYOUT, model: str = "m") -> list[tuple[SavedPage, bytes]]:
    archive = opened(folder, layout, model)
    contents = [(page, data.numpy().tobytes()) for page, data in archive.read()]
    archive.close()
    return contents


class Warnings:
    """The warnings of the archive so far; each look empties the list."""

    def __init__(self, caplog: pytest.LogCaptureFixture):
        self._caplog = caplog

    def take(self) -> list[str]:
        records = [record for record in self._caplog.records if record.levelno >= logging.WARNING]
        assert {record.name for record in records} <= {"engine.kv.archive"}
        self._caplog.clear()
        return [record.getMessage() for record in records]

    def one(self, *parts: str) -> None:
        """There is exactly one, on one line, and it has these parts."""
        (message,) = self.take()
        assert "\n" not in message
        assert [part for part in parts if part not in message] == [], message


def all_seen(caplog: pytest.LogCaptureFixture) -> Iterator[Warnings]:
    """For a fixture: a test must look at every warning."""
    found = Warnings(caplog)
    yield found
    assert found.take() == []


def in_child(action: Callable[[], None]) -> int:
    """Run `action` in a copy of this process. Returns its exit code: 0 if it returned, 1 if it raised an OSError."""
    pid = os.fork()
    if pid:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    code = 99
    try:
        action()
        code = 0
    except OSError:
        code = 1
    finally:
        os._exit(code)
