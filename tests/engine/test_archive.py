"""The archive of cached pages: round trips, whom it belongs to, and who may use it."""

import errno
import fcntl
import hashlib
import json
import os
import signal
import stat
from pathlib import Path

import pytest
from safetensors.torch import load_file

from engine.kv import archive_format
from engine.kv.archive import Archive
from kernels.format.codec import Integer, per_channel, per_token
from kernels.format.layout import PageLayout, Pool
from kernels.format.recipe import LayerRecipe
from tests.engine.archives import LAYOUT, RAW, Warnings, layout, opened, random_tree, read, write


@pytest.mark.parametrize("form", [LAYOUT, RAW, layout(sink_pages=3)])
@pytest.mark.parametrize("shard_bytes", [1, 3000, 2**30])
@pytest.mark.parametrize("num_pages", [0, 1, 2, 30])
def test_a_tree_comes_back(
    form: PageLayout,
    shard_bytes: int,
    num_pages: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    warnings: Warnings,
) -> None:
    monkeypatch.setattr(archive_format, "SHARD_BYTES", shard_bytes)
    for seed in range(3):  # each replaces the one before
        tree = random_tree(seed, num_pages, form)
        folder = write(tmp_path, tree, form)
        assert read(tmp_path, form) == tree.contents
        sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
        if shard_bytes == 3000 and num_pages == 30:
            assert len(sizes) > 1 and max(sizes) < 3000 + 300
        if shard_bytes == 1:
            assert len(sizes) == num_pages
        assert [path.name for path in folder.parent.iterdir() if path.is_dir()] == [folder.name]


