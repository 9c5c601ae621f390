"""The decode rows of a step as arrays for the compiled kernels. Built once, used by every layer."""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kernels.cpu.structs import Rows
from kernels.format.layout import PageRef, Pool
from kernels.format.step import DecodeRow

SPLIT_PAGES = 8  # that one thread attends to in one go, at most MOST_PAGES of src/pages.h


def page_entries(refs: Iterable[PageRef]) -> NDArray[np.int64]:
    """See `Rows.entries` in src/abi.h."""
    return np.array([ref.id if ref.pool is Pool.SEALED else -1 - ref.id for ref in refs], np.int64)


class DecodePages:
    """See `Rows` in src/abi.h. `parts` and `shares` fp32: memory that layers use in turn (`Buffers`). `observed` int64:
    the entries of observed rows, in order."""

    def __init__(self, rows: Sequence[DecodeRow], page_tokens: int, num_heads: int, head_dim: int):
        self.num_rows = len(rows)
        counts = np.array([len(row.pages) for row in rows])
        splits = -(-counts // SPLIT_PAGES)
        refs = chain.from_iterable(row.pages for row in rows)
        self._entries = page_entries(refs)
        self._first_entry, self._first_split = (
            np.concatenate(([0], np.cumsum(sizes))).astype(np.int32) for sizes in (counts, splits)
        )
        self._own_tokens = np.array([row.position % page_tokens + 1 for row in rows], np.int32)
        self._split_row = np.repeat(np.arange(len(rows), dtype=np.int32), splits)
        is_observed = np.array([row.is_observed for row in rows])
        self.observed = torch.from_numpy(np.flatnonzero(np.repeat(is_observed, counts)))
        self.parts = torch.empty(len(self._split_row), num_heads, head_dim + 2)
        self.shares = torch.empty(len(self._entries) if len(self.observed) else 0, num_heads, 2)
        self.struct = Rows(
            *(
                array.ctypes.data
                for array in (
                    self._entries,
                    self._first_entry,
                    self._own_tokens,
                    self._first_split,
                    self._split_row,
                )
            ),
            num_rows=len(rows),
            num_splits=len(self._split_row),
            split_pages=SPLIT_PAGES,
            is_observed=len(self.observed) > 0,
        )

    def observed_shares(self) -> Tensor:
        """fp32 [pages, heads] that the last layer gave to the pages of observed rows."""
        return self.shares[self.observed, :, 0]
