"""Row operations in PyTorch, on any device."""

import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.rope import turn as apply_rope
from kernels.row_ops import Turn


class TorchRowOps:
    def __init__(self, dtype: torch.dtype, eps: float, rotation: Tensor):
        self._dtype = dtype
        self._eps = eps
        self._rotation = rotation

    def normalise(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return self._norm(hidden, weight).to(self._dtype)

    def add_normalise(self, hidden: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = hidden + delta
        return total, self.normalise(total, weight)

    def turn(
        self, turn: Turn, qkv: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, qk_balance: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = qkv.view(len(qkv), turn.num_projected, turn.head_dim)
        qk, v = heads[:, : turn.num_turned], heads[:, turn.num_turned :]
        if qk_norm is not None:
            qk = self._norm(qk.float(), qk_norm)
        if not turn.stores_before_rope:
            qk = apply_rope(qk, cos, sin)
            if qk_balance is not None:
                qk = qk.mul_(qk_balance)
            if turn.is_rotated:
                qk = torch.matmul(qk, self._rotation)
        q, k = qk[:, : turn.num_heads], qk[:, turn.num_heads :]
        if turn.stores_before_rope:
            q = apply_rope(q, cos, sin)
            if turn.is_rotated:
                k = torch.matmul(k.float(), self._rotation)
        return q, k.to(self._dtype), v.to(self._dtype)

    def gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return (F.silu(gate) * up).to(self._dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """fp32 RMSNorm over the last axis."""
        # on a CPU F.rms_norm takes six times as long for 1024 rows
        length: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
        scale = length.square_().div_(x.shape[-1]).add_(self._eps).rsqrt_()
        return (x * scale).mul_(weight)
