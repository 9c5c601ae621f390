"""The check that needs a GPU, on a CPU: that its code runs, counts and fails as it should. Its figures mean nothing."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from kernels.format.layout import Pool
from kernels.torch_backend.backend import TorchBackend
from tests.gpu import steps
from tests.gpu.budget import Budget
from tests.gpu.pages import FilledPages, decode_bytes
from tests.gpu.plan import DRY, FORMATS
from tests.gpu.timer import CudaTimer
from tests.gpu.workers import ROOT, Outcome

CPU = torch.device("cpu")


def run_check(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gpu.check", *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True)


def test_every_step_runs(tmp_path: Path):
    done = run_check("--dry-run", "--output", str(tmp_path), OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = tmp_path.iterdir()
    found = json.loads(path.read_text())
    assert path.name.startswith("gpu-dry-run-") and found["device"]["torch"] == torch.__version__
    assert not found["errors"] and not found["left_out"] and not found["not_passed"]
    assert found["tests"]["kernels"]["passed"] > 1 and found["tests"]["engine"]["passed"] > 1
    for name in DRY.formats:
        measured = [(item["context"], item["batch"]) for item in found["decode"] if item["format"] == name]
        assert sorted(measured) == DRY.decode
    assert {item["format"] for item in found["prefill"]} == {"sdpa", *DRY.formats}
    assert all(item["tokens_per_second"] > 0 for item in found["end_to_end"])
    last_lines = done.stdout.splitlines()[-30:]
    assert sum(line.startswith(("decode ", "prefill ", "end to end ")) for line in last_lines) == 3


def test_a_machine_without_a_gpu_is_told_so():
    done = run_check(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert done.stdout == "this PyTorch sees no CUDA device; --dry-run tries the script without one\n"


def test_a_folder_that_cannot_be_written_to_is_said_before_anything_is_measured(tmp_path: Path):
    file = tmp_path / "file"
    file.touch()
    for output in (file, file / "below"):
        done = run_check("--dry-run", "--output", str(output))
        assert done.returncode == 1
        assert done.stdout.startswith(f"--output: {output} is no folder that can be written to (")
        assert not done.stderr


def test_a_failed_test_fails_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """And without time nothing is measured, which is said."""
    outcomes = [Outcome("test_a", "passed", 1.0, ""), Outcome("test_b", "failed", 1.0, "it is wrong")]
    monkeypatch.setattr(steps, "run_tests", lambda *args, **options: outcomes)
    check = steps.Check(DRY, CPU, Budget(5.0), tmp_path)
    check.run(has_tests=True)
    assert check.finish() == 1
    out = capsys.readouterr().out
    assert "FAILED test_b\nit is wrong" in out
    for name in ("decode", "prefill", "end to end, int8"):
        assert f"left out: {name}: no time left" in out


def test_a_failed_measurement_fails_the_check_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(self: object) -> float:
        raise RuntimeError("no bandwidth")

    ran = []
    monkeypatch.setattr(steps.Attention, "copy_bandwidth", fail)
    monkeypatch.setattr(steps.Check, "_measure_prefill", lambda self: ran.append("prefill"))
    monkeypatch.setattr(steps.Check, "_measure_model", lambda self, name: ran.append(name))
    check = steps.Check(DRY, CPU, Budget(300.0), tmp_path)
    check.run(has_tests=False)
    assert check.finish() == 1
    assert ran == ["prefill", "int8"]
    (path,) = tmp_path.iterdir()
    assert "no bandwidth" in json.loads(path.read_text())["errors"]["decode"]


@pytest.mark.parametrize("name", ["native", "int4"])
def test_filled_pages_are_sound(name: str):
    """Rows have pages of their own, with random K and V that another backend reads alike."""
    context = 3 * 64 + 10
    pages = FilledPages(name, DRY.heads, "float32", CPU, num_pages=40, num_slots=20)
    step = pages.decode_step(context, 2)
    refs = [ref for row in step.decode for ref in row.pages]
    assert len(set(refs)) == len(refs) == 2 * 4
    used = {pages.backend.pool.record(ref).view(torch.uint8).numpy().tobytes() for ref in refs if ref.pool is Pool.OPEN}
    assert len(used) > 1 and all(any(record) for record in used)
    q, k, v = pages.activations(2)
    found = pages.backend.attend(0, q, k, v, pages.backend.prepare(step))
    other = TorchBackend(pages.backend.pool, None)
    wanted = other.attend(0, q, k, v, other.prepare(step))
    assert found.isfinite().all() and wanted.abs().max() > 0.01
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_of_a_row(name: str):
    """At a page's end a row reads whole records."""
    pages = FilledPages(name, DRY.heads, "bfloat16", CPU, num_pages=40, num_slots=20)
    context = 5 * DRY.heads.page_tokens
    refs = [ref for row in pages.decode_step(context, 2).decode for ref in row.pages]
    assert decode_bytes(pages.layout, context, 2) == sum(pages.backend.pool.record(ref).nbytes for ref in refs)


