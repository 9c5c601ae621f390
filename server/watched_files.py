"""Files that are read again when they change: keys and certificates."""

import os
from pathlib import Path
from stat import S_ISREG

from engine.errors import StartupError

MAX_BYTES = 2**20
Stamp = tuple[int, int, int, int]


def stamp_of(path: Path) -> Stamp | None:
    """Another one where the file has other content, another owner or other rights; None where it cannot be seen."""
    try:
        stat = os.stat(path)
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size, stat.st_ino


def read_file(option: str, path: Path) -> bytes:
    """Raises StartupError, in words that begin with the option and the path."""
    try:
        stat = os.stat(path)
        if not S_ISREG(stat.st_mode):  # to read a pipe would wait for whoever writes
            raise StartupError(f"{option} {path} is not a regular file")
        if stat.st_size > MAX_BYTES:
            raise StartupError(f"{option} {path} has {stat.st_size} bytes; it may have {MAX_BYTES}")
        return path.read_bytes()
    except PermissionError:
        advice = "let its group read it (chmod 640, and chgrp to a group of that user; in a container group 0)"
        raise StartupError(f"{option} {path}: user {os.geteuid()} may not read it; {advice}") from None
    except OSError as error:
        raise StartupError(f"{option} {path}: {error.strerror}") from None
