"""The library of compiled kernels: how it is built, and what is said where it cannot be used."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import kernels.cpu.build
from kernels.cpu.build import BuildError, build, find_compiler, paths
from kernels.cpu.library import CpuLibrary, LibraryError
from tests.kernels.compiled import kernel_path

ROOT = Path(__file__).parents[2]


def has_compiler() -> bool:
    try:
        find_compiler()
    except BuildError:
        return False
    return True


needs_compiler = pytest.mark.skipif(not has_compiler(), reason="there is no C++ compiler")


def one_line(error: pytest.ExceptionInfo[Exception]) -> str:
    assert "\n" not in str(error.value)
    return str(error.value)


@needs_compiler
def test_it_is_built_where_it_can_be():
    """Or all other tests of it are skipped, and nobody sees it."""
    assert "portable" in CpuLibrary().path_names


def test_the_fastest_path_is_taken_unless_one_is_named():
    kernel_path()
    library = CpuLibrary()
    assert library.path().name == library.path_names[-1]
    assert library.path("portable").name == "portable"
    for name in {*paths(), "sse9"} - set(library.path_names):
        with pytest.raises(LibraryError) as error:
            library.path(name)
        assert f"does not run the {name} kernels" in one_line(error)


def test_its_threads_are_pytorchs():
    """One libgomp in the process, and the library asks for none of its own."""
    if not sys.platform.startswith("linux"):
        pytest.skip("reads /proc")
    kernel_path()
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "gomp" in line}
    assert len(mapped) == 1, mapped


@needs_compiler
def test_it_is_built_into_an_empty_folder_and_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels.cpu.build, "paths", lambda: {"portable": ("-O0",)})
    build(tmp_path / "library.so")
    assert [path.name for path in tmp_path.iterdir()] == ["library.so"]  # nothing half is left
    monkeypatch.setattr("kernels.cpu.library.paths", lambda: {"portable": ("-O0",)})
    assert CpuLibrary(tmp_path / "library.so").path().name == "portable"


@needs_compiler
def test_one_of_other_sources_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernels.cpu.build, "paths", lambda: {"portable": ("-O0",)})
    build(tmp_path / "library.so")
    sources = shutil.copytree(kernels.cpu.build.SOURCES, tmp_path / "src")
    (sources / "rows.h").write_text("// changed")
    monkeypatch.setattr(kernels.cpu.build, "SOURCES", sources)
    with pytest.raises(LibraryError) as error:
        CpuLibrary(tmp_path / "library.so")
    says = one_line(error)
    assert "not made of the sources" in says and "python -m kernels.cpu.build" in says


def test_a_missing_and_a_broken_one_are_refused(tmp_path: Path):
    with pytest.raises(LibraryError) as error:
        CpuLibrary(tmp_path / "library.so")
    assert "not built" in one_line(error) and "python -m kernels.cpu.build" in one_line(error)
    (tmp_path / "library.so").write_bytes(b"no library")
    with pytest.raises(LibraryError) as error:
        CpuLibrary(tmp_path / "library.so")
    assert "do not load" in one_line(error)


@pytest.mark.parametrize(
    "compiler, reason",
    [
        ("/bin/false", "/bin/false: exit code 1"),
        ("/nowhere/c++ -O1", "/nowhere/c++ cannot be run (No such file or directory)"),
        ("sh -c 'echo in f.h: >&2; echo f.h:1: error: odd >&2; exit 1'", "sh: f.h:1: error: odd"),
    ],
)
def test_a_compiler_that_fails_is_one_line(compiler: str, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CXX", compiler)
    with pytest.raises(BuildError) as error:
        build(tmp_path / "library.so")
    assert one_line(error).startswith(reason)
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_what_is_wrong_and_ends():
    command = [sys.executable, "-m", "kernels.cpu.build"]
    done = subprocess.run(command, env={**os.environ, "CXX": "/bin/false"}, capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "CPU kernels are not built: /bin/false: exit code 1\n"


def test_without_a_compiler_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(BuildError) as error:
        find_compiler()
    assert one_line(error) == "there is no c++, g++ or clang++; install one, or name one in CXX"
