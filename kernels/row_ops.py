"""What a model does to each row of a step beside its products and attention: norms, RoPE and rotation, the gate."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True)
class Turn:
    """What becomes of a layer's heads between their product and attention. `is_rotated`: by the Hadamard matrix, K and,
    but where K is stored before RoPE, Q as well."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    is_rotated: bool
    stores_before_rope: bool

    @property
    def is_q_rotated(self) -> bool:
        return self.is_rotated and not self.stores_before_rope

    @property
    def num_turned(self) -> int:
        """Heads of Q and K."""
        return self.num_heads + self.num_kv_heads

    @property
    def num_projected(self) -> int:
        """Heads of Q, K and V."""
        return self.num_turned + self.num_kv_heads


class RowOps(Protocol):
    """Inputs are fp32 or in the model's dtype, and so are results that go into a product. Sums and products are fp32,
    but for the gate, whose silu may be rounded to the inputs' dtype before the product. Each row's result depends on
    that row alone.

    Nothing that is handed in changes, and results may be views of it.
    """

    def normalise(self, hidden: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm (arXiv 1910.07467) of fp32 [rows, width] with fp32 `weight` [width]."""

    def add_normalise(self, hidden: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 `hidden + delta` [rows, width], and the RMSNorm of it."""

    def turn(
        self, turn: Turn, qkv: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, qk_balance: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q fp32 [rows, heads, D], k and v [rows, kv_heads, D] in the model's dtype.

        `qkv`: [rows, (heads + 2 kv_heads) D]. `qk_norm`, `qk_balance`: fp32 [heads + kv_heads, D].
        In this order: RMSNorm of each head of Q and K with `qk_norm`, RoPE with `cos` and `sin` (fp32 [rows, 1, D/2]),
        factors `qk_balance`, rotation. Where K is stored before RoPE it gets no RoPE, and factors are out of place.
        """

    def gate(self, gate_up: Tensor) -> Tensor:
        """SwiGLU (arXiv 2002.05202): silu(gate) * up, [rows, n], of gate beside up [rows, 2n]."""


MakeRowOps = Callable[[torch.dtype, float, Tensor], RowOps]
"""From the model's dtype, the eps of its norms, and `hadamard(D)` as fp32 [D, D] on the model's device."""
