"""What the machine offers: device, dtype, free memory."""

import warnings
from pathlib import Path
from typing import NamedTuple

import torch

from engine.errors import StartupError
from engine.prescription import Processor, gpu_processor

DTYPES = ("auto", "float32", "bfloat16", "float16")
CPU_SHARE = 0.4  # the rest is for activations, the tokenizer and everybody else on the host
CUDA_SHARE = 0.9


class GroupNames(NamedTuple):
    """Of the files of a memory control group, and of the line of its memory.stat."""

    limit: str
    used: str
    cached: str


GROUP_V1 = GroupNames("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
GROUP_V2 = GroupNames("memory.max", "memory.current", "inactive_file")


def choose_device(name: str) -> torch.device:
    """`auto` takes CUDA where there is one. Raises StartupError for a device that is not there."""
    if name not in ("auto", "cpu", "cuda"):
        raise StartupError(f"--device is {name}; it must be auto, cpu or cuda")
    with warnings.catch_warnings(record=name == "cuda") as caught:  # where it is an error, the reason is part of it
        available = torch.cuda.is_available()
    if name == "cuda" and not available:
        raise StartupError(_why_no_cuda([str(warning.message) for warning in caught or ()]))
    return torch.device("cuda" if available and name != "cpu" else "cpu")


def _why_no_cuda(reasons: list[str]) -> str:
    if torch.version.cuda is None:
        return "--device is cuda, but this PyTorch is built without CUDA; install its CUDA build, or give cpu"
    said = f" ({reasons[0].splitlines()[0]})" if reasons else ""
    return (
        f"--device is cuda, but PyTorch finds no GPU{said}; install NVIDIA's driver, until nvidia-smi shows the GPU, "
        "and give a container the GPU (docker run --gpus all, which needs NVIDIA's container toolkit), or give cpu"
    )


def choose_dtype(name: str, device: torch.device, *, is_compiled: bool) -> torch.dtype:
    """`auto` takes bfloat16 where the hardware computes in it, or on a CPU the compiled kernels do (`is_compiled`);
    elsewhere float16 on CUDA, float32 on a CPU."""
    if name not in DTYPES:
        raise StartupError(f"--dtype is {name}; it must be one of {', '.join(DTYPES)}")
    if name != "auto":
        return getattr(torch, name)  # type: ignore[no-any-return]
    if device.type == "cuda":
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    flags = torch.cpu.get_capabilities()
    return torch.bfloat16 if is_compiled or flags.get("avx512_bf16") or flags.get("bf16") else torch.float32


def processor_of(device: torch.device) -> Processor:
    return gpu_processor(*torch.cuda.get_device_capability(device)) if device.type == "cuda" else Processor.CPU


def default_kv_memory(device: torch.device, to_come: int = 0) -> int:
    """A share, in bytes, of what is free now but for `to_come` bytes that something else will take."""
    if device.type == "cuda":
        free, share = torch.cuda.mem_get_info(device)[0], CUDA_SHARE
    else:
        free, share = free_host_memory(), CPU_SHARE
    return max(0, int((free - to_come) * share))


def check_room(device: torch.device, num_bytes: int, kv_memory: int, what: str) -> None:
    """Raise StartupError where `what`, of so many bytes, and `kv_memory` are more than is free. A GPU says so by itself
    when it is asked for them; a host gives what it has not, and ends the process later without a word."""
    if device.type != "cpu" or num_bytes + kv_memory <= (free := free_host_memory()):
        return
    with_pages = f", and --kv-memory is {kv_memory}" if kv_memory else ""
    advice = "lower --kv-memory" if num_bytes < free else "give it more memory, or take a smaller model"
    raise StartupError(
        f"{what} take {num_bytes} bytes{with_pages}; that is more than the {free} bytes that are free here (of the "
        f"host, or up to the container's limit); {advice}"
    )


def free_host_memory(groups: Path = Path("/sys/fs/cgroup")) -> int:
    """What the kernel says is available, or what the control group leaves where that is less."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(fields["MemAvailable"].split()[0]) * 1024
    for group, names in ((groups, GROUP_V2), (groups / "memory", GROUP_V1)):
        left = _left_in_group(group, names)
        free = free if left is None else min(free, left)
    return free


def limit_threads(groups: Path = Path("/sys/fs/cgroup")) -> None:
    """PyTorch computes with a thread for each processor. Where a control group gives less time than that (a container's
    `--cpus`), threads that wait for each other would stand still together, so there are fewer."""
    processors = _processors_of_group(groups)
    if processors is not None and torch.get_num_threads() > processors:
        torch.set_num_threads(max(1, int(processors)))


def _processors_of_group(groups: Path) -> float | None:
    """None without a limit."""
    both, quota = groups / "cpu.max", groups / "cpu" / "cpu.cfs_quota_us"
    if both.exists():
        time, period = both.read_text().split()
    elif quota.exists():
        time, period = quota.read_text(), (quota.parent / "cpu.cfs_period_us").read_text()
    else:
        return None
    return None if time == "max" or int(time) <= 0 else int(time) / int(period)


def _left_in_group(group: Path, names: GroupNames) -> int | None:
    """Bytes up to the group's limit; None without one. Cached pages of files, which it gives up, are not counted."""
    limit = group / names.limit
    if not limit.exists() or (text := limit.read_text().strip()) == "max":
        return None
    stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    used = int((group / names.used).read_text()) - int(stat.get(names.cached, 0))
    return max(0, int(text) - used)
