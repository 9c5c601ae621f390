"""Launches as plain values, and what they compile to for a chip that need not be there."""

import contextlib
import importlib
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from tests.kernels.triton.report.sass import Program, parse

ARCHES = (80, 86, 89, 90, 100)
ALIGNMENT = 16  # of pointers and integers, in bytes and in numbers, that Triton makes use of


@dataclass(frozen=True)
class Pointer:
    """Stands for a tensor: all that a kernel is specialised by."""

    dtype: torch.dtype
    is_aligned: bool

    def data_ptr(self) -> int:
        return 0 if self.is_aligned else 1


@dataclass(frozen=True)
class Launch:
    """`kernel`: "module:function". `arguments`: its arguments by name, a tensor as `Pointer`; `options`: num_warps and
    the like, where given."""

    kernel: str
    arguments: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> "Launch":
        given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        arguments = tuple((param.name, _kind(given[param.name], param.is_constexpr)) for param in kernel.params)
        options = tuple(sorted((name, value) for name, value in kwargs.items() if name not in kernel.arg_names))
        return cls(f"{kernel.fn.__module__}:{kernel.fn.__qualname__}", arguments, options)

    @property
    def function(self) -> str:
        return self.kernel.split(":")[1]

    @property
    def given(self) -> dict[str, Any]:
        return dict(self.arguments)


def _kind(value: Any, is_constant: bool) -> Any:
    """The same for all values that make no difference to the compiler."""
    if isinstance(value, Tensor):
        return Pointer(value.dtype, value.data_ptr() % ALIGNMENT == 0)
    if is_constant or not isinstance(value, int | float) or isinstance(value, bool) or value == 1:
        return value
    if isinstance(value, float):
        return 0.5
    size = 1 << 40 if abs(value) >= 1 << 31 else 1 << 10
    return size if value % ALIGNMENT == 0 else size + 3


@contextlib.contextmanager
def recorded() -> Iterator[list[Launch]]:
    """Within it, launches are noted and nothing is run, so tensors may lie anywhere."""
    launches: list[Launch] = []
    run = JITFunction.run

    def note(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        launches.append(Launch.of(kernel, args, kwargs))

    JITFunction.run = note
    try:
        yield launches
    finally:
        JITFunction.run = run


class Chip:
    """The part of a driver that compiling asks for. Compiled kernels are kept by device, so each chip is one."""

    def __init__(self, arch: int):
        self._arch = arch

    def get_current_device(self) -> int:
        return self._arch

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)


@dataclass(frozen=True)
class Compiled:
    """`shared`: bytes of shared memory a launch asks for; `stack`: bytes of local memory a thread."""

    program: Program
    registers: int
    stack: int
    shared: int


def compile_launch(launch: Launch, arch: int) -> Compiled:
    """Raises what Triton raises for a kernel that it cannot compile."""
    module, function = launch.kernel.split(":")
    kernel = getattr(importlib.import_module(module), function)
    driver.set_active(Chip(arch))
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):  # Triton prints the code that fails
        compiled = kernel.warmup(grid=(1,), **launch.given, **dict(launch.options))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = _run(triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name)
        listing = _run(triton.knobs.nvidia.nvdisasm.path, "-g", "-c", file.name)
    used = dict(re.findall(r"(REG|STACK):(\d+)", usage))
    return Compiled(parse(listing), int(used["REG"]), int(used["STACK"]), compiled.metadata.shared)


def _run(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
