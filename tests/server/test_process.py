"""What `quire` does as a process: where its output goes, and what it leaves when it is stopped."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.model_folders import write_model_folder

QUIRE = (sys.executable, "-m", "server.cli")
PLAN = (*QUIRE, "plan", "llama-3-8b")


def run_into_closed_pipe(*more: str) -> subprocess.CompletedProcess[str]:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run([*PLAN, *more], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    finally:
        os.close(writer)


@pytest.mark.parametrize("more", [(), ("--json", "-")])
def test_a_reader_that_has_gone_ends_it_without_a_word(more: tuple[str, ...]) -> None:
    result = run_into_closed_pipe(*more)
    assert (result.returncode, result.stderr) == (1, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="Linux has a device that is always full")
@pytest.mark.parametrize("more", [(), ("--json", "-")])
def test_a_full_disk_is_told(more: tuple[str, ...]) -> None:
    with Path("/dev/full").open("w") as full:
        result = subprocess.run([*PLAN, *more], stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (1, "quire: stdout cannot be written: No space left on device\n")


def test_a_closed_stdout_is_no_mistake() -> None:
    command = " ".join((*PLAN, "--json", "-", ">&-"))
    result = subprocess.run(["sh", "-c", command], stderr=subprocess.PIPE, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (0, "")


def open_when_read(fifo: Path, process: "subprocess.Popen[bytes]") -> int:
    """A pipe's end to write, opened once the process has opened the other one."""
    for _ in range(1200):
        try:
            return os.open(fifo, os.O_WRONLY | os.O_NONBLOCK)
        except OSError as error:
            if error.errno != errno.ENXIO or process.poll() is not None:
                raise
            time.sleep(0.05)
    raise TimeoutError


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_temporary_folder(tmp_path: Path, number: signal.Signals) -> None:
    """The text comes from a pipe that nobody writes to, so that the run waits when the signal comes."""
    model, temporary, text = write_model_folder(tmp_path / "model"), tmp_path / "tmp", tmp_path / "text"
    temporary.mkdir()
    os.mkfifo(text)
    process = subprocess.Popen(
        [*QUIRE, "eval", str(model), "--text", str(text), "--context", "128"],
        env={**os.environ, "TMPDIR": str(temporary)},
        stderr=subprocess.PIPE,
    )
    try:
        writer = open_when_read(text, process)
        assert len(list(temporary.glob("quire-eval-*"))) == 1
        process.send_signal(number)
        assert process.communicate(timeout=60) == (None, b"") and process.returncode == 128 + number
        os.close(writer)
    finally:
        process.kill()
        process.wait()
    assert list(temporary.glob("quire-eval-*")) == []
