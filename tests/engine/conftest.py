"""What tests of the archive share."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.kv import archive_format
from tests.engine.archives import TREE, Warnings, all_seen, write


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture) -> Iterator[Warnings]:
    """The archive's; a test must look at every one."""
    yield from all_seen(caplog)


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive_format, "SHARD_BYTES", 1000)


@pytest.fixture
def folder(tmp_path: Path, small_shards: None) -> Path:
    """The sub-folder of an archive with the pages of `TREE`."""
    return write(tmp_path, TREE)
