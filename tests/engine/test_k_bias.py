"""Why K is not rotated where it has a bias, and what balance does about it: attention over the pages of the backend
against attention in float64, and logits against 16-bit pages, of tiny models some of whose K channels are huge."""

import math
from dataclasses import dataclass, replace
from functools import cache

import pytest
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.engine import Engine
from kernels.format.layout import PageRef, Pool
from kernels.format.named import RECIPES
from kernels.format.recipe import LayerRecipe, Recipe
from kernels.format.step import AttentionStep, PrefillChunk
from tests.helpers import TINY_QWEN2, TINY_QWEN3, RandomCheckpoint, random_prompt, tiny_engine

D, P = 64, 64
TOKENS = random_prompt(3, 5 * P + 10)
WIDE = {"head_dim": D, "num_heads": 4, "num_kv_heads": 2}
QWEN2, QWEN3 = replace(TINY_QWEN2, **WIDE), replace(TINY_QWEN3, **WIDE)  # type: ignore[arg-type]
VALUE_CHANNEL = 5


class HugeChannels(RandomCheckpoint):
    """`pairs` of channels of K (i and i + D/2, which RoPE turns by position) are `size` times as large as others, by a
    bias or by the weight of the norm. As in models that have such pairs, Q is small there, or their logits would leave
    no room for others. One channel of V is four times as large."""

    def __init__(self, config: ModelConfig, pairs: tuple[int, ...], size: float):
        super().__init__(config)
        self._channels = [channel for pair in pairs for channel in (pair, pair + D // 2)]
        self._size = size

    def tensor(self, name: str) -> Tensor:
        x = super().tensor(name)
        if "self_attn" not in name or "o_proj" in name:
            return x
        by_head = x.view(-1, D, *x.shape[1:])
        if name.endswith(("k_proj.bias", "k_norm.weight")):
            by_head[:, self._channels] = self._size
        elif name.endswith("q_norm.weight") or ("q_proj" in name and not self.config.qk_norm):
            by_head[:, self._channels] *= 0.1
        elif "v_proj" in name:
            by_head[:, VALUE_CHANNEL] *= 4
        return x


@dataclass(frozen=True)
class Outcome:
    """`attention`: of each layer, relative error of its outputs for what it was given. `logits` fp32."""

    attention: tuple[float, ...]
    logits: Tensor


def exact_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """float64 [tokens, heads, D]."""
    rows = []
    future = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    for head in range(q.shape[1]):
        queries, keys, values = q[:, head].double(), *(x[:, head * k.shape[1] // q.shape[1]].double() for x in (k, v))
        rows.append((queries @ keys.T / math.sqrt(D)).masked_fill(future, -math.inf).softmax(-1) @ values)
    return torch.stack(rows, 1)


@torch.inference_mode()
def forward(engine: Engine) -> Outcome:
    """All tokens as one chunk: the first page in a slot, the others sealed before they are read, the last one open."""
    backend, model = engine.core.runner.backend, engine.core.runner.model
    num_slots, num_pages = backend.pool.layout.recipe.sink_pages, len(TOKENS) // P
    targets = [PageRef(Pool.OPEN if page < num_slots else Pool.SEALED, page + 1) for page in range(num_pages)]
    chunk = PrefillChunk(0, len(TOKENS), (), (*targets, PageRef(Pool.OPEN, num_slots + 1)))
    tables = backend.prepare(AttentionStep((), (chunk,)))
    errors = []

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        backend.append(layer, k, v, tables)
        out, exact = backend.attend(layer, q, k, v, tables), exact_attention(q, k, v)
        errors.append(float((out - exact).norm() / exact.norm()))
        return out

    hidden = model.forward(torch.tensor(TOKENS), torch.arange(len(TOKENS)), attention)
    return Outcome(tuple(errors), model.logits(hidden))


@cache
def errors(config: ModelConfig, pairs: tuple[int, ...], size: float, layer: LayerRecipe) -> tuple[float, ...]:
    """Relative errors: of the attention of each layer, then of the logits."""
    checkpoint = HugeChannels(config, pairs, size)
    outcome, native = (
        forward(tiny_engine(config, Recipe("test", (chosen,) * 2, P, sink_pages), checkpoint=checkpoint))
        for chosen, sink_pages in ((layer, 1), (RECIPES["native"](True), 0))
    )
    assert max(native.attention) < 1e-5
    return *outcome.attention, float((outcome.logits - native.logits).norm() / native.logits.norm())


def is_no_worse(mine: tuple[float, ...], others: tuple[float, ...]) -> bool:
    return all(a <= b for a, b in zip(mine, others, strict=True))


def is_much_better(mine: tuple[float, ...], others: tuple[float, ...]) -> bool:
    """Of logits less can be asked: their error does not grow much beyond 1."""
    (*attention, logits), (*other_attention, other_logits) = mine, others
    return all(1.5 * a < b for a, b in zip(attention, other_attention, strict=True)) and 1.2 * logits < other_logits


# pairs that turn once in 6 tokens, in 112, and in 47000: the last is constant within a page, and zeros take it
@pytest.mark.parametrize("pairs", [(0,), (10,), (31,), (0, 31)], ids=str)
@pytest.mark.parametrize("name, kivi", [("int4", "kivi4"), ("int2", "kivi2")])
def test_with_a_bias_on_k_the_recipe_is_no_worse_than_plain_axes(name: str, kivi: str, pairs: tuple[int, ...]) -> None:
    plain = errors(QWEN2, pairs, 100.0, RECIPES[kivi](True))
    assert is_no_worse(errors(QWEN2, pairs, 100.0, RECIPES[name](True)), plain)


@pytest.mark.parametrize("pairs", [(0,), (10,), (0, 31)], ids=str)
@pytest.mark.parametrize("name, kivi", [("int4", "kivi4"), ("int2", "kivi2")])
def test_rotation_spreads_a_bias_that_turns(name: str, kivi: str, pairs: tuple[int, ...]) -> None:
    """The reason for the rule: the recipe for such a model, and the same with K rotated."""
    forced = replace(RECIPES[name](True), rotate_k=True, norm_k=True)
    plain, rotated = (errors(QWEN2, pairs, 100.0, layer) for layer in (RECIPES[kivi](True), forced))
    assert is_much_better(plain, rotated)
    assert is_much_better(errors(QWEN2, pairs, 100.0, RECIPES[name](True)), rotated)


@pytest.mark.parametrize("pairs", [(0,), (10,), (0, 31)], ids=str)
@pytest.mark.parametrize("name, kivi", [("int4", "kivi4"), ("int2", "kivi2")])
def test_balance_makes_good_for_it(name: str, kivi: str, pairs: tuple[int, ...]) -> None:
    plain = errors(QWEN2, pairs, 100.0, RECIPES[kivi](True))
    assert is_no_worse(errors(QWEN2, pairs, 100.0, RECIPES[name](False)), plain)


@pytest.mark.parametrize("pairs", [(0,), (2, 12, 25)], ids=str)
@pytest.mark.parametrize("name, kivi", [("int4", "kivi4"), ("int2", "kivi2")])
def test_large_channels_by_a_norm_of_k(name: str, kivi: str, pairs: tuple[int, ...]) -> None:
    """There is no bias to tell by, so K is rotated: only balance helps."""
    assert not QWEN3.has_k_bias
    chosen = RECIPES[name](False)
    plain, balanced, rotated = (
        errors(QWEN3, pairs, 30.0, layer) for layer in (RECIPES[kivi](False), chosen, replace(chosen, balance_k=False))
    )
    assert is_no_worse(balanced, plain) and is_much_better(plain, rotated)
