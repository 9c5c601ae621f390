"""The steps of a check in order. One that fails is noted, and the others still run."""

import os
import platform
import traceback
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import triton

from tests.gpu import report
from tests.gpu.attention import Attention
from tests.gpu.budget import Budget
from tests.gpu.plan import Plan
from tests.gpu.stand_ins import OPTIONAL
from tests.gpu.timer import make_timer
from tests.gpu.workers import Outcome, run_tests

# seconds that must be left for a measurement to begin
FOR_DECODE, FOR_PREFILL, FOR_MODEL, FOR_ALL_LAYERS, FOR_BATCH = 75.0, 60.0, 30.0, 45.0, 12.0


class Check:
    """Runs the steps of `plan` and keeps what they found, to be saved in `folder`."""

    def __init__(self, plan: Plan, device: torch.device, budget: Budget, folder: Path):
        self._plan = plan
        self._device = device
        self._budget = budget
        self._folder = folder
        self._timer = make_timer(device)
        self._tests: list[Outcome] = []
        self._results: dict[str, Any] = {
            "device": _describe(device),
            "errors": {},
            "left_out": [],
            "sdpa_decode": [],
            "decode": [],
            "prefill": [],
            "end_to_end": [],
        }

    def run(self, *, has_tests: bool) -> None:
        if has_tests:
            self._step("tests", 0, self._run_tests)
        with torch.inference_mode():
            self._step("decode", FOR_DECODE, self._measure_decode)
            self._step("prefill", FOR_PREFILL, self._measure_prefill)
            for name in self._plan.end_to_end.formats:
                self._step(f"end to end, {name}", FOR_MODEL, lambda name=name: self._measure_model(name))

    def finish(self) -> int:
        """Save and print; the exit code."""
        self._results["seconds"] = round(self._budget.spent, 1)
        print("\n".join(report.lines(self._results, self._tests)))
        path = report.save(self._results, self._tests, self._folder)
        print(f"{path}; {self._budget.spent:.0f} s", flush=True)
        has_failed = any(test.outcome == "failed" for test in self._tests)
        return 1 if has_failed or self._results["errors"] else 0

    def end_early(self) -> None:
        self._results["errors"]["the whole"] = "it took too long and was ended"
        self.finish()

    def _step(self, name: str, needed: float, function: Callable[[], None]) -> None:
        if self._leave_out(name, needed):
            return
        print(f"{self._budget.spent:6.1f} s: {name}", flush=True)
        try:
            function()
        except Exception as error:
            if isinstance(error, ModuleNotFoundError) and error.name in OPTIONAL:
                self._results["left_out"].append(f"{name}: {error}")
            else:
                self._results["errors"][name] = traceback.format_exc()[-4000:]
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def _leave_out(self, name: str, needed: float) -> bool:
        is_short = self._budget.left < needed
        if is_short:
            self._results["left_out"].append(f"{name}: no time left")
        return is_short

    def _run_tests(self) -> None:
        has_pytest = find_spec("pytest") is not None
        if not has_pytest:
            self._results["left_out"].append("the test modules: pytest is missing; other cases stand for them")
        self._tests = run_tests(self._plan, has_cuda=self._device.type == "cuda", has_pytest=has_pytest)

    def _measure_decode(self) -> None:
        attention = Attention(self._plan, self._device, self._timer)
        self._results["copy_bytes_per_second"] = attention.copy_bandwidth()
        self._collect("decode, sdpa", "sdpa_decode", attention.decode_baselines(), FOR_DECODE)
        for name in self._plan.formats:
            self._collect(f"decode, {name}", "decode", attention.decode(name), FOR_DECODE)

    def _measure_prefill(self) -> None:
        attention = Attention(self._plan, self._device, self._timer)
        self._collect("prefill, sdpa", "prefill", attention.prefill_baselines(), FOR_PREFILL)
        for name in self._plan.formats:
            self._collect(f"prefill, {name}", "prefill", attention.prefill(name), FOR_PREFILL)

    def _collect(self, name: str, key: str, found: Iterator[dict[str, Any]], needed: float) -> None:
        """Each of `found` while there is time; a failure of one does not keep the next format from being measured."""
        try:
            while not self._leave_out(name, needed):
                if (result := next(found, None)) is None:
                    return
                self._results[key].append(result)
        except Exception:
            self._results["errors"][name] = traceback.format_exc()[-4000:]

    def _measure_model(self, name: str) -> None:
        from tests.gpu.end_to_end import EndToEndRun

        plan = self._plan.end_to_end
        num_layers = plan.model.num_layers if self._budget.left >= FOR_ALL_LAYERS else plan.model.few_layers
        if num_layers < plan.model.num_layers:
            self._results["left_out"].append(f"end to end, {name}: all but {num_layers} layers, for want of time")
        run = EndToEndRun(plan, self._plan.heads, name, num_layers, self._device, self._timer)
        for batch in plan.batches:
            if not self._leave_out(f"end to end, {name}, {batch} sequences", FOR_BATCH):
                self._results["end_to_end"].append(run.measure(batch))


def _describe(device: torch.device) -> dict[str, Any]:
    described: dict[str, Any] = {
        "name": f"dry run {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cpus": os.cpu_count(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        described |= {
            "name": properties.name,
            "compute capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory": properties.total_memory,
            "L2": properties.L2_cache_size,
            "cuda": torch.version.cuda,
        }
    return described
