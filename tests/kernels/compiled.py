"""The compiled kernels for tests; those for instruction sets that this machine lacks are skipped with the reason."""

from functools import cache

import pytest

from kernels.cpu.library import CpuLibrary, KernelPath, LibraryError


@cache
def kernel_path(name: str | None = None) -> KernelPath:
    """The fastest, or those of one instruction set. Skips the test where they are not built or do not run here."""
    try:
        return CpuLibrary().path(name)
    except LibraryError as error:
        pytest.skip(str(error))
