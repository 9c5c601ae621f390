"""The tests in processes beside each other: most of their time is a CPU's, to compile and to compute what is right."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.gpu.plan import Plan
from tests.gpu.worker import GRACE

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Outcome:
    test: str
    outcome: str
    seconds: float
    reason: str

    @property
    def group(self) -> str:
        return "engine" if "engine" in self.test else "kernels"


def counts(results: Sequence[Outcome]) -> dict[str, dict[str, int]]:
    """Of each group, how many had which outcome."""
    return {
        group: dict(Counter(result.outcome for result in results if result.group == group))
        for group in ("kernels", "engine")
    }


def run_tests(plan: Plan, *, has_cuda: bool, has_pytest: bool) -> list[Outcome]:
    """On CUDA the kernels that are measured later are compiled beside the tests."""
    tests = plan.tests
    tasks = ["pytest"] if has_pytest else ["direct"]
    if not has_cuda and has_pytest:
        tasks.append("direct")  # so that a dry run tries it too
    choice = ["--chosen", tests.chosen] if tests.chosen else []
    choice += ["--most", str(tests.num_direct)] if tests.num_direct else []
    commands = [
        [task, "--count", str(tests.num_processes), "--shard", str(shard), *choice]
        for task in tasks
        for shard in range(tests.num_processes)
    ]
    if has_cuda:
        commands += [["attention", "--format", name] for name in plan.formats]
        commands += [["model", "--format", name] for name in plan.end_to_end.formats]
    with tempfile.TemporaryDirectory() as folder:
        return _run(commands, Path(folder), plan.tests.most_seconds)


def _run(commands: list[list[str]], folder: Path, seconds: float) -> list[Outcome]:
    start = time.monotonic()
    processes: list[subprocess.Popen[bytes]] = []
    results: dict[str, Outcome] = {}
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # there are enough processes
    for number, (task, *options) in enumerate(commands):
        command = [
            sys.executable,
            "-m",
            "tests.gpu.worker",
            task,
            str(folder / f"{number}.jsonl"),
            str(seconds),
            *options,
        ]
        with (folder / f"{number}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT))
    for number, (command, process) in enumerate(zip(commands, processes, strict=True)):
        name = " ".join(command)
        try:
            code = process.wait(max(1.0, start + seconds + 2 * GRACE - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            code = process.wait()
        path = folder / f"{number}.jsonl"
        for line in path.read_text().splitlines() if path.exists() else ():
            result = Outcome(**json.loads(line))
            results[result.test] = result
        if code:
            log = (folder / f"{number}.log").read_text(errors="replace")[-2000:]
            results[name] = Outcome(name, "failed", time.monotonic() - start, f"the process ended with {code}\n{log}")
    return list(results.values())
