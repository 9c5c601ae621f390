"""`make gpu-check`: the tests and the speed of the Triton kernels on a GPU, in under six minutes.

Needs this repository, torch, triton and numpy; says what else is missing and what it leaves out for that or for want of
time. The exit code is 1 where a test or a measurement failed. `--dry-run` tries all of it on a CPU, where no figure
means anything.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from tests.gpu.budget import Budget, end_process_after
from tests.gpu.plan import DRY, FULL
from tests.gpu.stand_ins import stand_in

SECONDS = 350.0
NEEDED = ("torch", "triton", "numpy")
FOLDER = Path(__file__).parents[1] / "bench" / "results"


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make gpu-check", description="Test and measure the Triton kernels on a GPU.")
    parser.add_argument("--dry-run", action="store_true", help="try all of it on a CPU, as small as it can be")
    parser.add_argument(
        "--output", type=Path, help=f"folder for the JSON (default: {FOLDER}; of a dry run, a temporary one)"
    )
    parser.add_argument("--no-tests", action="store_true", help="measure only")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    budget = Budget(SECONDS)
    options = parse(arguments)
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        print(f"missing in {sys.executable}: {', '.join(missing)}; install them there, or name a Python that has them")
        return 1
    os.environ.pop("TRITON_INTERPRET", None)
    if options.dry_run:
        os.environ |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}  # read when triton and torch are imported
    if stood_in := stand_in():
        print(f"missing, but needed only to read checkpoints: {', '.join(stood_in)}")
    import torch

    if not options.dry_run and not torch.cuda.is_available():
        print("this PyTorch sees no CUDA device; --dry-run tries the script without one")
        return 1
    from tests.gpu.steps import Check

    device = torch.device("cpu" if options.dry_run else "cuda")
    output = options.output or (Path(tempfile.mkdtemp()) if options.dry_run else FOLDER)
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=output):
            pass
    except OSError as error:
        print(f"--output: {output} is no folder that can be written to ({error})")
        return 1
    check = Check(DRY if options.dry_run else FULL, device, budget, output)
    end = end_process_after(budget.left, check.end_early)
    check.run(has_tests=not options.no_tests)
    end.cancel()
    return check.finish()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
