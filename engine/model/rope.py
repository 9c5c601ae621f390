"""The frequencies of rotary position embedding, as checkpoints describe them."""

import math

import torch
from torch import Tensor

from engine.config import DefaultRope, DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope
from kernels.rope import Rotary


def make_rotary(rope: Rope, head_dim: int, max_model_len: int, device: torch.device) -> Rotary:
    scale = rope.attention_factor if isinstance(rope, YarnRope) else 1.0
    return Rotary(inverse_frequencies(rope, head_dim, max_model_len).to(device), scale)


def inverse_frequencies(rope: Rope, head_dim: int, max_model_len: int) -> Tensor:
    """fp32 [D/2], radians a token. RoFormer (arXiv 2104.09864); linear: arXiv 2306.15595; llama3: Llama 3.1; yarn:
    arXiv 2309.00071; dynamic: NTK-aware scaling, appendix A.1 there, for contexts of `max_model_len` tokens."""
    match rope:
        case DefaultRope(theta=theta):
            return _plain(theta, head_dim)
        case LinearRope(theta=theta, factor=factor):
            return _plain(theta, head_dim) / factor
        case Llama3Rope():
            return _llama3(rope, _plain(rope.theta, head_dim))
        case YarnRope():
            return _yarn(rope, _plain(rope.theta, head_dim))
        case DynamicRope(theta=theta, factor=factor, original_max_position=original):
            stretch = factor * max(max_model_len, original) / original - (factor - 1)
            return _plain(theta * stretch ** (head_dim / (head_dim - 2)), head_dim)


def _plain(theta: float, head_dim: int) -> Tensor:
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    return 1.0 / (theta**steps)


def _llama3(rope: Llama3Rope, plain: Tensor) -> Tensor:
    wavelength = 2 * math.pi / plain
    longest = rope.original_max_position / rope.low_freq_factor
    shortest = rope.original_max_position / rope.high_freq_factor
    blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    smooth = (1 - blend) * plain / rope.factor + blend * plain
    scaled = torch.where(wavelength > longest, plain / rope.factor, smooth)
    return torch.where(wavelength < shortest, plain, scaled)


def _yarn(rope: YarnRope, plain: Tensor) -> Tensor:
    def pair_turning(times: float) -> float:
        """The index, not a whole one, of the pair that turns so many times in the original context."""
        return len(plain) * math.log(rope.original_max_position / (2 * math.pi * times)) / math.log(rope.theta)

    first, last = pair_turning(rope.beta_fast), pair_turning(rope.beta_slow)
    if rope.has_whole_bounds:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * len(plain) - 1)
    width = last - first if last != first else 0.001
    divided = ((torch.arange(len(plain), dtype=torch.float32) - first) / width).clamp(0, 1)
    return plain / rope.factor * divided + plain * (1 - divided)