def test_what_only_reads_checkpoints_may_be_missing():
    program = """
import sys
sys.modules.update(gguf=None, safetensors=None, jinja2=None)
from tests.gpu.stand_ins import stand_in
print(*stand_in())
from tests.helpers import greedy, run, tiny_core
print(len(run(tiny_core(), [greedy("a", [1, 2, 3], 2)])[0].token_ids))
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["gguf", "safetensors", "jinja2", "2"], done.stderr


class FakeDevice:
    """Stands for CUDA: a clock in milliseconds that launches move, at once or when their graph is replayed."""

    def __init__(self) -> None:
        self.clock = 0.0
        self.graph: list[float] | None = None
        self.num_replays = 0

    def launch(self, milliseconds: float) -> None:
        if self.graph is None:
            self.clock += milliseconds
        else:
            self.graph.append(milliseconds)

    def replace_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        device = self

        class Event:
            def __init__(self, enable_timing: bool):
                assert enable_timing

            def record(self) -> None:
                self.at = device.clock

            def elapsed_time(self, other: "Event") -> float:
                return other.at - self.at

        class Graph:
            def __init__(self) -> None:
                self.launches: list[float] = []

            def replay(self) -> None:
                device.num_replays += 1
                device.clock += sum(self.launches)

        @contextmanager
        def capture(graph: Graph) -> Iterator[None]:
            device.graph = graph.launches
            yield
            device.graph = None

        stream = Mock()
        replaced = {"Event": Event, "CUDAGraph": Graph, "graph": capture, "stream": nullcontext, "synchronize": Mock()}
        for name, value in (replaced | dict.fromkeys(("Stream", "current_stream"), lambda: stream)).items():
            monkeypatch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize("times, fewest, most", [([2.0], 60, 70), ([1.0, 3.0], 30, 50), ([900.0], 5, 12)])
def test_the_cuda_timer_divides_by_calls_and_repeats_as_long_as_is_allowed(
    times: list[float], fewest: int, most: int, monkeypatch: pytest.MonkeyPatch
):
    device = FakeDevice()
    device.replace_cuda(monkeypatch)
    seconds = CudaTimer().seconds([lambda time=time: device.launch(time) for time in times])
    assert seconds == pytest.approx(sum(times) / len(times) / 1000)
    assert fewest <= device.num_replays <= most


def test_a_profiler_that_sees_no_kernel_gives_no_time(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "synchronize", Mock())
    assert CudaTimer().kernel_seconds(lambda: torch.ones(3).sum()) is None


def test_a_check_that_hangs_is_ended():
    program = """
import time
from tests.gpu.budget import end_process_after
end_process_after(0.2, lambda: print("late"))
time.sleep(60)
"""
    start = time.monotonic()
    done = subprocess.run([sys.executable, "-uc", program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (1, "late\n")
    assert time.monotonic() - start < 30
