"""What runs kernels: a step of the attention backend, a layer's row operations. All on the CPU, over small pools, with
launches noted instead of run, so that kernels are compiled for what the host's code hands them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.backend import PoolTensors
from kernels.format.codec import Parameters, Raw, Store
from kernels.format.layout import PageLayout, PageRef, Pool
from kernels.format.named import RECIPES
from kernels.format.step import AttentionStep, DecodeRow, PrefillChunk
from kernels.row_ops import Turn
from kernels.triton.backend import TritonBackend
from kernels.triton.elementwise import TritonRowOps
from kernels.triton.spec import why_unsupported
from tests.kernels.builders import ODD_RECIPES, make_layout, rotary
from tests.kernels.triton.report.compile import Launch, recorded

HEAD_DIMS, KV_HEADS, GROUP = (128, 64, 256), 8, 4  # Llama-3-8B's first
COMMON = ("native", "int8", "int4", "fp8_e5m2")  # of which also other page sizes, groups and options are compiled

Feature = tuple[str, str]
"""What a choice of scenarios should cover: a kind and which of it."""


@dataclass(frozen=True)
class AttentionScenario:
    """A decode row and a chunk that have sinks, sealed pages and a page of their own; and a slot that is sealed."""

    recipe: str
    head_dim: int
    page_tokens: int = 64
    group: int = GROUP
    dtype: str = "bfloat16"
    is_observed: bool = False
    is_invariant: bool = False

    @property
    def layout(self) -> PageLayout:
        return make_layout(
            self.recipe,
            num_layers=1,
            num_kv_heads=KV_HEADS,
            head_dim=self.head_dim,
            page_tokens=self.page_tokens,
            dtype=self.dtype,
        )

    @property
    def name(self) -> str:
        return " ".join((self.recipe, f"D{self.head_dim}", f"P{self.page_tokens}", f"G{self.group}", *self._options))

    @property
    def _options(self) -> list[str]:
        set_to = {"mass": self.is_observed, "invariant": self.is_invariant, self.dtype: self.dtype != "bfloat16"}
        return [option for option, is_set in set_to.items() if is_set]

    @property
    def features(self) -> set[Feature]:
        layer = self.layout.recipe.layers[0]
        flags = {"norm": layer.norm_k, "rows": layer.outliers is not None, "before rope": layer.before_rope}
        sizes = ("D", str(self.head_dim)), ("P", str(self.page_tokens)), ("G", str(self.group))
        return {
            *sizes,
            *(("k", how) for how in _how(layer.k)),
            *(("v", how) for how in _how(layer.v)),
            *(("recipe", flag) for flag, is_set in flags.items() if is_set),
            *(("run", option) for option in self._options),
        }

    def launches(self) -> list[Launch]:
        layout = self.layout
        size, sinks = layout.page_tokens, layout.recipe.sink_pages
        pool = PoolTensors.allocate(layout, num_pages=8, num_slots=8, device=torch.device("cpu"))
        before = (*(PageRef(Pool.OPEN, 1 + i) for i in range(sinks)), PageRef(Pool.SEALED, 1), PageRef(Pool.SEALED, 2))
        row = DecodeRow(len(before) * size + 3, (*before, PageRef(Pool.OPEN, 4)), self.is_observed)
        targets = PageRef(Pool.SEALED, 3), PageRef(Pool.OPEN, 5)
        chunk = PrefillChunk(len(before) * size, size + 3, before, targets, size if self.is_observed else 0)
        step = AttentionStep((row,), (chunk,))
        dtype = getattr(torch, self.dtype)
        k, v = (torch.zeros(step.num_rows, KV_HEADS, layout.head_dim, dtype=dtype) for _ in range(2))
        q = torch.zeros(step.num_rows, KV_HEADS * self.group, layout.head_dim)
        num_heads = KV_HEADS * self.group
        with recorded() as found:
            backend = TritonBackend(pool, rotary(layout.head_dim), num_heads=num_heads, is_invariant=self.is_invariant)
            tables = backend.prepare(step)
            backend.append(0, k, v, tables)
            backend.attend(0, q, k, v, tables)
            backend.seal([4], [4])
        return found


def _how(store: Store) -> Iterator[str]:
    yield "raw" if isinstance(store.codec, Raw) else str(store.codec)
    yield "per channel" if store.is_per_channel else "per token"
    if store.parameters is not Parameters.HALF:
        yield store.parameters.value
    if (store.group_tokens or 1) > 1 or (store.group_channels or 1) > 1:
        yield "in groups"


def attention_scenarios() -> Iterator[AttentionScenario]:
    """All recipes that have kernels with all head sizes, and a few with what else there is."""
    for recipe in (*RECIPES, *ODD_RECIPES):
        for head_dim in HEAD_DIMS:
            scenario = AttentionScenario(recipe, head_dim)
            if why_unsupported(scenario.layout, KV_HEADS * scenario.group) is None:
                yield scenario
    for recipe in COMMON:
        yield AttentionScenario(recipe, 128, page_tokens=128)
        for group in (1, 8):
            yield AttentionScenario(recipe, 128, group=group)
        yield AttentionScenario(recipe, 128, is_observed=True)
        yield AttentionScenario(recipe, 128, is_invariant=True)
        yield AttentionScenario(recipe, 128, dtype="float16")


@dataclass(frozen=True)
class RowScenario:
    """A layer's row operations; Q, K and V side by side as its product gives them."""

    name: str
    width: int
    inner_width: int
    turn: Turn
    has_norm: bool = False
    has_balance: bool = False

    @property
    def features(self) -> set[Feature]:
        return set()

    def launches(self) -> list[Launch]:
        rows, turn, dtype = 2, self.turn, torch.bfloat16
        ops = TritonRowOps(dtype, 1e-5, torch.eye(turn.head_dim))
        cos, sin = (torch.zeros(rows, 1, turn.head_dim // 2) for _ in range(2))
        weight, hidden = torch.zeros(self.width), torch.zeros(rows, self.width)

        def heads(is_there: bool) -> Tensor | None:
            return torch.zeros(turn.num_turned, turn.head_dim) if is_there else None

        with recorded() as found:
            ops.normalise(hidden, weight)
            ops.add_normalise(hidden, hidden.to(dtype), weight)
            qkv = torch.zeros(rows, (turn.num_heads + 2 * turn.num_kv_heads) * turn.head_dim, dtype=dtype)
            ops.turn(turn, qkv, cos, sin, heads(self.has_norm), heads(self.has_balance))
            ops.gate(torch.zeros(rows, 2 * self.inner_width, dtype=dtype))
        return found


def row_scenarios() -> Iterator[RowScenario]:
    for name, width, inner_width, heads, kv_heads, head_dim in (
        ("llama-3-8b", 4096, 14336, 32, 8, 128),
        ("smollm2-135m", 576, 1536, 9, 3, 64),
        ("heads of 256", 2048, 8192, 8, 4, 256),
    ):
        sizes = heads, kv_heads, head_dim
        yield RowScenario(name, width, inner_width, Turn(*sizes, is_rotated=False, stores_before_rope=False))
        rotated = Turn(*sizes, is_rotated=True, stores_before_rope=False)
        yield RowScenario(f"{name} rotated", width, inner_width, rotated)
        yield RowScenario(f"{name} all", width, inner_width, rotated, has_norm=True, has_balance=True)
        kept = Turn(*sizes, is_rotated=True, stores_before_rope=True)
        yield RowScenario(f"{name} before rope", width, inner_width, kept, has_norm=True)
