"""The model against a plain float64 implementation, and RoPE frequencies against the published formulas."""

import math
from collections.abc import Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

import engine.runner
from engine.config import DefaultRope, DynamicRope, LinearRope, Llama3Rope, ModelConfig, Rope, YarnRope
from engine.model.rope import inverse_frequencies
from engine.sampler import sample
from tests.engine import plain_model
from tests.helpers import (
    TINY,
    TINY_QWEN2,
    TINY_QWEN3,
    RandomCheckpoint,
    greedy,
    norm_width,
    random_prompt,
    run,
    tiny_core,
)

LLAMA3 = Llama3Rope(theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=64)
YARN = YarnRope(
    theta=10000.0,
    factor=8.0,
    original_max_position=128,
    beta_fast=8.0,
    beta_slow=1.0,
    attention_factor=1.2,
    has_whole_bounds=False,
)
DYNAMIC = DynamicRope(theta=10000.0, factor=8.0, original_max_position=128)


def plain_frequencies(config: ModelConfig) -> list[float]:
    """In doubles, one channel pair at a time."""
    frequencies = []
    for pair in range(config.head_dim // 2):
        frequency = config.rope.theta ** (-2 * pair / config.head_dim)
        match config.rope:
            case LinearRope(factor=factor):
                frequency /= factor
            case Llama3Rope() as rope:
                # The rule of the Llama 3.1 model card, by how often the pair turns in the original context.
                turns = rope.original_max_position * frequency / (2 * math.pi)
                share = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
                share = min(1.0, max(0.0, share))
                frequency *= share + (1 - share) / rope.factor
            case YarnRope() as rope:
                # Section 3.2, but the ramp runs over the logarithm of the number of turns, which is linear in the pair.
                turns = rope.original_max_position * frequency / (2 * math.pi)
                share = math.log(turns / rope.beta_slow) / math.log(rope.beta_fast / rope.beta_slow)
                share = min(1.0, max(0.0, share))
                frequency *= share + (1 - share) / rope.factor
            case DynamicRope() as rope:
                # The lowest frequency turns as far in the longest context as interpolation would let it.
                stretch = rope.factor * config.max_position / rope.original_max_position - (rope.factor - 1)
                frequency *= stretch ** (-pair / (config.head_dim / 2 - 1))
        frequencies.append(frequency)
    return frequencies


class NormedCheckpoint(RandomCheckpoint):
    """Random weights of norms too, so that a norm left out shows."""

    def tensor(self, name: str) -> torch.Tensor:
        if not name.endswith("norm.weight"):
            return super().tensor(name)
        seed = sum(map(ord, name))
        return 1 + 0.3 * torch.randn(norm_width(self.config, name), generator=torch.Generator().manual_seed(seed))


def logits_of_steps(model: ModelConfig, tokens: Sequence[int], **options: object) -> list[torch.Tensor]:
    """fp32 logits of every sampled row while the engine is made to generate the rest of `tokens`, prompt first."""
    prompt, seen = tokens[: len(tokens) - GENERATED], []

    def forced(rows: torch.Tensor, params: object, positions: Sequence[int]) -> list[int]:
        seen.append(rows[0].clone())
        return [tokens[positions[0]]] if positions[0] < len(tokens) else sample(rows, params, positions)  # type: ignore[arg-type]

    with (
        patch("tests.helpers.RandomCheckpoint", NormedCheckpoint),
        patch.object(engine.runner, "sample", forced),
    ):
        (recorder,) = run(tiny_core(model, **options), [greedy("r", prompt, GENERATED + 1)])
    assert list(recorder.token_ids[:GENERATED]) == list(tokens[len(prompt) :])
    return seen


GENERATED = 40
MODELS = {
    "llama": TINY,
    "qwen2": TINY_QWEN2,
    "qwen3": TINY_QWEN3,
    "qwen3, bias": replace(TINY_QWEN3, qkv_bias=True, output_bias=True),
    "yarn rope": replace(TINY, rope=YARN),
    "dynamic rope": replace(TINY, rope=DYNAMIC),
    "linear rope": replace(TINY, rope=LinearRope(theta=10000.0, factor=4.0)),
    "llama3 rope": replace(TINY, rope=LLAMA3),
    "mlp bias": replace(TINY, mlp_bias=True, tie_embeddings=False),
    "attention bias": replace(TINY, qkv_bias=True, output_bias=True),
    "one kv head": replace(TINY, num_kv_heads=1, rms_norm_eps=1e-2),
    "head per kv head, wide": replace(TINY, num_heads=3, num_kv_heads=3, head_dim=32),
}


@pytest.mark.parametrize("batch_invariant", [False, True], ids=["plain", "invariant"])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_a_plain_implementation(name: str, batch_invariant: bool) -> None:
    """Prompt in three chunks, then decode over the edges of pages; native fp32."""
    model, tokens = MODELS[name], random_prompt(5, 150)
    seen = logits_of_steps(model, tokens, max_step_tokens=40, batch_invariant=batch_invariant)
    expected = plain_model.logits(model, NormedCheckpoint(model).tensor, plain_frequencies(model), tokens)
    ours = torch.stack(seen).double()
    theirs = expected[-len(seen) :]
    assert len(seen) == GENERATED + 1
    assert theirs.std() > 0.3  # there is something to be close to
    assert (ours - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize(
    ("recipe", "most"), [("int8", 0.02), ("int4", 0.35), ("kivi4", 0.35), ("fp8_e4m3", 0.15), ("fp8_e5m2", 0.3)]
)
def test_quantized_pages_change_logits_a_little(name: str, recipe: str, most: float) -> None:
    """`most`: root mean square of the difference to native, over the standard deviation of the logits. Random weights
    are harder than trained ones."""
    tokens = random_prompt(5, 150)
    exact = torch.stack(logits_of_steps(MODELS[name], tokens, max_step_tokens=40))
    stored = torch.stack(logits_of_steps(MODELS[name], tokens, max_step_tokens=40, kv_format=recipe))
    difference = float((stored - exact).pow(2).mean().sqrt() / exact.std())
    assert 1e-4 < difference < most


def test_llama3_frequencies_of_the_8b_model() -> None:
    """Llama 3.1 8B: theta 500000, D 128, factor 8, low 1, high 4, 8192 positions; pairs computed by hand."""
    rope = replace(LLAMA3, original_max_position=8192)
    ours = inverse_frequencies(rope, 128, 131072).double().tolist()
    # Wavelength 2 pi theta^(2i/128): below 8192/4 = 2048 kept, above 8192/1 divided by 8, blended between.
    # i = 28: 500000^-0.4375 = 3.211446e-3, wavelength 1956.5: kept.
    assert ours[0] == 1.0
    assert ours[28] == pytest.approx(3.211446e-3, rel=1e-5)
    # i = 32: 500000^-0.5 = 1.414214e-3, 8192 / wavelength = 1.843848, share 0.281283:
    # 1.414214e-3 * (0.281283 + 0.718717 / 8) = 5.248462e-4.
    assert ours[32] == pytest.approx(5.248462e-4, rel=1e-5)
    # i = 36: 500000^-0.5625 = 6.227724e-4, wavelength 10089.1: divided by 8.
    assert ours[36] == pytest.approx(7.784655e-5, rel=1e-5)
    assert ours[63] == pytest.approx(500000 ** (-126 / 128) / 8, rel=1e-5)


@pytest.mark.parametrize(
    "rope",
    [
        DefaultRope(theta=10000.0),
        LinearRope(theta=1e6, factor=2.5),
        LLAMA3,
        replace(LLAMA3, factor=32.0),
        YARN,
        replace(YARN, beta_slow=0.25, theta=1e6),
        DYNAMIC,
        replace(DYNAMIC, factor=2.0),
    ],
)
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_frequencies_are_those_of_the_formulas(rope: Rope, head_dim: int) -> None:
    ours = inverse_frequencies(rope, head_dim, TINY.max_position).double().tolist()
    assert ours == pytest.approx(plain_frequencies(replace(TINY, rope=rope, head_dim=head_dim)), rel=1e-5)


@pytest.mark.parametrize("length", [1, 127, 128])
def test_dynamic_rope_is_plain_within_the_original_context(length: int) -> None:
    plain = inverse_frequencies(DefaultRope(theta=DYNAMIC.theta), 64, length)
    assert torch.equal(inverse_frequencies(DYNAMIC, 64, length), plain)


def test_bounds_of_yarn_at_whole_pairs() -> None:
    """D 64, theta 10000, 4096 positions: pair 10.47 turns 32 times, pair 22.51 once, so the ramp is from 10 to 23."""
    rope = replace(YARN, original_max_position=4096, beta_fast=32.0, has_whole_bounds=True)
    shares = [
        (ours / 10000 ** (-pair / 32) - 1 / 8) / (1 - 1 / 8)
        for pair, ours in enumerate(inverse_frequencies(rope, 64, 1).double().tolist())
    ]
    assert shares == pytest.approx([min(1.0, max(0.0, (23 - pair) / 13)) for pair in range(32)], abs=1e-6)
