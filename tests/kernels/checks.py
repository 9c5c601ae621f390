"""One step of a backend against the oracle, over pools that hold NaN wherever a row has no business."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch

from kernels.backend import AttentionBackend, PoolTensors
from kernels.cpu.backend import CpuBackend
from kernels.format.layout import PageLayout
from kernels.reference import PageReader
from kernels.rope import Rotary
from kernels.torch_backend.backend import TorchBackend
from kernels.torch_backend.invariant import InvariantTorchBackend
from tests.kernels.builders import ODD_RECIPES, Pools, make_layout, rotary, same_bits
from tests.kernels.compiled import kernel_path
from tests.kernels.steps import Row, StepBuilder

LAYER = 1  # the last of two, so that a wrong layer's bytes are noticed
PADDING = 3


def tolerance(
    expected: np.ndarray, logit: float, value: float | np.ndarray, num_keys: int, layout: PageLayout
) -> np.ndarray:
    """|error| of fp32 attention.

    A logit is a sum of D products that grows up to `logit`, and exp turns its error into a relative one of a weight;
    the sums over keys add theirs. Roundings of 2^-24 add up like a random walk; twice that is allowed.
    """
    roundings = math.sqrt(layout.head_dim) * logit + math.sqrt(num_keys)
    return np.abs(expected) * 2.0**-24 + 2 * 2.0**-24 * roundings * value


HALF_ULP = {"float32": 0.0, "bfloat16": 2.0**-9, "float16": 2.0**-12}


@dataclass(frozen=True)
class Rounding:
    """What a backend rounds to 16 bit, `unit` being half an ulp there.

    Each of `of_logits` roundings of a query or key moves a logit by a share of it, so weights by twice that (their sum
    moves too); `of_values` are those of a weight or value, `of_result` those of the result.
    """

    unit: float = 0.0
    of_logits: int = 0
    of_values: int = 0
    of_result: int = 0

    def tolerance(self, expected: np.ndarray, logit: float, value: float | np.ndarray) -> np.ndarray:
        values = (2 * self.of_logits * logit + self.of_values) * value
        return self.unit * (values + self.of_result * np.abs(expected))


@dataclass(frozen=True)
class Candidate:
    """A backend to check. `make(pool, rotary, num_heads)`; `rounding(layout, is_decode)` of a row. `device`: where its
    pools and inputs are; the oracle's stay on the CPU."""

    name: str
    make: Callable[[PoolTensors, Rotary, int], AttentionBackend]
    rounding: Callable[[PageLayout, bool], Rounding]
    device: torch.device = torch.device("cpu")

    def __str__(self) -> str:
        return self.name


def torch_rounding(layout: PageLayout, is_decode: bool) -> Rounding:
    """Pages of 16-bit values are attended to in 16 bit by decode rows on a CPU: query, weights, result."""
    recipe = layout.recipe.layers[LAYER]
    if is_decode and recipe.is_raw and not recipe.before_rope:
        return Rounding(HALF_ULP[layout.dtype], 1, 1, 1)
    return Rounding()


TORCH = Candidate("torch", lambda pool, rotary, num_heads: TorchBackend(pool, rotary), torch_rounding)
INVARIANT_TORCH = Candidate(
    "invariant torch",
    lambda pool, rotary, num_heads: InvariantTorchBackend(pool, rotary),
    lambda layout, is_decode: Rounding(),
)


def compiled(name: str | None) -> Candidate:
    """The compiled backend with the kernels for one instruction set, or the fastest ones. It computes in fp32."""
    return Candidate(
        f"cpu {name}" if name else "cpu",
        lambda pool, rotary, num_heads: CpuBackend(pool, rotary, num_heads=num_heads, path=kernel_path(name)),
        lambda layout, is_decode: Rounding(),
    )


BACKENDS = [TORCH, INVARIANT_TORCH, compiled(None)]


@dataclass(frozen=True)
class Shape:
    recipe: str
    head_dim: int
    page_tokens: int
    num_kv_heads: int
    group: int
    sink_pages: int
    dtype: str

    def __str__(self) -> str:
        return "-".join(str(value) for value in (self.recipe, *list(self.__dict__.values())[1:]))

    def pools(self, num_pages: int, num_slots: int) -> Pools:
        layout = make_layout(
            self.recipe,
            num_layers=2,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            page_tokens=self.page_tokens,
            sink_pages=self.sink_pages,
            dtype=self.dtype,
        )
        return Pools(layout, num_pages=num_pages, num_slots=num_slots)


# every recipe, head size, page size, group and number of sinks with each dtype; native has no sinks
SHAPES = [
    Shape("native", 64, 64, 3, 3, 0, "bfloat16"),
    Shape("native", 16, 32, 2, 1, 0, "float32"),
    Shape("int8", 64, 64, 2, 3, 1, "bfloat16"),
    Shape("int8", 80, 32, 1, 16, 2, "float32"),
    Shape("int4", 64, 64, 3, 3, 1, "bfloat16"),
    Shape("int4", 80, 32, 2, 4, 2, "float16"),
    Shape("int4", 16, 32, 2, 8, 0, "float32"),
    Shape("fp8_e5m2", 80, 64, 1, 4, 2, "bfloat16"),
    Shape("fp8_e5m2", 64, 32, 1, 8, 0, "float16"),
    Shape("fp8_e4m3", 128, 32, 2, 1, 1, "bfloat16"),
    Shape("kivi4", 64, 32, 2, 3, 1, "float32"),
    Shape("kivi4", 16, 64, 1, 16, 0, "bfloat16"),
    *(Shape(name, 64, 32, 2, 3, 1, "bfloat16") for name in ODD_RECIPES),
    *(Shape(name, 80, 64, 1, 2, 0, "float32") for name in ODD_RECIPES),
]


