"""`python -m tests.kernels.triton.report`: compiles the kernels for chips that need not be there.

Without options: all of them; rewrites kernels.json and prints what has changed. `--covering`: a part that has one of
each kind. `--check`: that part against the table, which stays as it is. Exit code 1 where a kernel has faults, and
under `--check` where a figure is worse.
"""

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict

import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table as RichTable

from tests.kernels.triton.report.cases import Case, all_cases, covering
from tests.kernels.triton.report.compile import ARCHES
from tests.kernels.triton.report.figures import Figures, worse
from tests.kernels.triton.report.pool import compile_all
from tests.kernels.triton.report.table import Key, Table


def main() -> int:
    options = _parser().parse_args()
    if os.environ.get("TRITON_INTERPRET", "0") != "0":
        print("TRITON_INTERPRET is set, so nothing would be compiled; unset it", file=sys.stderr)
        return 1
    cases = all_cases()
    pairs = [
        (case, arch)
        for case, arch in (covering(cases) if options.covering or options.check else every_chip(cases))
        if all(word in case.name.split() for word in options.match) and arch in (options.arch or ARCHES)
    ]
    if not pairs:
        print(f"no kernel matches; names are like {cases[0].name!r}", file=sys.stderr)
        return 1
    console = Console(width=None if sys.stdout.isatty() else 200)
    done = track(compile_all(pairs), "compiling", len(pairs), console=console, disable=not console.is_terminal)
    outcomes = {(case.name, arch): outcome for (case, arch), outcome in zip(pairs, done, strict=True)}
    table = Table.read()
    wrong = [f"{case.name}, sm_{arch}: {fault}" for case, arch in pairs for fault in outcomes[case.name, arch][1]]
    now = {key: found for key, (found, _) in outcomes.items() if found}
    if options.show:
        console.print(_shown(now))
    if options.check:
        wrong += regressions(table, now)
    else:
        console.print(_changes(table.rows, now))
        is_other = table.triton != triton.__version__
        if is_other and (options.match or options.arch):
            console.print(f"kernels.json is of Triton {table.triton} and stays as it is")
        else:
            known = set() if is_other else {(case.name, arch) for case, arch in every_chip(cases)}
            Table(triton.__version__, {key: row for key, row in table.rows.items() if key in known} | now).write()
    for line in wrong:
        console.print(line, markup=False, highlight=False)
    console.print(f"{len(pairs)} kernels compiled with Triton {triton.__version__}, {len(wrong)} faults")
    return 1 if wrong else 0


def every_chip(cases: list[Case]) -> list[tuple[Case, int]]:
    return [(case, arch) for case in cases for arch in ARCHES]


def regressions(table: Table, now: dict[Key, Figures]) -> Iterator[str]:
    """What is worse than in the table, or not in it. Figures of another Triton are not compared."""
    if not table.rows:
        yield "kernels.json is missing, or has other columns; run `make kernels-report`"
    if table.triton == triton.__version__:
        for (name, arch), found in now.items():
            if (name, arch) not in table.rows:
                yield f"{name}, sm_{arch}: not in kernels.json; run `make kernels-report`"
            elif grown := worse(table.rows[name, arch], found):
                yield f"{name}, sm_{arch}: {', '.join(grown)}; if that is meant, run `make kernels-report`"


def _changes(before: dict[Key, Figures], now: dict[Key, Figures]) -> RichTable | str:
    table = RichTable("kernel", "chip", "figure", "was", "is")
    for (name, arch), found in sorted(now.items()):
        old = asdict(before[name, arch]) if (name, arch) in before else {}
        for figure, value in asdict(found).items():
            if old and old[figure] != value:
                table.add_row(name, f"sm_{arch}", figure, str(old[figure]), str(value))
    new = len(now.keys() - before.keys())
    return table if table.row_count else f"no figure has changed, {new} are new"


def _shown(now: dict[Key, Figures]) -> RichTable:
    table = RichTable("kernel", "chip", *Figures.__dataclass_fields__)
    for (name, arch), found in sorted(now.items()):
        table.add_row(name, f"sm_{arch}", *(str(value) for value in asdict(found).values()))
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.kernels.triton.report", description=__doc__)
    parser.add_argument("--covering", action="store_true", help="only a part of the kernels that has one of each kind")
    parser.add_argument("--check", action="store_true", help="compare with the table instead of rewriting it")
    parser.add_argument("--show", action="store_true", help="print the figures")
    parser.add_argument("--arch", type=int, action="append", choices=ARCHES, help="only this chip; may be repeated")
    parser.add_argument("--match", nargs="*", default=[], help="only kernels whose names have all these words")
    return parser


if __name__ == "__main__":
    sys.exit(main())
