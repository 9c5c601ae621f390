"""`python -m tests.bench.attention`: decode attention of a layer on a CPU, PyTorch's backend beside the compiled one.

Shapes are the demo model's, in bfloat16. Pages lie in a pool of several layers that are attended to in turn, as a step
does, so that caches do not hold them. Both backends run in turn; a figure is the median of the repetitions, of a layer.
"GB/s" counts the bytes of records and slots that are read; "memory" is what this machine reads with as many threads,
"of that" how much longer attention takes than such a read.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from kernels.backend import AttentionBackend, PoolTensors
from kernels.cpu.backend import CpuBackend
from kernels.cpu.library import CpuLibrary
from kernels.format.layout import PageLayout, PageRef, Pool
from kernels.format.named import named_recipe
from kernels.format.step import AttentionStep, DecodeRow
from kernels.torch_backend.backend import TorchBackend

HEADS, KV_HEADS, HEAD_DIM, PAGE_TOKENS = 9, 3, 64, 64
NUM_LAYERS = 8
RECIPES = ("native", "int8", "fp8_e4m3", "int4", "int3", "int2")
BATCHES = ((8, 4000), (8, 512), (1, 8000))
NUM_SEALED = 16  # pages that are quantized; the others are copies of them


@dataclass(frozen=True)
class Case:
    recipe: str
    num_rows: int
    num_tokens: int

    def __post_init__(self) -> None:
        assert self.num_tokens > PAGE_TOKENS

    @property
    def layout(self) -> PageLayout:
        recipe = named_recipe(
            self.recipe, num_layers=NUM_LAYERS, has_k_bias=False, page_tokens=PAGE_TOKENS, sink_pages=1
        )
        return PageLayout(recipe, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="bfloat16")

    @property
    def num_numbers(self) -> int:
        """Of K and V that a layer reads."""
        return self.num_rows * self.num_tokens * 2 * KV_HEADS * HEAD_DIM

    def build(self) -> tuple[PoolTensors, AttentionStep, int]:
        """Filled pools, a step, and the bytes that a layer of it reads."""
        layout, sinks = self.layout, self.layout.recipe.sink_pages
        num_sealed = (self.num_tokens - 1) // PAGE_TOKENS - sinks
        num_slots = 1 + self.num_rows * (1 + sinks)
        pool = PoolTensors.allocate(
            layout, num_pages=1 + self.num_rows * num_sealed, num_slots=num_slots, device=torch.device("cpu")
        )
        pool.open[:] = torch.randn(NUM_LAYERS, 2, KV_HEADS, PAGE_TOKENS, HEAD_DIM)
        backend, count = TorchBackend(pool), min(NUM_SEALED, len(pool.sealed) - 1)
        for page in range(1, 1 + count):
            pool.open[1].normal_()
            backend.seal([1], [page])
        for start in range(1 + count, len(pool.sealed), count):
            rest = pool.sealed[start : start + count]
            rest.copy_(pool.sealed[1 : 1 + len(rest)])
        pages = (1 + torch.randperm(self.num_rows * num_sealed)).view(self.num_rows, num_sealed).tolist()
        rows = []
        for row, sealed in enumerate(pages):
            slots = [PageRef(Pool.OPEN, 1 + row * (1 + sinks) + place) for place in range(1 + sinks)]
            refs = (*slots[1:], *(PageRef(Pool.SEALED, page) for page in sealed), slots[0])
            rows.append(DecodeRow(self.num_tokens - 1, refs))
        own_tokens = (self.num_tokens - 1) % PAGE_TOKENS + 1
        slot_tokens = sinks * PAGE_TOKENS + own_tokens
        layer_bytes = num_sealed * layout.page_bytes // NUM_LAYERS + slot_tokens * 2 * KV_HEADS * HEAD_DIM * 2
        return pool, AttentionStep(tuple(rows), ()), self.num_rows * layer_bytes


def layer_seconds(backend: AttentionBackend, step: AttentionStep, q: Tensor, kv: Tensor) -> Callable[[], float]:
    tables = backend.prepare(step)

    def run() -> float:
        start = time.perf_counter()
        for layer in range(NUM_LAYERS):
            backend.attend(layer, q, kv, kv, tables)
        return (time.perf_counter() - start) / NUM_LAYERS

    return run


def memory_seconds(num_bytes: int) -> float:
    """Of a sum over so many bytes that no cache holds."""
    numbers = torch.ones(max(2**26, num_bytes // 4))
    times = []
    for _ in range(5):
        start = time.perf_counter()
        numbers.sum()
        times.append(time.perf_counter() - start)
    return median(times) * num_bytes / numbers.nbytes


def measure(case: Case, repetitions: int, path: str | None) -> str:
    pool, step, num_bytes = case.build()
    q, kv = torch.randn(case.num_rows, HEADS, HEAD_DIM), torch.zeros(case.num_rows, KV_HEADS, HEAD_DIM)
    compiled = CpuBackend(pool, None, num_heads=HEADS, path=CpuLibrary().path(path))
    runs = [layer_seconds(backend, step, q, kv) for backend in (TorchBackend(pool), compiled)]
    times: list[list[float]] = [[run() for run in runs] for _ in range(1 + repetitions)][1:]
    torch_time, cpu_time = (median(column) for column in zip(*times, strict=True))
    memory_time = memory_seconds(num_bytes)
    columns = (
        f"{case.recipe:<9} {case.num_rows:>2} x {case.num_tokens:<5}",
        f"{torch_time * 1e3:>9.3f} {cpu_time * 1e3:>8.3f} {min(row[1] for row in times) * 1e3:>8.3f}",
        f"{torch_time / cpu_time:>6.1f} {num_bytes / cpu_time / 1e9:>6.2f} {num_bytes / memory_time / 1e9:>7.2f}",
        f"{cpu_time / memory_time:>8.2f} {case.num_numbers / cpu_time / 1e9:>7.2f}",
    )
    return " ".join(columns)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.attention", description=__doc__)
    parser.add_argument("--recipes", default=",".join(RECIPES), help="names of KV formats")
    parser.add_argument("--repetitions", type=int, default=9)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--path", help="portable, avx2 or avx512 (default: the fastest that runs here)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    print(f"{CpuLibrary().path(args.path).name}, {args.threads} threads; milliseconds of a layer")
    print("recipe    rows x tokens  PyTorch compiled     best  ratio   GB/s  memory  of that Gnum/s")
    for num_rows, num_tokens in BATCHES:
        for recipe in args.recipes.split(","):
            print(measure(Case(recipe, num_rows, num_tokens), args.repetitions, args.path), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
