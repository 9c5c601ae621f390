"""Which kernels serve: chosen at start by the device, or refused. They are never exchanged later."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.errors import StartupError
from engine.model.llama import Llama
from engine.runner import Replay
from engine.triton_needs import check_triton_needs
from kernels.backend import AttentionBackend, PoolTensors
from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import CpuLibrary, LibraryError
from kernels.format.layout import PageLayout
from kernels.rope import Rotary
from kernels.row_ops import MakeRowOps
from kernels.torch_backend.backend import TorchBackend
from kernels.torch_backend.invariant import InvariantTorchBackend
from kernels.torch_backend.row_ops import TorchRowOps
from kernels.triton.spec import why_unsupported

OLDEST_GPU = (8, 0)  # compute capability: bfloat16 and copies that do not wait


@dataclass(frozen=True, slots=True)
class Kernels:
    """`make_backend(pool, rotary, num_heads)`; `make_replay(model, backend)`, if any, is for decode steps.
    `trial_errors`: what a trial at start may raise where the device cannot do it; on a CPU there is no trial."""

    make_backend: Callable[[PoolTensors, Rotary, int], AttentionBackend]
    make_row_ops: MakeRowOps
    make_replay: Callable[[Llama, Any], Replay] | None = None
    trial_errors: tuple[type[Exception], ...] = ()


def choose_kernels(
    name: str, device: torch.device, layout: PageLayout, *, num_heads: int, is_invariant: bool
) -> Kernels:
    """`auto` takes Triton on CUDA. Raises StartupError where what is asked for cannot serve `layout` or the device."""
    if name not in ("auto", "torch", "triton", "cpu"):
        raise StartupError(f"--kernels is {name}; it must be auto, torch, triton or cpu")
    if name == "cpu" and is_invariant:
        raise StartupError("--kernels is cpu, which cannot be with --batch-invariant; leave one out, or give torch")
    if name == "cpu" and device.type != "cpu":
        raise StartupError(f"--kernels is cpu, but the device is {device}; give --device cpu, or leave it out")
    if name == "cpu":
        return _compiled()
    if name == "torch" or (name == "auto" and device.type != "cuda"):
        backend = InvariantTorchBackend if is_invariant else TorchBackend
        errors = (RuntimeError,) if device.type == "cuda" else ()
        return Kernels(lambda pool, rotary, num_heads: backend(pool, rotary), TorchRowOps, trial_errors=errors)
    if device.type == "cuda" and (capability := torch.cuda.get_device_capability(device)) < OLDEST_GPU:
        found, wanted = (".".join(map(str, version)) for version in (capability, OLDEST_GPU))
        raise StartupError(
            f"--kernels: {torch.cuda.get_device_name(device)} has compute capability {found}; the Triton kernels need "
            f"{wanted} or newer; give --kernels torch, which is slow, or --device cpu"
        )
    if reason := why_unsupported(layout, num_heads):
        advice = (
            "--kernels torch, which is slow on CUDA, or --device cpu" if device.type == "cuda" else "--kernels torch"
        )
        raise StartupError(f"--kernels: {reason}; give {advice}")
    return _triton(device, is_invariant)


def _compiled() -> Kernels:
    try:
        path = CpuLibrary().path()
    except LibraryError as error:
        raise StartupError(f"--kernels is cpu, but {error}, or give torch") from error
    return Kernels(
        lambda pool, rotary, num_heads: CpuBackend(pool, rotary, num_heads=num_heads, path=path), TorchRowOps
    )


def _triton(device: torch.device, is_invariant: bool) -> Kernels:
    try:
        import triton

        from engine.graphs import DecodeGraphs, cuda_recorder
        from kernels.triton.backend import TritonBackend
        from kernels.triton.elementwise import TritonRowOps
    except ImportError as error:
        raise StartupError(
            f"--kernels: Triton cannot be imported ({error}); install it, or give --kernels torch"
        ) from error
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise StartupError(f"--kernels is triton, but the device is {device}, and Triton needs CUDA; leave it out")
    if device.type == "cuda":
        check_triton_needs(Path(triton.knobs.cache.dir))
    can_replay = device.type == "cuda" and not is_invariant
    return Kernels(
        lambda pool, rotary, num_heads: TritonBackend(pool, rotary, num_heads=num_heads, is_invariant=is_invariant),
        TritonRowOps,
        (lambda model, backend: DecodeGraphs(model, backend, cuda_recorder())) if can_replay else None,
        (triton.errors.TritonError, RuntimeError) if device.type == "cuda" else (),
    )
