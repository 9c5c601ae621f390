"""The compiled kernels as a Python object, or the reason why there are none."""

from ctypes import CDLL, POINTER, c_char_p, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any

from kernels.cpu.build import LIBRARY, build_id, paths
from kernels.cpu.structs import STRUCT_BYTES, Buffers, Chunk, Heads, Layer, Linear, Model, Rows, Step

HOW = "run `python -m kernels.cpu.build`, which needs a C++ compiler"


class LibraryError(Exception):
    """Why the compiled kernels cannot be used, and what to do, in one line."""


class KernelPath:
    """The kernels for one instruction set: `name` is "portable", "avx2" or "avx512"."""

    def __init__(self, library: CDLL, name: str):
        def function(called: str, *types: Any, returns: Any = None) -> Any:
            found = library[f"quire_{called}_{name}"]
            found.argtypes, found.restype = types, returns
            return found

        floats = POINTER(c_float)
        self.name = name
        self.build_id = build_id()
        self.attend = function("attend", POINTER(Layer), POINTER(Rows), POINTER(Buffers), c_int)
        self.scratch_bytes = function("scratch_bytes", POINTER(Layer), returns=c_int64)
        self.attend_chunk = function("attend_chunk", POINTER(Layer), POINTER(Chunk), c_int)
        self.chunk_scratch_bytes = function("chunk_scratch_bytes", POINTER(Layer), returns=c_int64)
        self.unpack = function("unpack", POINTER(Layer), c_int64, c_int, c_int, c_void_p, c_void_p)
        self.exp2 = function("exp2", floats, floats, c_int64)
        self.linear_block: int = function("linear_block", returns=c_int)()
        self.linear = function("linear", POINTER(Linear), c_void_p, c_void_p, c_int, c_int)
        self.normalise = function("normalise", *[c_void_p] * 5, c_int, c_int64, c_float, c_int)
        self.gate = function("gate", c_void_p, c_void_p, c_int, c_int64, c_int)
        self.decode = function("decode", POINTER(Model), POINTER(Rows), POINTER(Step), c_int)
        self.num_activations = function("activations", POINTER(Model), c_int, returns=c_int64)
        self.turn = function("turn", POINTER(Heads), *[c_void_p] * 7, c_int, c_float, c_int)


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
