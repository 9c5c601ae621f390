"""Files that are read again when they change: keys and certificates."""

import os
from pathlib import Path
from stat import S_ISREG

from engine.errors import StartupError

Stamp = tuple[int, int, int, int]


def stamp_of(option: str, path: Path) -> Stamp:
    """Another one where the file has other content, another owner or other rights. Raises StartupError."""
    try:
        stat = os.stat(path)
    except OSError as error:
        raise unreadable(option, path, error) from None
    if not S_ISREG(stat.st_mode):  # to read a pipe would wait for whoever writes
        raise StartupError(f"{option} {path} is not a regular file")
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino


def read_file(option: str, path: Path) -> bytes:
    """Raises StartupError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(option, path, error) from None


def unreadable(option: str, path: Path, error: OSError) -> StartupError:
    if isinstance(error, PermissionError):
        advice = "let its group read it (chmod 640, and chgrp to a group of that user; in a container group 0)"
        return StartupError(f"{option} {path}: user {os.geteuid()} may not read it; {advice}")
    return StartupError(f"{option} {path}: {error.strerror}")
