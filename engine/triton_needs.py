"""What Triton needs beside itself to compile kernels: a C compiler, Python's headers, a folder to keep them in."""

import os
import shutil
import sysconfig
import tempfile
from pathlib import Path

from engine.errors import StartupError


def check_triton_needs(cache: Path) -> None:
    """Raises StartupError for the first that is missing; Triton would say it late and at length.

    `cache`: the folder where Triton keeps what it has compiled.
    """
    compiler = os.environ.get("CC", "gcc")
    if shutil.which(compiler) is None and ("CC" in os.environ or shutil.which("clang") is None):
        raise StartupError(
            f"--kernels: Triton needs a C compiler, and there is no {compiler}; install gcc and libc6-dev, or set CC; "
            "the `gpu` image has them, the `cpu` image does not"
        )
    headers = _headers()
    if not (headers / "Python.h").is_file():
        raise StartupError(
            f"--kernels: Triton needs Python's headers, and {headers} has no Python.h; install python3-dev"
        )
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=cache):
            pass
    except OSError as error:
        raise StartupError(
            f"--kernels: Triton cannot keep kernels in {cache} ({error.strerror}); set TRITON_CACHE_DIR to a folder "
            f"that user {os.geteuid()} may write"
        ) from error


def _headers() -> Path:
    """Where Triton looks: Debian's own scheme leads elsewhere."""
    scheme = sysconfig.get_default_scheme()
    return Path(sysconfig.get_path("include", "posix_prefix" if scheme == "posix_local" else scheme))
