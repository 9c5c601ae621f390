"""Products with weights in fp32, weights in the model's dtype."""

from ctypes import byref

import torch
from torch import Tensor

from kernels.backend import dtype_name
from kernels.cpu.library import KernelPath
from kernels.cpu.structs import RAW_CODES, Linear


class CompiledProjection:
    """See `Projection`. The result is fp32, and a row's bits do not depend on the rows beside it.

    Weights lie in blocks of outputs, so that each is read once, in order, whatever the number of rows.
    """

    weight = None

    def __init__(self, path: KernelPath, weight: Tensor, bias: Tensor | None):
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)
        self._path = path
        num_outputs, num_inputs = weight.shape
        self._weights = in_blocks(weight, path.linear_block)
        self._bias = None if bias is None else bias.float()
        self.struct = Linear(
            self._weights.data_ptr(),
            None if self._bias is None else self._bias.data_ptr(),
            num_inputs,
            num_outputs,
            RAW_CODES[dtype_name(weight.dtype)],
        )

    def __call__(self, x: Tensor) -> Tensor:
        x = x.float().contiguous()
        y = torch.empty(len(x), self.struct.num_outputs)
        self._path.linear(byref(self.struct), x.data_ptr(), y.data_ptr(), len(x), torch.get_num_threads())
        return y


def in_blocks(weight: Tensor, size: int) -> Tensor:
    """[blocks, in, size] of a weight [out, in], with zeros in place of outputs that are missing."""
    num_outputs, num_inputs = weight.shape
    num_whole = num_outputs // size
    blocks = weight.new_zeros(-(-num_outputs // size), num_inputs, size)
    blocks[:num_whole] = weight[: num_whole * size].view(num_whole, size, num_inputs).transpose(1, 2)
    if rest := num_outputs % size:
        blocks[num_whole, :, :rest] = weight[-rest:].T
    return blocks
