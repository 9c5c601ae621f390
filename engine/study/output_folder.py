"""A folder of results that is there whole or not at all. No torch."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from engine.errors import StartupError


def check_output(path: Path, *, force: bool) -> None:
    """Raises StartupError if results cannot go to `path`, which is a new or an empty folder unless `force`."""
    if not path.absolute().parent.is_dir():
        raise StartupError(f"--output {path}: there is no folder {path.absolute().parent}; make it first")
    if path.exists() and not path.is_dir():
        raise StartupError(f"--output {path} is a file; name a folder")
    if not force and path.is_dir() and any(path.iterdir()):
        raise StartupError(f"--output {path} is not empty; name a new folder, or replace its files with --force")


@contextmanager
def output_folder(path: Path, *, force: bool) -> Iterator[Path]:
    """A temporary folder beside `path`, which takes its place when the block ends well and goes if it does not. With
    `force` its files replace those of equal names in `path`; others stay. Raises StartupError."""
    check_output(path, force=force)
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{path.absolute().name}-", dir=path.absolute().parent))
        try:
            yield partial
            partial.chmod(0o777 & ~_umask())
            if path.is_dir() and any(path.iterdir()):
                for file in partial.iterdir():
                    os.replace(file, path / file.name)
            else:
                os.replace(partial, path)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise StartupError(f"--output {path} cannot be written: {error.strerror or error}") from error


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask
