"""Rotary position embedding, half-split: the channels i and i + D/2 turn together (RoFormer, arXiv 2104.09864)."""

import torch
from torch import Tensor


class Rotary:
    """cos and sin of positions, computed where they are needed: a table would bound how far a sequence may grow.

    `frequencies`: fp32 [D/2], radians a token. `scale`: factor on cos and sin (yarn's attention factor).
    """

    def __init__(self, frequencies: Tensor, scale: float = 1.0):
        self._frequencies = frequencies
        self._scale = scale

    def at(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 cos and sin [rows, 1, D/2] of int64 `positions` [rows]."""
        angles = torch.outer(positions.float(), self._frequencies).unsqueeze(1)
        if self._scale == 1.0:
            return angles.cos(), angles.sin()
        return angles.cos() * self._scale, angles.sin() * self._scale


def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Apply RoPE to [..., heads, D]; the result is fp32."""
    first, second = x.float().chunk(2, dim=-1)
    turned = torch.empty(x.shape, dtype=torch.float32, device=x.device)
    left, right = turned.chunk(2, dim=-1)
    torch.mul(first, cos, out=left).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=right).addcmul_(first, sin)
    return turned
