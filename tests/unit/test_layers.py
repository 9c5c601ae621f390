"""The rooms stay separate: one-way layers, a torch-free set, empty `__init__.py`, files that can be read in one go."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "kernels": {"kernels"},
    "proto": {"proto"},
    "engine": {"engine", "kernels"},
    "server": {"server", "proto", "engine", "kernels"},
}
TORCH_FREE = (
    *(f"engine.{name}" for name in ("scheduler", "sequence", "plan", "waiting", "request", "config", "errors")),
    *(f"engine.{name}" for name in ("prescription", "recipe_file", "recipe_json")),
    *(f"engine.study.{name}" for name in ("budget", "candidates", "codebooks", "forms")),
    *(f"engine.{name}" for name in ("tokenizer", "chat_template", "detokenizer", "token_bytes")),
    *(f"engine.kv.{name}" for name in ("allocator", "audit", "cache", "host_tier", "map", "moves", "pages", "prefix")),
    *(f"engine.kv.{name}" for name in ("reclaim", "reclaim_queue", "report", "rules", "shrink", "sizing", "stats")),
    *(f"kernels.format.{path.stem}" for path in (ROOT / "kernels/format").glob("*.py") if path.stem != "__init__"),
)
HEAVY = {"torch", "triton"}
MAX_LINES = 400


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imported(node: ast.AST, *, with_typing: bool) -> set[str]:
    """Absolute names that a module imports anywhere in it: modules, and names that may be modules."""
    names: set[str] = set()
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.stmt) and is_type_checking(child) and not with_typing:
            continue
        if isinstance(child, ast.Import):
            names |= {alias.name for alias in child.names}
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno} has a relative import"
            assert child.module
            names |= {child.module} | {f"{child.module}.{alias.name}" for alias in child.names}
        names |= imported(child, with_typing=with_typing)
    return names


SOURCES = {
    module_of(path): path
    for room in MAY_IMPORT
    for path in sorted((ROOT / room).rglob("*.py"))
    if "_pb2" not in path.name
}


@pytest.mark.parametrize("module", sorted(SOURCES))
def test_layers_are_one_way(module: str) -> None:
    names = imported(ast.parse(SOURCES[module].read_text()), with_typing=True)
    rooms = {name.split(".")[0] for name in names}
    room = module.split(".")[0]
    assert rooms & {*MAY_IMPORT, "tests"} <= MAY_IMPORT[room]


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_free_modules_reach_no_torch(module: str) -> None:
    """Along imports of project modules, wherever in the file they stand."""
    assert module in SOURCES
    reached: set[str] = set()
    queue = [module]
    while queue:
        current = queue.pop()
        if current in reached:
            continue
        reached.add(current)
        names = imported(ast.parse(SOURCES[current].read_text()), with_typing=False)
        heavy = {name.split(".")[0] for name in names} & HEAVY
        assert not heavy, f"{module} reaches {heavy} through {current}"
        queue += [name for name in names if name in SOURCES]


def test_importing_the_scheduler_loads_no_torch() -> None:
    script = "import sys, engine.scheduler; print(sorted({'torch', 'triton', 'numpy'} & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout == "[]\n"


def test_the_importer_sees_what_it_should() -> None:
    code = "if TYPE_CHECKING:\n    import torch\ndef f():\n    from engine import load\n    import a.b"
    names = imported(ast.parse(code), with_typing=False)
    assert names == {"engine", "engine.load", "a.b"}
    assert "torch" in imported(ast.parse(code), with_typing=True)


def test_init_files_are_empty() -> None:
    files = [path for room in (*MAY_IMPORT, "tests") for path in (ROOT / room).rglob("__init__.py")]
    assert len(files) > 10
    assert [str(path) for path in files if path.read_text()] == []


def test_files_are_short() -> None:
    files = [path for room in (*MAY_IMPORT, "tests") for path in (ROOT / room).rglob("*.py") if "_pb2" not in path.name]
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length >= MAX_LINES} == {}
