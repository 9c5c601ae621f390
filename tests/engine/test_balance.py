"""Balance of Q and K: the factors by hand, and that a model, and what is stored of it, does not depend on how Q and K
share their sizes out."""

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.model.balance import balance
from engine.model.llama import Llama
from kernels.format.codec import raw
from kernels.format.recipe import LayerRecipe
from tests.engine import plain_model
from tests.engine.recipes import INT4, recipe
from tests.helpers import (
    TINY,
    TINY_QWEN3,
    RandomCheckpoint,
    greedy,
    pool_of,
    random_prompt,
    run,
    tiny_core,
    tiny_engine,
)

P = 64
D = TINY.head_dim
BALANCED = LayerRecipe(raw(), raw(), rotate_k=True, balance_k=True)


def alternating(*powers: int, tokens: int = 3 * P) -> Tensor:
    """[tokens, 1, channels] of 2^power, the sign of every second token changed: its mean square is its variance."""
    signs = torch.tensor([1.0, -1.0]).repeat(tokens // 2)
    return signs[:, None, None] * torch.tensor([2.0**power for power in powers])


def test_factors_by_hand() -> None:
    """K times sqrt(size of Q / size of K)."""
    q, k = alternating(2, 0, -2, 0), alternating(0, 0, 0, 2)
    assert torch.equal(balance(q, k), torch.tensor([[2, 1, 0.5, 0.5]]))
    k[:P, :, 1] *= 1e6  # the first page is not stored
    k += torch.tensor([0.0, 7.0, -100.0, 3.0])  # nor does a page store with codes what all its tokens have
    assert torch.allclose(balance(q, k), torch.tensor([[2, 1, 0.5, 0.5]]))


def test_factors_of_a_group() -> None:
    """Mean squares over the queries that share a kv head, variances in each page, means over pages."""
    q = torch.cat([alternating(1, 0), alternating(3, 1), alternating(0, 0), alternating(0, 2)], 1)
    k = torch.cat([alternating(0, 0), alternating(0, 3)], 1)
    k[2 * P :] *= 3  # variances of the two pages: 1 and 9 times
    wanted = [[(4 + 64) / 2, (1 + 4) / 2], [1, (1 + 16) / 2]]
    varied = [[5, 5], [5, 5 * 64]]
    for factors, squares, variances in zip(balance(q, k), wanted, varied, strict=True):
        for factor, square, variance in zip(factors, squares, variances, strict=True):
            assert math.log2(factor) == pytest.approx(math.log2(square / variance) / 4, abs=1 / 16)


def test_factors_are_the_best_there_are() -> None:
    """The error of logits of rotated K goes with sum(Q² / f²) · sum(var K · f²). By Cauchy and Schwarz that is at least
    sum(|Q| · deviation of K)²; rounding factors to an eighth of a power of two adds at most 2^(1/4)."""
    generator = torch.Generator().manual_seed(0)

    def uneven(heads: int) -> Tensor:
        sizes = torch.exp2(torch.randn(heads, 32, generator=generator) * 2)
        return torch.randn(3 * P, heads, 32, generator=generator) * sizes

    q, k = uneven(2), uneven(2)
    squares = q.square().mean(0)
    variances = k[P:].unflatten(0, (2, P)).var(1, correction=0).mean(0)
    factors = balance(q, k).square()
    product = (squares / factors).sum(-1) * (variances * factors).sum(-1)
    least = (squares * variances).sqrt().sum(-1).square()
    assert (product <= least * 2**0.25).all()
    assert (squares.sum(-1) * variances.sum(-1) > least * 2).all()  # what there is without factors


def test_dead_channels() -> None:
    """Of Q, of K, of both: factors stay within their bounds, and the others as they are among themselves."""
    q, k = alternating(*[0] * 29, 1, 1, 1), alternating(*[0] * 31, 1)
    q[..., [3, 5]], k[..., [4, 5]] = 0, 0
    (factors,) = balance(q, k)
    assert torch.isfinite(factors).all() and factors.max() <= 64 and factors.min() >= 1 / 64
    assert factors[3] == 1 / 64 and factors[4] == 64
    assert float(factors[29] / factors[0]) == pytest.approx(2**0.5) and factors[31] == factors[0]


class Rescaled(RandomCheckpoint):
    """In each head, pairs of channels of K that RoPE turns together are smaller and those of Q as much larger, by
    powers of two: the same model."""

    POWERS = torch.tensor([1, -1, 2, -2, 0, 0, 1, -1])

    def tensor(self, name: str) -> Tensor:
        x = super().tensor(name)
        if not name.endswith(("q_proj.weight", "k_proj.weight")):
            return x
        powers = self.POWERS if "q_proj" in name else -self.POWERS
        return (x.view(-1, D, x.shape[1]) * torch.exp2(powers).repeat(2)[:, None]).flatten(0, 1)


def test_pages_do_not_depend_on_how_q_and_k_share_their_sizes_out() -> None:
    chosen = recipe(replace(INT4, balance_k=True))
    request = greedy("r", random_prompt(1, 100), 40)
    tokens, pages = [], []
    for checkpoint in (RandomCheckpoint(TINY), Rescaled(TINY)):
        core = tiny_engine(TINY, chosen, checkpoint=checkpoint).core
        (recorder,) = run(core, [request])
        tokens.append(recorder.token_ids)
        pages.append(pool_of(core).sealed)
    assert tokens[0] == tokens[1] and torch.equal(*pages) and pages[0].any()
    # without balance they do
    core = tiny_engine(TINY, recipe(INT4), checkpoint=Rescaled(TINY)).core
    run(core, [request])
    assert not torch.equal(pool_of(core).sealed, pages[0])


@pytest.mark.parametrize("config", [TINY, TINY_QWEN3], ids=lambda config: config.architecture)
def test_logits_are_those_of_the_model(config: ModelConfig) -> None:
    tokens = random_prompt(2, 100)
    expected = plain_model.logits(config, RandomCheckpoint(config).tensor, frequencies(config), tokens)
    model = tiny_engine(config, recipe(BALANCED, sink_pages=0)).core.runner.model

    def attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        queries, keys, values = (x.transpose(0, 1)[None] for x in (q, k, v))
        mixed = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True)
        return mixed[0].transpose(0, 1)

    with torch.inference_mode():
        logits = model.logits(model.forward(torch.tensor(tokens), torch.arange(len(tokens)), attention))
    assert (logits - expected).abs().max() < 1e-4 * expected.abs().max()


def frequencies(config: ModelConfig) -> list[float]:
    return [10000.0 ** (-2 * pair / config.head_dim) for pair in range(config.head_dim // 2)]


def test_every_load_finds_the_same_factors(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    apply = Llama.balance

    def noted(model: Llama, factors: dict[int, Tensor]) -> None:
        found.append(factors)
        apply(model, factors)

    monkeypatch.setattr(Llama, "balance", noted)
    torch.manual_seed(1)
    tiny_core(TINY, recipe(BALANCED, sink_pages=0))
    torch.manual_seed(2)
    tiny_core(TINY, recipe(replace(INT4, balance_k=True)))  # whatever pages hold
    tiny_core(TINY, recipe(INT4, replace(INT4, balance_k=True)))
    first, second, of_one_layer = found
    assert first.keys() == second.keys() == {0, 1} and of_one_layer.keys() == {1}
    assert all(torch.equal(first[layer], second[layer]) for layer in (0, 1))
    assert torch.equal(of_one_layer[1], first[1])
    assert first[0].shape == (2, D) and not torch.equal(first[0], torch.ones(2, D))
