"""The compiled kernels as a Python object, or the reason why there are none."""

from ctypes import CDLL, POINTER, c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

from kernels.cpu.build import LIBRARY, build_id, paths
from kernels.cpu.structs import STRUCT_BYTES, Buffers, Layer, Rows

HOW = "run `python -m kernels.cpu.build`, which needs a C++ compiler"


class LibraryError(Exception):
    """Why the compiled kernels cannot be used, and what to do, in one line."""


class KernelPath:
    """The kernels for one instruction set: `name` is "portable", "avx2" or "avx512"."""

    def __init__(self, library: CDLL, name: str):
        self.name = name
        self.attend: Any = library[f"quire_attend_{name}"]
        self.attend.argtypes = (POINTER(Layer), POINTER(Rows), POINTER(Buffers), c_int)
        self.attend.restype = None
        self.unpack: Any = library[f"quire_unpack_{name}"]
        self.unpack.argtypes = (POINTER(Layer), c_int64, c_int, c_int, c_void_p, c_void_p)
        self.unpack.restype = None
        self.exp2: Any = library[f"quire_exp2_{name}"]
        self.exp2.argtypes = (POINTER(c_float), POINTER(c_float), c_int64)
        self.exp2.restype = None
        self.scratch_bytes: Any = library[f"quire_scratch_bytes_{name}"]
        self.scratch_bytes.argtypes = (POINTER(Layer),)
        self.scratch_bytes.restype = c_int64


class CpuLibrary:
    """Raises LibraryError where the library is missing, does not load, or is made of other sources than lie beside it.

    It takes its threads from the libgomp that PyTorch has loaded, so PyTorch must be imported before.
    """

    def __init__(self, path: Path = LIBRARY):
        if not path.is_file():
            raise LibraryError(f"the CPU kernels are not built; {HOW}")
        try:
            self._library = CDLL(str(path))
        except OSError as error:
            raise LibraryError(f"the CPU kernels do not load ({error}); {HOW}") from error
        self._library.quire_build_id.restype = c_char_p
        if self._library.quire_build_id() != build_id().encode():
            raise LibraryError(f"{path.name} is not made of the sources beside it; {HOW}")
        assert self._library.quire_struct_bytes() == STRUCT_BYTES

    @property
    def path_names(self) -> list[str]:
        """Those that this machine runs, the fastest last."""
        return [name for name in paths() if self._library[f"quire_runs_{name}"]()]

    def path(self, name: str | None = None) -> KernelPath:
        """The fastest that this machine runs, or the one called so. Raises LibraryError where it does not run."""
        names = self.path_names
        if name is not None and name not in names:
            raise LibraryError(f"this machine does not run the {name} kernels; it runs {', '.join(names)}")
        return KernelPath(self._library, name or names[-1])
