"""Row operations in fp32. A row's bits do not depend on the rows beside it."""

from ctypes import byref

import torch
from torch import Tensor

from kernels.cpu.decode import heads_of
from kernels.cpu.library import KernelPath
from kernels.row_ops import Turn


class CompiledRowOps:
    """See `RowOps`. What goes into products stays fp32."""

    def __init__(self, path: KernelPath, dtype: torch.dtype, eps: float):
        self._path = path
        self._dtype = dtype
        self._eps = eps

    def normalise(self, hidden: Tensor, weight: Tensor) -> Tensor:
        hidden = hidden.contiguous()
        y = torch.empty(hidden.shape)
        self._path.normalise(hidden.data_ptr(), None, weight.data_ptr(), None, y.data_ptr(), *self._over(hidden))
        return y

    def add_normalise(self, hidden: Tensor, delta: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        hidden, delta = hidden.contiguous(), delta.float().contiguous()
        total, y = torch.empty(hidden.shape), torch.empty(hidden.shape)
        pointers = (tensor.data_ptr() for tensor in (hidden, delta, weight, total, y))
        self._path.normalise(*pointers, *self._over(hidden))
        return total, y

    def turn(
        self, turn: Turn, qkv: Tensor, cos: Tensor, sin: Tensor, qk_norm: Tensor | None, qk_balance: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        heads = heads_of(turn)
        qkv, cos, sin = qkv.float().contiguous(), cos.contiguous(), sin.contiguous()
        q = torch.empty(len(qkv), turn.num_heads, turn.head_dim)
        kv = torch.empty(len(qkv), 2 * turn.num_kv_heads, turn.head_dim)
        tensors = (qkv, cos, sin, qk_norm, qk_balance, q, kv)
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in tensors)
        self._path.turn(byref(heads), *pointers, len(qkv), self._eps, torch.get_num_threads())
        kv = kv.to(self._dtype)
        return q, kv[:, : turn.num_kv_heads], kv[:, turn.num_kv_heads :]

    def gate(self, gate_up: Tensor) -> Tensor:
        gate_up = gate_up.float().contiguous()
        y = torch.empty(len(gate_up), gate_up.shape[1] // 2)
        self._path.gate(gate_up.data_ptr(), y.data_ptr(), *y.shape, torch.get_num_threads())
        return y

    def _over(self, x: Tensor) -> tuple[int, int, float, int]:
        return *x.shape, self._eps, torch.get_num_threads()
