"""Damage on disk: what fails is not used, with one warning, and the rest is."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from engine.kv import archive
from kernels.format.layout import Pool
from tests.engine.archives import TREE, Warnings, opened, read, write

pytestmark = pytest.mark.usefixtures("small_shards")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.safetensors"))


def pages_of(folder: Path) -> list[tuple[Path, int, set[int]]]:
    """(file, first byte, page) of every page, worked out from the files' own headers and sizes."""
    places = []
    queue = list(enumerate(TREE.pages))
    for path in shards(folder):
        data = path.read_bytes()
        header_bytes = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:header_bytes])
        count = header["sealed"]["shape"][0] + header["open"]["shape"][0]
        mine, queue = queue[:count], queue[count:]
        for pool in Pool:
            start = header_bytes + header[pool.value]["data_offsets"][0]
            for row, index in enumerate(index for index, page in mine if page.pool is pool):
                places.append((path, start + row * header[pool.value]["shape"][1], {index}))
    assert not queue
    return places


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << offset % 8
    path.write_bytes(data)


def pages_in(folder: Path, path: Path) -> set[int]:
    return set().union(*(pages for file, _, pages in pages_of(folder) if file == path))


def test_a_flipped_bit_anywhere_in_the_index_spoils_all(folder: Path, tmp_path: Path, warnings: Warnings) -> None:
    path = folder / "index.json"
    whole = path.read_bytes()
    for offset in {*range(0, len(whole), 41), *range(30), *range(len(whole) - 90, len(whole))}:
        flip(path, offset)
        assert read(tmp_path) == []
        warnings.one("pages on disk are not used", str(path), "checksum")
        path.write_bytes(whole)
    assert read(tmp_path) == TREE.contents


def test_a_flipped_bit_in_the_name_of_the_folder_spoils_all(folder: Path, tmp_path: Path, warnings: Warnings) -> None:
    current = folder.parent / "current"
    for bit in range(8):
        current.write_bytes(bytes([folder.name.encode()[0] ^ 1 << bit]))
        assert read(tmp_path) == []
        warnings.one("pages on disk are not used", str(folder.parent))
    for content in (b"", b"00", b"../" * 3, b"1\n", bytes(1000)):
        current.write_bytes(content)
        assert read(tmp_path) == []
        warnings.one("pages on disk are not used", str(current))


def test_a_flipped_bit_in_a_page_spoils_it_and_what_is_behind_it(
    folder: Path, tmp_path: Path, warnings: Warnings
) -> None:
    places = pages_of(folder)
    assert len(places) == len(TREE.pages) and len(shards(folder)) > 2
    for path, start, lost in places:
        (index,) = lost
        for offset in (start, start + 77, start + TREE.data[index].numel() - 1):
            flip(path, offset)
            left = TREE.without(lost)
            assert read(tmp_path) == left
            counts = f"{len(TREE.pages) - len(left)} of {len(TREE.pages)} pages"
            warnings.one(counts, str(path), f"wrong checksum of page {index}")
            flip(path, offset)
    assert read(tmp_path) == TREE.contents


def test_a_flipped_bit_in_a_header_spoils_the_file(folder: Path, tmp_path: Path, warnings: Warnings) -> None:
    for path in shards(folder):
        left = TREE.without(pages_in(folder, path))
        header_bytes = min(start for file, start, _ in pages_of(folder) if file == path)
        for offset in range(header_bytes):
            flip(path, offset)
            assert read(tmp_path) == left
            warnings.one(str(path), "header")
            flip(path, offset)


def test_files_of_another_length(folder: Path, tmp_path: Path, warnings: Warnings) -> None:
    lost = {path: pages_in(folder, path) for path in shards(folder)}
    lost[folder / "index.json"] = set(range(len(TREE.pages)))
    for path, pages in lost.items():
        whole = path.read_bytes()
        lengths = {*range(0, len(whole), 97), *range(0, 12), len(whole) - 1, len(whole) + 1, len(whole) + 10_000}
        for length in lengths:
            path.write_bytes((whole + bytes(10_000))[:length])
            assert read(tmp_path) == TREE.without(pages)
            warnings.one(str(path))
        path.write_bytes(whole)


def nothing(path: Path) -> None:
    pass


@pytest.mark.parametrize(
    "replace", [nothing, Path.mkdir, os.mkfifo, lambda path: path.symlink_to(path.parent.parent / "elsewhere")]
)
@pytest.mark.parametrize("name", ["index.json", "pages-00001.safetensors", "../current"])
def test_what_is_no_file_is_not_read(
    replace: Callable[[Path], None], name: str, folder: Path, tmp_path: Path, warnings: Warnings
) -> None:
    """Missing, a folder, a pipe that nobody writes to, a link to the very file."""
    path = folder / name
    path = path.parent.resolve() / path.name
    lost = pages_in(folder, path) if name.endswith("safetensors") else set(range(len(TREE.pages)))
    path.rename(folder.parent / "elsewhere")
    replace(path)
    assert read(tmp_path) == TREE.without(lost)
    if not (name == "../current" and replace is nothing):  # without it there simply is no archive
        warnings.one(str(path))


def test_a_folder_in_the_way_is_replaced(folder: Path, tmp_path: Path, warnings: Warnings) -> None:
    current = folder.parent / "current"
    current.unlink()
    current.mkdir()
    write(tmp_path, TREE)
    assert read(tmp_path) == TREE.without(set())


def test_a_vast_index_is_not_read(folder: Path, tmp_path: Path, warnings: Warnings) -> None:
    os.truncate(folder / "index.json", 2**31)  # sparse: takes no disk
    assert read(tmp_path) == []
    warnings.one(str(folder / "index.json"), str(2**31))


def test_a_failing_disk_spoils_what_lies_there(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Warnings
) -> None:
    """A read error is raised where a mapped file would have ended the process."""
    read_page = archive._read_page
    calls = 0

    def failing(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return read_page(*args)

    monkeypatch.setattr(archive, "_read_page", failing)
    assert read(tmp_path) == TREE.without({2})
    warnings.one(os.strerror(errno.EIO), "of page 2", str(shards(folder)[0]))


def test_a_reader_may_stop(folder: Path, tmp_path: Path, warnings: Warnings) -> None:
    (path, start, _) = next(place for place in pages_of(folder) if place[2] == {0})
    flip(path, start)
    archive = opened(tmp_path)
    num_open = len(os.listdir("/proc/self/fd"))
    pages = archive.read()
    next(pages)
    pages.close()
    assert len(os.listdir("/proc/self/fd")) == num_open
    warnings.one("wrong checksum of page 0")
    archive.close()