def check_step(builder: StepBuilder, candidate: Candidate, group: int, query_scale: float = 1.0) -> None:
    """Runs the step and compares with the oracle rows of `LAYER` and the mass that all layers give to pages, and every
    byte of both pools with what they held before or were to be given."""
    pools = builder.pools
    layout = pools.layout
    k, v = builder.activations(PADDING)
    q = pools.random(len(k), layout.num_kv_heads * group, layout.head_dim).float() * query_scale
    q[-PADDING:] = torch.nan
    expected_sealed, expected_open = builder.expected_pools()
    tensors = PoolTensors(
        layout, *(x.to(candidate.device, copy=True) for x in (pools.tensors.sealed, pools.tensors.open))
    )
    inputs = [x.to(candidate.device, copy=True) for x in (q, k, v)]

    backend = candidate.make(tensors, rotary(layout.head_dim, candidate.device), layout.num_kv_heads * group)
    tables = backend.prepare(builder.step)
    queries, keys, values = inputs
    for layer in range(len(layout.layers)):
        backend.append(layer, keys[:, layer], values[:, layer], tables)
        result = backend.attend(layer, queries, keys[:, layer], values[:, layer], tables)

    mass = backend.mass(tables)
    actual = result.cpu()

    assert same_bits(tensors.sealed.cpu(), expected_sealed)
    assert same_bits(tensors.open.cpu(), expected_open)
    assert all(same_bits(x, after.cpu()) for x, after in zip((q, k, v), inputs, strict=True))
    assert actual.dtype == q.dtype and actual.shape == q.shape
    assert torch.isfinite(actual).all()
    assert not actual[-PADDING:].any()

    pools.tensors.sealed.copy_(expected_sealed)
    pools.tensors.open.copy_(expected_open)
    reader = pools.reader()
    edges = (1, layout.page_tokens - 1, layout.page_tokens)
    for index, row in enumerate(builder.rows):
        if len(row.own_k) not in edges and index >= len(builder.step.decode) and index % 5:
            continue  # the oracle is slow: of a chunk's rows, those at page edges and every 5th
        own_k, own_v = (x[:, LAYER].double().numpy() for x in (row.own_k, row.own_v))
        query = q[index].double().numpy()
        expected, _ = reader.attend(LAYER, query, row.before, own_k, own_v)
        num_keys = len(row.before) * layout.page_tokens + len(own_k)
        bound = tolerance(expected, largest_logit(query), 6.0, num_keys, layout)  # values are at most 6
        is_decode = index < len(builder.step.decode)
        bound += candidate.rounding(layout, is_decode).tolerance(expected, largest_logit(query), 6.0)
        error = np.abs(actual[index].double().numpy() - expected)
        assert (error <= bound).all(), f"row {index}: {error.max()} over {bound.min()}"
    check_mass(builder, reader, q.double().numpy(), mass, candidate)


def largest_logit(query: np.ndarray) -> float:
    """How far a logit gets: its products add up like a random walk, and keys are at most 4 (5 as stored) in each
    channel."""
    return 5 * float(np.linalg.norm(query, axis=-1).max()) / math.sqrt(query.shape[-1])


def check_mass(
    builder: StepBuilder, reader: PageReader, q: np.ndarray, mass: list[list[float]], candidate: Candidate
) -> None:
    """Compares the mass that the two layers gave to pages, both with the queries `q` [rows, heads, D]."""
    layout, step = builder.pools.layout, builder.step
    rows = iter(zip(q, builder.rows, strict=False))
    parts = [(1, int(row.is_observed), len(row.pages)) for row in step.decode]
    parts += [(chunk.length, chunk.num_observed, len(chunk.context + chunk.targets)) for chunk in step.chunks]
    assert len(mass) == len(parts)
    for place, ((num_rows, num_observed, num_pages), actual) in enumerate(zip(parts, mass, strict=True)):
        observed = list(islice(rows, num_rows))[num_rows - num_observed :]
        if not observed:
            assert actual == []
            continue
        expected, bound = np.zeros(num_pages), np.zeros(num_pages)
        for query, row in observed:
            shares = oracle_mass(reader, query, row)
            pages = slice(len(shares))
            expected[pages] += shares
            num_keys = num_pages * layout.page_tokens
            # a share is a weight by the sum of all weights: both are off by the error of a weight
            bound[pages] += 2 * tolerance(shares, largest_logit(query), shares, num_keys, layout)
            bound[pages] += len(layout.layers) * len(query) * 2.0**-33  # it is rounded to a multiple of 2^-32
            rounding = candidate.rounding(layout, place < len(step.decode))
            bound[pages] += rounding.tolerance(shares, largest_logit(query), shares)
        error = np.abs(np.array(actual) - expected)
        assert (error <= bound).all(), f"part {place}: {error} over {bound}"
        total = len(layout.layers) * q.shape[1] * num_observed
        assert abs(sum(actual) - total) <= total * num_pages * layout.page_tokens * 2.0**-24


def oracle_mass(reader: PageReader, query: np.ndarray, row: Row) -> np.ndarray:
    """What one query gives to each page, summed over layers and heads: float64 [pages]."""
    mass = np.zeros(len(row.before) + 1)
    for layer in range(row.own_k.shape[1]):
        own_k, own_v = (x[:, layer].double().numpy() for x in (row.own_k, row.own_v))
        mass += reader.attend(layer, query, row.before, own_k, own_v)[1].sum(0)
    return mass
