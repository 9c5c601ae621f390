"""Compiles many kernels, one process a CPU."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

from tests.kernels.triton.report.cases import Case
from tests.kernels.triton.report.compile import compile_launch
from tests.kernels.triton.report.figures import Figures, faults, figures

Outcome = tuple[Figures | None, list[str]]
"""A kernel's figures, None where it does not compile, and its faults."""


def compile_all(pairs: list[tuple[Case, int]]) -> Iterator[Outcome]:
    """In the order of `pairs`."""
    # spawn: a fork would take over locks of torch's threads
    with ProcessPoolExecutor(min(len(pairs), os.cpu_count() or 1), mp_context=get_context("spawn")) as pool:
        yield from pool.map(_compile, pairs)


def _compile(pair: tuple[Case, int]) -> Outcome:
    case, arch = pair
    try:
        compiled = compile_launch(case.launch, arch)
    except Exception as error:  # Triton's compiler raises anything; one kernel must not hide the others
        return None, [f"does not compile: {_cause(error)}"]
    return figures(compiled, case.demands), list(faults(compiled, case.demands, arch))


def _cause(error: BaseException) -> str:
    """One line of the innermost error; Triton's quote the code down to the place, a caret under it, and a message."""
    while error.__cause__:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return " | ".join(lines[-2:]) or type(error).__name__
