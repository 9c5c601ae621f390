"""How much memory of the host there is to take: the kernel's word, or what a container may have."""

from pathlib import Path

import pytest
import torch

from engine import device
from engine.device import check_room, free_host_memory, limit_threads
from engine.errors import StartupError

GIB = 2**30


def group(folder: Path, files: dict[str, str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize(
    ("where", "files", "free"),
    [
        ("", {"memory.max": "2147483648\n", "memory.current": "1610612736\n",
              "memory.stat": "anon 5\ninactive_file 1073741824\nslab 7\n"}, 1.5 * GIB),
        ("memory", {"memory.limit_in_bytes": "2147483648\n", "memory.usage_in_bytes": "1610612736\n",
                    "memory.stat": "cache 1\ntotal_inactive_file 1073741824\n"}, 1.5 * GIB),
        ("", {"memory.max": "1073741824\n", "memory.current": "2147483648\n", "memory.stat": ""}, 0),
    ],
    ids=["v2", "v1", "more is used than may be"],
)  # fmt: skip
def test_a_containers_limit_counts(tmp_path: Path, where: str, files: dict[str, str], free: float) -> None:
    group(tmp_path / where, files)
    assert free_host_memory(tmp_path) == free


@pytest.mark.parametrize(
    ("where", "files"),
    [
        ("", {"memory.max": "max\n"}),
        (
            "memory",
            {"memory.limit_in_bytes": "9223372036854771712\n", "memory.usage_in_bytes": "5\n", "memory.stat": ""},
        ),
        ("", {}),
    ],
    ids=["v2", "v1", "no groups"],
)
def test_without_a_limit_it_is_what_the_kernel_says(tmp_path: Path, where: str, files: dict[str, str]) -> None:
    group(tmp_path / where, files)
    lines = Path("/proc/meminfo").read_text().splitlines()
    (available,) = (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    assert abs(free_host_memory(tmp_path) - available) < GIB  # it moves while others work


def test_what_does_not_fit_is_told_before_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_host_memory", lambda: 3 * GIB)
    cpu = torch.device("cpu")
    check_room(cpu, 2 * GIB, GIB, "the weights of m")
    check_room(torch.device("cuda"), 9 * GIB, GIB, "the weights of m")
    with pytest.raises(
        StartupError, match=r"^the weights of m take \d+ bytes; that is more than the 3221225472 bytes .* model$"
    ):
        check_room(cpu, 4 * GIB, 0, "the weights of m")
    with pytest.raises(
        StartupError, match=r"^the weights of m take \d+ bytes, and --kv-memory is 2147483648; .* lower --kv-memory$"
    ):
        check_room(cpu, 2 * GIB, 2 * GIB, "the weights of m")


@pytest.mark.parametrize(
    "files, wanted",
    [
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "250000 100000\n"}, 2),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "1600000 100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "300000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 3),
        ({}, 8),
    ],
    ids=str,
)
def test_threads_are_no_more_than_the_processors_of_the_group(
    files: dict[str, str], wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = [8]
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(torch, "set_num_threads", threads.append)
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    limit_threads(tmp_path)
    assert threads[-1] == wanted