def test_the_files_are_what_other_programs_expect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Read with the safetensors library and the json module alone."""
    monkeypatch.setattr(archive_format, "SHARD_BYTES", 2000)
    tree = random_tree(5, 40)
    folder = write(tmp_path, tree)
    index = json.loads((folder / "index.json").read_text())
    rows: dict[str, list[bytes]] = {"sealed": [], "open": []}
    files = sorted(folder.glob("pages-*.safetensors"))
    for path in files:
        tensors = load_file(path)
        assert tensors["sealed"].shape[1] == LAYOUT.page_bytes and tensors["open"].shape[1] == LAYOUT.slot_bytes
        for name, tensor in tensors.items():
            rows[name] += [row.numpy().tobytes() for row in tensor]
    assert len(files) > 2
    for pool in Pool:
        mine = [data.numpy().tobytes() for page, data in zip(tree.pages, tree.data, strict=True) if page.pool is pool]
        assert rows[pool.value] == mine
    checksums = [hashlib.sha256(data.numpy().tobytes()).hexdigest() for data in tree.data]
    assert [entry["sha256"] for entry in index["pages"]] == checksums
    assert [tuple(entry["tokens"]) for entry in index["pages"]] == [page.tokens for page in tree.pages]


def test_nobody_else_may_look(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        folder = write(tmp_path / "not" / "there", random_tree(0, 5))
    finally:
        os.umask(before)
    mine = folder.parent
    assert stat.S_IMODE(mine.parent.stat().st_mode) == 0o700
    for path in (mine, *mine.rglob("*")):
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)
    mine.chmod(0o777)
    opened(tmp_path / "not" / "there").close()
    assert stat.S_IMODE(mine.stat().st_mode) == 0o700


def test_a_folder_that_is_there_keeps_its_mode_and_its_files(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "0").mkdir()
    (tmp_path / "index.json").write_text("mine")
    for seed in range(2):
        write(tmp_path, random_tree(seed, 5))
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "index.json", "quire-pages"]
    assert (tmp_path / "index.json").read_text() == "mine"


def test_an_empty_folder_is_no_reason_to_warn(tmp_path: Path, warnings: Warnings) -> None:
    assert read(tmp_path) == []
    assert warnings.take() == []


@pytest.mark.parametrize(
    ("other", "model", "difference"),
    [
        (LAYOUT, "another", "another model"),
        (layout(LayerRecipe(per_channel(Integer(4)), per_token(Integer(8)))), "m", "another recipe and page_bytes"),
        (layout(page_tokens=8), "m", "another recipe and page_bytes and slot_bytes"),
        (layout(sink_pages=2), "m", "another recipe"),
        (PageLayout(LAYOUT.recipe, num_kv_heads=1, head_dim=8, dtype="float16"), "m", "another slot_bytes"),
    ],
)
def test_pages_of_another_server_are_not_used_and_not_lost(
    other: PageLayout, model: str, difference: str, tmp_path: Path, warnings: Warnings
) -> None:
    tree = random_tree(0, 10)
    folder = write(tmp_path, tree)
    assert read(tmp_path, other, model) == []
    warnings.one("pages on disk are not used", str(folder / "index.json"), difference)
    archive = opened(tmp_path, other, model)
    with pytest.raises(ZeroDivisionError):
        archive.write(random_tree(1, 10, other).pages, lambda index: 1 // 0)
    archive.close()
    assert read(tmp_path) == tree.contents
    replacement = random_tree(1, 10, other)
    write(tmp_path, replacement, other, model)
    assert read(tmp_path, other, model) == replacement.contents


def test_a_second_server_gets_no_archive(tmp_path: Path, warnings: Warnings) -> None:
    tree = random_tree(0, 10)
    first = opened(tmp_path)
    first.write(tree.pages, tree.read)
    assert Archive.open(tmp_path, LAYOUT, "m") is None
    warnings.one("pages are not kept on disk", str(tmp_path / "quire-pages"), "another server uses it")
    assert [(page, data.numpy().tobytes()) for page, data in first.read()] == tree.contents
    first.close()
    assert read(tmp_path) == tree.contents


def test_a_killed_server_leaves_no_lock(tmp_path: Path, warnings: Warnings) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        opened(tmp_path)
        os.write(writer, b"1")
        signal.pause()
    try:
        assert os.read(reader, 1) == b"1"
        assert Archive.open(tmp_path, LAYOUT, "m") is None
        warnings.one("another server uses it")
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    opened(tmp_path).close()


def refuse(folder: Path, warnings: Warnings, *parts: str) -> None:
    assert Archive.open(folder, LAYOUT, "m") is None
    warnings.one("pages are not kept on disk", *parts)


def test_a_file_where_a_folder_should_be(tmp_path: Path, warnings: Warnings) -> None:
    (tmp_path / "file").write_text("mine")
    refuse(tmp_path / "file", warnings, str(tmp_path / "file"))
    refuse(tmp_path / "file" / "below", warnings, str(tmp_path / "file"))
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "quire-pages").write_text("mine")
    refuse(tmp_path / "folder", warnings, str(tmp_path / "folder" / "quire-pages"), "not a folder")
    assert (tmp_path / "folder" / "quire-pages").read_text() == "mine"


def test_a_folder_that_links_elsewhere(tmp_path: Path, warnings: Warnings) -> None:
    """The user's own folder may be a link; what the server makes in it may not."""
    tree = random_tree(0, 5)
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", tree)
    assert read(tmp_path / "real") == tree.contents
    (tmp_path / "real" / "quire-pages").rename(tmp_path / "elsewhere")
    (tmp_path / "real" / "quire-pages").symlink_to(tmp_path / "elsewhere")
    refuse(tmp_path / "real", warnings, "not a folder")


@pytest.mark.parametrize("what", ["link", "folder"])
def test_a_lock_that_is_no_file(what: str, tmp_path: Path, warnings: Warnings) -> None:
    opened(tmp_path).close()
    lock, target = tmp_path / "quire-pages" / "lock", tmp_path / "target"
    lock.unlink()
    if what == "link":
        lock.symlink_to(target)
    else:
        lock.mkdir()
    refuse(tmp_path, warnings, str(lock))
    assert not target.exists()


def test_a_folder_of_another_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Warnings) -> None:
    """Who can write there could plant pages."""
    write(tmp_path, random_tree(0, 5))
    me = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: me + 1)
    refuse(tmp_path, warnings, f"belongs to user {me}, the server runs as user {me + 1}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(tmp_path: Path, warnings: Warnings) -> None:
    tmp_path.chmod(0o500)
    refuse(tmp_path, warnings, str(tmp_path), "Permission denied")
    refuse(tmp_path / "below", warnings, str(tmp_path), "Permission denied")


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, warnings: Warnings) -> None:
    def flock(descriptor: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    num_open = len(os.listdir("/proc/self/fd"))
    refuse(tmp_path, warnings, str(tmp_path), os.strerror(errno.ENOLCK))
    assert len(os.listdir("/proc/self/fd")) == num_open
