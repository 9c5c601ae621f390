"""Rotary position embedding, half-split (the channels i and i + D/2 turn together)."""

import math

import torch
from torch import Tensor

from engine.config import DefaultRope, LinearRope, Llama3Rope, Rope


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


class Rotary:
    """cos and sin of positions, computed where they are needed: a table would bound how far a sequence may grow."""

    def __init__(self, rope: Rope, head_dim: int, device: torch.device):
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 cos and sin [rows, 1, D/2] of int64 `positions` [rows]."""
        angles = torch.outer(positions.float(), self._frequencies).unsqueeze(1)
        return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to [rows, heads, D]; the result is fp32."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    left, right = turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right).addcmul_(first, sin)
    return turned
