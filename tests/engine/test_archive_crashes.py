"""Full disks and kills while an archive is written: the old archive or the new one, never a part of one."""

import errno
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.engine.archives import TREE, Tree, Warnings, in_child, opened, random_tree, read, write

NEXT = random_tree(8, 11)
pytestmark = pytest.mark.usefixtures("small_shards")


def replace_archive(folder: Path) -> None:
    archive = opened(folder)
    archive.write(NEXT.pages, NEXT.read)


def leftovers(tmp_path: Path) -> list[str]:
    mine = tmp_path / "quire-pages"
    current = (mine / "current").read_text()
    return sorted(path.name for path in mine.iterdir() if path.name not in ("lock", "current", current))


def test_a_full_disk_leaves_the_old_archive(folder: Path, tmp_path: Path, warnings: Warnings) -> None:
    """A limit on the size of files stops the write at every stage: in a header, in a page, in the index."""
    largest = max(path.stat().st_size for path in folder.iterdir())
    outcomes = []
    for limit in [*range(0, largest + 1000, 61)]:

        def limited(limit: int = limit) -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
            replace_archive(tmp_path)

        outcomes.append(in_child(limited))
        if outcomes[-1] == 0:
            break
        assert outcomes[-1] == 1
        assert leftovers(tmp_path) == []
        assert read(tmp_path) == TREE.contents
    assert len(outcomes) > 20 and outcomes[-1] == 0
    assert read(tmp_path) == NEXT.contents
    assert warnings.take() == []


def test_a_disk_that_is_full_only_when_synced(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delayed allocation: the error comes at fsync."""
    sync, left = os.fsync, 0

    def fsync(descriptor: int) -> None:
        nonlocal left
        left -= 1
        if left < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    archive = opened(tmp_path)
    sizes = []
    for number in range(50):
        left = number
        try:
            archive.write(NEXT.pages, NEXT.read)
        except OSError as error:
            assert error.errno == errno.ENOSPC
        sizes.append(len([*archive.read()]))
        if left >= 0:
            break
        if sizes[-1] == len(TREE.pages):
            assert leftovers(tmp_path) == []
    # the very last one comes when the new archive is in place
    assert sizes == [len(TREE.pages)] * (len(sizes) - 2) + [len(NEXT.pages)] * 2
    assert len(sizes) > 6
    archive.close()


class Killer:
    """Kills the process before file operation number `after`, seen by the interpreter's audit hook."""

    EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree", "os.truncate")

    def __init__(self, folder: Path, after: int):
        self._folder = str(folder)
        self._left = after

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event in self.EVENTS and (str(arguments[0]).startswith(self._folder) or event in ("os.remove", "os.rmdir")):
            self._left -= 1
            if self._left < 0:
                os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("is_first", [True, False])
def test_a_kill_between_any_two_file_operations(is_first: bool, tmp_path: Path, warnings: Warnings) -> None:
    """The archive is the old one or the new one, never a part, and never none where there was one."""
    seen = []
    for after in range(200):
        tree = random_tree(after, 9)
        folder = tmp_path / str(after)
        if not is_first:
            write(folder, TREE)
        else:
            opened(folder).close()

        def killed(folder: Path = folder, after: int = after) -> None:
            archive = opened(folder)
            sys.addaudithook(Killer(folder, after))
            archive.write(NEXT.pages, NEXT.read)

        code = in_child(killed)
        contents = read(folder)
        assert contents in ([] if is_first else TREE.contents, NEXT.contents)
        seen.append(contents == NEXT.contents)
        write(folder, tree)  # the mess is no hindrance
        assert read(folder) == tree.contents
        assert leftovers(folder) == []
        if code == 0:
            break
        assert code == -signal.SIGKILL
    assert seen[-1] and not seen[0] and seen == sorted(seen)
    assert len(seen) > 8
    assert warnings.take() == []


@pytest.mark.parametrize("number", [0, 5, len(NEXT.pages) - 1])
def test_a_kill_while_a_page_is_read(number: int, folder: Path, tmp_path: Path) -> None:
    def killed() -> None:
        def kill_at(index: int) -> Any:
            if index == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return NEXT.read(index)

        opened(tmp_path).write(NEXT.pages, kill_at)

    assert in_child(killed) == -signal.SIGKILL
    assert read(tmp_path) == TREE.contents


def test_a_page_of_the_wrong_size_is_a_bug(folder: Path, tmp_path: Path) -> None:
    wrong = Tree(NEXT.pages, [part[1:] for part in NEXT.data])
    with pytest.raises(RuntimeError, match=r"page \d+ has \d+ bytes, expected \d+"):
        write(tmp_path, wrong)
    assert leftovers(tmp_path) == []
