"""How row-wise parts of the model run: over all rows of a step at once, or in tiles of one fixed size.

A matrix product's last bits depend on how many rows it has (other block sizes, another order of sums), so a row that
must not depend on its company always runs in a product of the same shape.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

RowFunction = Callable[..., tuple[Tensor, ...]]


class Rows(Protocol):
    def padded(self, num_rows: int) -> int:
        """How many rows a step of `num_rows` must have."""

    def apply(self, function: RowFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        """`function` of tensors [rows, ...], which gives tensors [rows, ...] and treats each row alone."""


@dataclass(frozen=True, slots=True)
class AllRows:
    """One call for all rows."""

    def padded(self, num_rows: int) -> int:
        return num_rows

    def apply(self, function: RowFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        return function(*inputs)


@dataclass(frozen=True, slots=True)
class TiledRows:
    """One call for every `size` rows; the step is padded to a multiple of it."""

    size: int

    def padded(self, num_rows: int) -> int:
        return -(-num_rows // self.size) * self.size

    def apply(self, function: RowFunction, *inputs: Tensor) -> tuple[Tensor, ...]:
        tiles = zip(*(torch.split(tensor, self.size) for tensor in inputs), strict=True)
        return tuple(torch.cat(parts) for parts in zip(*(function(*tile) for tile in tiles), strict=True))
