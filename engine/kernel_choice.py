"""Which kernels serve: chosen at start by the device, or refused. They are never exchanged later."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.compiled_decode import CompiledDecode
from engine.errors import StartupError
from engine.model.linear import MakeProjection, PlainProjection
from engine.model.llama import Llama
from engine.runner import Replay
from engine.triton_needs import check_triton_needs
from kernels.backend import AttentionBackend, PoolTensors
from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import CpuLibrary, KernelPath, LibraryError
from kernels.cpu.linear import CompiledProjection
from kernels.cpu.row_ops import CompiledRowOps
from kernels.format.layout import PageLayout
from kernels.rope import Rotary
from kernels.row_ops import MakeRowOps
from kernels.torch_backend.backend import TorchBackend
from kernels.torch_backend.invariant import InvariantTorchBackend
from kernels.torch_backend.row_ops import TorchRowOps
from kernels.triton.spec import why_unsupported

log = logging.getLogger(__name__)

OLDEST_GPU = (8, 0)  # compute capability: bfloat16 and copies that do not wait


@dataclass(frozen=True, slots=True)
class Kernels:
    """`make_backend(pool, rotary, num_heads)`; `make_replay(model, backend)`, if any, is for decode steps.
    `trial_errors`: what a trial at start may raise where the device cannot do it; on a CPU there is no trial.
    `is_compiled`: products and row operations are; no bit of a row depends on the rows beside it there. `build` names
    what they were compiled from."""

    make_backend: Callable[[PoolTensors, Rotary, int], AttentionBackend]
    make_row_ops: MakeRowOps
    make_projection: MakeProjection = PlainProjection
    is_compiled: bool = False
    build: str = ""
    make_replay: Callable[[Llama, Any], Replay | None] | None = None
    trial_errors: tuple[type[Exception], ...] = ()


def find_compiled(name: str, device: torch.device) -> KernelPath | None:
    """The compiled CPU kernels, which `cpu` asks for and `auto` takes on a CPU; there it goes on without them, and says
    so. Raises StartupError where they are asked for and cannot be had."""
    if name == "cpu" and device.type != "cpu":
        raise StartupError(f"--kernels is cpu, but the device is {device}; give --device cpu, or leave it out")
    if name not in ("auto", "cpu") or device.type != "cpu":
        return None
    try:
        return CpuLibrary().path()
    except LibraryError as error:
        if name == "cpu":
            raise StartupError(f"--kernels is cpu, but {error}, or give torch") from error
        log.warning("PyTorch's kernels serve, which are slower: %s", error)
        return None


def make_products(compiled: KernelPath | None) -> MakeProjection:
    return PlainProjection if compiled is None else lambda weight, bias: CompiledProjection(compiled, weight, bias)


def choose_kernels(
    name: str,
    device: torch.device,
    layout: PageLayout,
    compiled: KernelPath | None,
    *,
    num_heads: int,
    is_invariant: bool,
) -> Kernels:
    """`auto` takes Triton on CUDA. `compiled`: see `find_compiled`. Raises StartupError where what is asked for cannot
    serve `layout` or the device."""
    if name not in ("auto", "torch", "triton", "cpu"):
        raise StartupError(f"--kernels is {name}; it must be auto, torch, triton or cpu")
    if compiled is not None:
        return _compiled(compiled, is_invariant)
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


def _compiled(path: KernelPath, is_invariant: bool) -> Kernels:
    """Attention that is batch-invariant is PyTorch's."""

    def make_backend(pool: PoolTensors, rotary: Rotary, num_heads: int) -> AttentionBackend:
        if is_invariant:
            return InvariantTorchBackend(pool, rotary)
        return CpuBackend(pool, rotary, num_heads=num_heads, path=path)

    def make_replay(model: Llama, backend: CpuBackend) -> Replay | None:
        if backend.whole_layers is None or backend.pool.layout.dtype == "float16":  # which is not written to slots
            return None
        return CompiledDecode(model, backend, backend.whole_layers)

    def make_row_ops(dtype: torch.dtype, eps: float, rotation: Tensor) -> CompiledRowOps:
        return CompiledRowOps(path, dtype, eps)

    replay = None if is_invariant else make_replay
    return Kernels(
        make_backend, make_row_ops, make_products(path), is_compiled=True, build=path.build_id, make_replay=replay
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
        make_replay=(lambda model, backend: DecodeGraphs(model, backend, cuda_recorder())) if can_replay else None,
        trial_errors=(triton.errors.TritonError, RuntimeError) if device.type == "cuda" else (),
    )
