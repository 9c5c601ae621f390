"""A process of its own for a part of the tests, or to compile what will be measured: `python -m tests.gpu.worker`.

It writes one line of JSON for each test: `test`, `outcome` (passed, failed or left out), `seconds`, `reason`. A test
may have several lines; the last one holds.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any

from tests.gpu.budget import Budget, end_process_after
from tests.gpu.plan import FULL
from tests.gpu.stand_ins import OPTIONAL, stand_in

FILES = tuple(f"tests/kernels/triton/test_{name}.py" for name in ("attention", "seal", "elementwise", "engine"))
GRACE = 5.0  # seconds for a test that has begun
LONGEST_REASON = 3000


class Report:
    def __init__(self, path: Path):
        self._file = path.open("a", buffering=1)

    def add(self, test: str, outcome: str, seconds: float = 0.0, reason: str = "") -> None:
        line = {"test": test, "outcome": outcome, "seconds": seconds, "reason": reason[-LONGEST_REASON:]}
        self._file.write(json.dumps(line) + "\n")


class Sharded:
    """For pytest: runs every `count`-th test while `budget` has time left, and reports how each ended."""

    def __init__(self, shard: int, count: int, budget: Budget, report: Report):
        self._shard = shard
        self._count = count
        self._budget = budget
        self._report = report

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = items[self._shard :: self._count]

    def pytest_collection_finish(self, session: Any) -> None:
        for item in session.items:
            self._report.add(item.nodeid, "left out", reason="its process ended first")

    def pytest_runtest_setup(self, item: Any) -> None:
        import pytest

        if self._budget.left <= 0:
            pytest.skip("no time left")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            self._report.add(report.nodeid, "failed", report.duration, str(report.longrepr))
        elif report.skipped:
            self._report.add(report.nodeid, "left out", report.duration, str(report.longrepr[-1]))
        elif report.when == "call":
            self._report.add(report.nodeid, "passed", report.duration)


def run_pytest(shard: int, count: int, budget: Budget, report: Report, chosen: str | None) -> None:
    import pytest

    options = ["-q", "-p", "no:cacheprovider", "--tb=short", *(["-k", chosen] if chosen else [])]
    code = pytest.main([*FILES, *options], [Sharded(shard, count, budget, report)])
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED):
        report.add(f"pytest, part {shard + 1} of {count}", "failed", reason=f"it ended with {code!r}")


def run_direct(shard: int, count: int, budget: Budget, report: Report, most: int | None) -> None:
    from tests.gpu.direct_cases import cases

    for name, check in islice(cases(), shard, most, count):
        start = time.monotonic()
        if budget.left <= 0:
            report.add(name, "left out", reason="no time left")
            continue
        report.add(name, "left out", reason="its process ended first")
        try:
            check()
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name in OPTIONAL:
                report.add(name, "left out", reason=str(error))
            else:
                report.add(name, "failed", time.monotonic() - start, traceback.format_exc())
        else:
            report.add(name, "passed", time.monotonic() - start)


def compile_attention(name: str) -> None:
    """One decode and one prefill of `name`, which leave their kernels in Triton's cache on disk."""
    import torch

    from tests.gpu.attention import Attention
    from tests.gpu.timer import CpuTimer

    size = FULL.heads.page_tokens
    plan = replace(FULL, contexts=(4 * size,), batches=(2,), prefill=((1, 2 * size),), least_set_bytes=1)
    attention = Attention(plan, torch.device("cuda"), CpuTimer())
    with torch.inference_mode():
        for _ in (*attention.decode(name), *attention.prefill(name)):
            torch.cuda.synchronize()


def compile_model(name: str) -> None:
    """A step of one layer of the model."""
    import torch

    from tests.gpu.end_to_end import EndToEndRun
    from tests.gpu.timer import CudaTimer

    plan = replace(FULL.end_to_end, batches=(2,), prompt_tokens=2 * FULL.heads.page_tokens, num_steps=2)
    run = EndToEndRun(plan, FULL.heads, name, 1, torch.device("cuda"), CudaTimer())
    run.measure(2)


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("task", choices=("pytest", "direct", "attention", "model"))
    parser.add_argument("report", type=Path)
    parser.add_argument("seconds", type=float)
    parser.add_argument("--shard", type=int, default=0)
    parser.add_argument("--count", type=int, default=1)
    parser.add_argument("--chosen")
    parser.add_argument("--most", type=int)
    parser.add_argument("--format", default="")
    options = parser.parse_args(arguments)
    budget = Budget(options.seconds)
    end_process_after(options.seconds + GRACE)
    stand_in()
    match options.task:
        case "pytest" if find_spec("pytest"):
            run_pytest(options.shard, options.count, budget, Report(options.report), options.chosen)
        case "attention":
            compile_attention(options.format)
        case "model":
            compile_model(options.format)
        case _:
            run_direct(options.shard, options.count, budget, Report(options.report), options.most)


if __name__ == "__main__":
    main(sys.argv[1:])
