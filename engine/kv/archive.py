"""Cached pages on disk, so that a restarted server still has them.

    <cache folder>/quire-pages/   mode 0700, because it tells what users wrote
        lock                      locked while a server uses the folder
        current                   names the sub-folder that is the archive
        0/, 1/                    index.json and pages-00000.safetensors, ...

A new archive goes to the sub-folder that is not current. Replacing `current` is the one step that makes it the archive,
so whatever breaks off before leaves the old one. Nothing on disk is believed: a page is used only if the index passes
every check and the page's own checksum holds.
"""

import fcntl
import hashlib
import logging
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from engine.kv.archive_format import MAX_INDEX_BYTES, ArchiveFormat, Index, Mismatch, Place, SavedPage, Shard
from kernels.format.layout import PageLayout

SUBFOLDERS = ("0", "1")
INDEX = "index.json"
logger = logging.getLogger(__name__)


class Archive:
    """The archive in one cache folder, for pages of one layout and model. Made by `open`; locks the folder."""

    def __init__(self, folder: Path, lock: int, form: ArchiveFormat):
        self._folder = folder
        self._current = folder / "current"
        self._lock = lock
        self._format = form

    @classmethod
    def open(cls, cache_folder: Path, layout: PageLayout, model: str) -> "Archive | None":
        """`model` is the model's fingerprint. None, with one warning, where the folder cannot be used or another server
        uses it."""
        folder = cache_folder / "quire-pages"
        try:
            lock = _lock(folder)
        except (OSError, Mismatch) as error:
            logger.warning("pages are not kept on disk: %s", _reason(error, folder))
            return None
        return cls(folder, lock, ArchiveFormat(layout, model))

    def close(self) -> None:
        """Let another server use the folder."""
        os.close(self._lock)

    def read(self) -> Iterator[tuple[SavedPage, Tensor]]:
        """The pages that can be used, parents first, each with its bytes, flat uint8 on the CPU.

        `parent` counts the pages given out. A page that fails a check is left out with all below it, and one warning
        sums that up. Never raises. Bytes are read, not mapped: a bad sector or a truncation under a mapping kills the
        process, and mapped bytes can change after they were checked.
        """
        path = self._current
        try:
            folder = self._current_folder()
            if folder is None:
                logger.info("no pages on disk yet: %s", self._folder)
                return
            path = folder / INDEX
            index = self._read_index(path)
        except (OSError, Mismatch) as error:
            logger.warning("pages on disk are not used: %s", _reason(error, path))
            return
        failures: list[str] = []
        try:
            yield from self._read_pages(folder, index, failures)
        finally:
            if failures:
                counts = f"{len(failures)} of {len(index.pages)}"
                logger.warning("%s pages on disk are not used; the first: %s", counts, failures[0])

    def write(self, pages: Sequence[SavedPage], read: Callable[[int], Tensor]) -> None:
        """Make `pages`, parents first, the archive. `read(i)` gives the bytes of page i, flat uint8 on the CPU; it is
        called once a page, not in order.

        Raises OSError, and leaves the archive as it was, where the disk does not take them.
        """
        old = self._folder / SUBFOLDERS[0]
        with suppress(OSError, Mismatch):
            old = self._current_folder() or old
        new = self._folder / SUBFOLDERS[old.name == SUBFOLDERS[0]]
        draft = self._folder / "current.new"
        try:
            _remove(new)
            new.mkdir(mode=0o700)
            checksums = [""] * len(pages)
            for shard in self._format.shards(pages):
                _write_shard(new / shard.name, shard, read, checksums)
            _write(new / INDEX, self._format.index_lines(Index(pages, checksums)))
            _sync(new)
            _remove(draft)
            _write(draft, [new.name.encode()])
            if self._current.is_dir():  # somebody's mistake, which a file cannot replace
                _remove(self._current)
            os.replace(draft, self._current)
        except BaseException:
            with suppress(OSError):
                _remove(new)
                _remove(draft)
            raise
        _sync(self._folder)
        with suppress(OSError):  # else the next write removes it
            _remove(old)

    def _current_folder(self) -> Path | None:
        """None if there is no archive. Raises OSError or Mismatch where that cannot be told."""
        try:
            with _open(self._current) as file:
                name = file.read(8)
        except FileNotFoundError:
            return None
        if name not in [item.encode() for item in SUBFOLDERS]:
            raise Mismatch("it does not name a sub-folder")
        return self._folder / name.decode()

    def _read_index(self, path: Path) -> Index:
        with _open(path) as file:
            num_bytes = os.fstat(file.fileno()).st_size
            if num_bytes > MAX_INDEX_BYTES:
                raise Mismatch(f"it has {num_bytes} bytes, at most {MAX_INDEX_BYTES} are read")
            return self._format.parse_index(file.read(num_bytes))

    def _read_pages(self, folder: Path, index: Index, failures: list[str]) -> Iterator[tuple[SavedPage, Tensor]]:
        given: dict[int, int] = {}
        for shard in self._format.shards(index.pages):
            path = folder / shard.name
            try:
                file = _open_shard(path, shard)
            except (OSError, Mismatch) as error:
                failures += [_reason(error, path)] * len(shard.places)
                continue
            with file:
                for number, place in enumerate(shard.places, shard.first):
                    page = index.pages[number]
                    if page.parent is not None and page.parent not in given:
                        failures.append(f"page {number}: its parent is not used")
                        continue
                    try:
                        data = _read_page(file, place, index.checksums[number])
                    except (OSError, Mismatch) as error:
                        failures.append(f"{_reason(error, path)} of page {number}")
                        continue
                    given[number] = len(given)
                    yield replace(page, parent=None if page.parent is None else given[page.parent]), data


