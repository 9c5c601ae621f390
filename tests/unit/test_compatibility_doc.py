"""docs/compatibility.md names a test for each promise: they must exist."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"`(tests/[a-z0-9_/]+\.py)::(\w+)`")


def test_every_named_test_exists() -> None:
    text = (ROOT / "docs/compatibility.md").read_text()
    named = NAMED.findall(text)
    assert len(set(named)) > 60
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text())
        defined = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
        assert name in defined, f"{path} has no {name}"


def test_every_row_is_there_and_names_a_test() -> None:
    text = (ROOT / "docs/compatibility.md").read_text()
    rows = dict(re.findall(r"^\| ([HGTRSM]\d+) \|(.*)$", text, re.MULTILINE))
    numbers = {"H": 15, "G": 9, "T": 5, "R": 7, "S": 4, "M": 4}
    assert set(rows) == {f"{letter}{number}" for letter, last in numbers.items() for number in range(1, last + 1)}
    assert all(NAMED.search(row) for row in rows.values())
    faults = text[text.index("## Inputs that brought") :]
    listed = set()
    for cell in re.findall(r"^\| ([\d–, ]+) \|", faults, re.MULTILINE):
        for part in cell.split(", "):
            first, _, last = part.partition("–")
            listed |= set(range(int(first), int(last or first) + 1))
    assert listed == set(range(1, 43))
