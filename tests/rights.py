"""Files of other users, also where the tests run as root."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

NOBODY = 65534


@contextmanager
def without_rights() -> Iterator[int]:
    """As a user whom permissions bind, which they do not bind root. Gives its number."""
    if os.geteuid() != 0:
        yield os.geteuid()
        return
    os.seteuid(NOBODY)
    try:
        yield NOBODY
    finally:
        os.seteuid(0)


@contextmanager
def shared_folder() -> Iterator[Path]:
    """One that other users may enter, as they may not enter `tmp_path`."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    try:
        yield path
    finally:
        for root, _, _ in os.walk(path):
            os.chmod(root, 0o700)
        shutil.rmtree(path)