def _lock(folder: Path) -> int:
    """Make the folder if it is not there, see that it is ours alone, lock it. Returns the lock's descriptor."""
    folder.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode):
        raise Mismatch("it is not a folder")
    if status.st_uid != os.geteuid():
        raise Mismatch(f"it belongs to user {status.st_uid}, the server runs as user {os.geteuid()}")
    if status.st_mode & 0o077:
        folder.chmod(0o700)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        if isinstance(error, BlockingIOError):
            raise Mismatch("another server uses it") from error
        raise
    return lock


def _open(path: Path) -> BufferedReader:
    """Open a regular file to read, and nothing that a link leads to. Raises OSError or Mismatch."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise Mismatch("it is not a file")
    return os.fdopen(descriptor, "rb")


def _open_shard(path: Path, shard: Shard) -> BufferedReader:
    file = _open(path)
    try:
        num_bytes = os.fstat(file.fileno()).st_size
        if num_bytes != shard.num_bytes:
            raise Mismatch(f"it has {num_bytes} bytes, expected {shard.num_bytes}")
        if file.read(len(shard.header)) != shard.header:
            raise Mismatch("its header is not the one that the index calls for")
    except BaseException:
        file.close()
        raise
    return file


def _read_page(file: BufferedReader, place: Place, checksum: str) -> Tensor:
    data = torch.empty(place.num_bytes, dtype=torch.uint8)
    view = data.numpy().data
    file.seek(place.offset)
    if file.readinto(view) != place.num_bytes or hashlib.sha256(view).hexdigest() != checksum:
        raise Mismatch("wrong checksum")
    return data


def _write_shard(path: Path, shard: Shard, read: Callable[[int], Tensor], checksums: list[str]) -> None:
    """Also puts the checksums of its pages into `checksums`. Holds one page at a time."""

    def parts() -> Iterator[bytes | memoryview]:
        yield shard.header
        numbered = enumerate(shard.places, shard.first)
        for number, place in sorted(numbered, key=lambda item: item[1].offset):
            data = read(number).numpy().data
            if data.nbytes != place.num_bytes:
                raise RuntimeError(f"page {number} has {data.nbytes} bytes, expected {place.num_bytes}")
            checksums[number] = hashlib.sha256(data).hexdigest()
            yield data

    _write(path, parts())


def _write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """A new file, on disk when this returns."""
    with open(path, "xb", opener=lambda name, flags: os.open(name, flags, 0o600)) as file:
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())


def _sync(folder: Path) -> None:
    """Entries of the folder, on disk when this returns."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(path: Path) -> None:
    """A folder with all in it, or a file, or a link, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _reason(error: Exception, path: Path) -> str:
    """What is wrong, and where."""
    if isinstance(error, OSError):
        return f"{error.filename or path}: {error.strerror or error}"
    return f"{path}: {error}"
