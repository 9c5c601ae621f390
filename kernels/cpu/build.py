"""`python -m kernels.cpu.build`: compiles the CPU kernels, in seconds, to a shared library beside their sources.

The compiler is `CXX`, else c++, g++ or clang++. Needs neither PyTorch nor NumPy.
"""

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

SOURCES = Path(__file__).parent / "src"
LIBRARY = Path(__file__).parent / "libquire_cpu.so"
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-fno-exceptions",
    "-fno-rtti",
    "-fno-math-errno",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
)
AVX2 = ("-mavx2", "-mfma", "-mf16c")
AVX512 = (*AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
X86 = {"x86_64", "AMD64"}


class BuildError(Exception):
    """Why there is no library, in one line."""


def paths() -> dict[str, tuple[str, ...]]:
    """The instruction sets that are compiled for this kind of machine, and their flags. Never those of the machine
    itself: the library may run on another one."""
    is_x86 = platform.machine() in X86
    return {"portable": ()} | ({"avx2": AVX2, "avx512": AVX512} if is_x86 else {})


def build_id() -> str:
    """Names what a library is made of: the sources, the flags, the kind of machine."""
    digest = hashlib.sha256(repr((FLAGS, paths(), platform.machine())).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def find_compiler() -> list[str]:
    """A command. Raises BuildError where there is none."""
    if chosen := os.environ.get("CXX"):
        return shlex.split(chosen)
    for name in ("c++", "g++", "clang++"):
        if shutil.which(name):
            return [name]
    raise BuildError("there is no c++, g++ or clang++; install one, or name one in CXX")


def run_compiler(command: Iterable[str]) -> None:
    """Raises BuildError with the compiler's first error."""
    words = list(command)
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False)
    except OSError as error:
        raise BuildError(f"{words[0]} cannot be run ({error.strerror}); install it, or name another in CXX") from error
    if done.returncode:
        lines = done.stderr.splitlines() or [f"exit code {done.returncode}"]
        raise BuildError(f"{words[0]}: " + next((line for line in lines if "error" in line), lines[0]))


def build(target: Path = LIBRARY) -> None:
    """Raises BuildError. `target` is replaced as a whole, or not at all."""
    compiler = find_compiler()
    names = paths()
    jobs = {name: [*flags, f"-DQUIRE_PATH={name}", str(SOURCES / "kernels.cpp")] for name, flags in names.items()}
    jobs["detect"] = [f'-DQUIRE_BUILD_ID="{build_id()}"', str(SOURCES / "detect.cpp")]
    try:
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".build-") as folder:
            objects = {name: str(Path(folder) / f"{name}.o") for name in jobs}
            commands = [[*compiler, *FLAGS, *job, "-c", "-o", objects[name]] for name, job in jobs.items()]
            with ThreadPoolExecutor(os.cpu_count()) as pool:
                list(pool.map(run_compiler, commands))
            # without libgomp: its functions are those that PyTorch has loaded, so that there is one pool of threads
            linked = Path(folder) / target.name
            run_compiler([*compiler, "-shared", "-Wl,--as-needed", *objects.values(), "-o", str(linked)])
            os.replace(linked, target)
    except OSError as error:
        raise BuildError(f"{target.parent} cannot be written to ({error.strerror})") from error


def main() -> int:
    try:
        build()
    except BuildError as error:
        print(f"CPU kernels are not built: {error}", file=sys.stderr)
        return 1
    print(f"CPU kernels are built: {LIBRARY}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
