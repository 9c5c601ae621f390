"""The checked-in table of figures: one line a kernel, of which each chip has a row."""

import json
from dataclasses import astuple, fields
from pathlib import Path

from tests.kernels.triton.report.figures import Figures

PATH = Path(__file__).parent / "kernels.json"
Key = tuple[str, int]
"""A case's name and a chip."""


class Table:
    """`triton`: the version whose compiler gave the figures; those of another one are no measure."""

    def __init__(self, triton: str, rows: dict[Key, Figures]):
        self.triton = triton
        self.rows = rows

    @classmethod
    def read(cls, path: Path = PATH) -> "Table":
        """An empty one where there is none, or one whose columns are not those of `Figures`."""
        data = json.loads(path.read_text()) if path.is_file() else {}
        if data.get("columns") != _columns():
            return cls("", {})
        rows = {
            (name, int(arch)): Figures(*row) for name, chips in data["kernels"].items() for arch, row in chips.items()
        }
        return cls(data["triton"], rows)

    def write(self, path: Path = PATH) -> None:
        chips: dict[str, dict[str, tuple]] = {}
        for name, arch in sorted(self.rows):
            chips.setdefault(name, {})[str(arch)] = astuple(self.rows[name, arch])
        pairs = ((json.dumps(name), json.dumps(row, separators=(",", ":"))) for name, row in chips.items())
        lines = ",\n".join(f"{name}: {row}" for name, row in pairs)
        head = f'"triton": {json.dumps(self.triton)},\n"columns": {json.dumps(_columns())},\n'
        path.write_text(f'{{{head}"kernels": {{\n{lines}\n}}}}\n')


def _columns() -> list[str]:
    return [field.name for field in fields(Figures)]
