"""The frequencies of rotary position embedding, as checkpoints describe them."""

import math

import torch
from torch import Tensor

from engine.config import DefaultRope, LinearRope, Llama3Rope, Rope
from kernels.rope import Rotary


def inverse_frequencies(rope: Rope, head_dim: int) -> Tensor:
    """fp32 [D/2], radians a token. RoFormer (arXiv 2104.09864); linear: arXiv 2306.15595; llama3: Llama 3.1."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / (rope.theta**steps)
    match rope:
        case DefaultRope():
            return plain
        case LinearRope(factor=factor):
            return plain / factor
        case Llama3Rope():
            wavelength = 2 * math.pi / plain
            longest = rope.original_max_position / rope.low_freq_factor
            shortest = rope.original_max_position / rope.high_freq_factor
            blend = (rope.original_max_position / wavelength - rope.low_freq_factor) / (
                rope.high_freq_factor - rope.low_freq_factor
            )
            smooth = (1 - blend) * plain / rope.factor + blend * plain
            scaled = torch.where(wavelength > longest, plain / rope.factor, smooth)
            return torch.where(wavelength < shortest, plain, scaled)


def make_rotary(rope: Rope, head_dim: int, device: torch.device) -> Rotary:
    return Rotary(inverse_frequencies(rope, head_dim).to(device))
