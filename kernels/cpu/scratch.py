"""Memory of threads that lasts from call to call."""

import torch
from torch import Tensor


class Scratch:
    """Zeros at first."""

    def __init__(self, num_bytes: int):
        """`num_bytes`: of each thread."""
        self.num_bytes = num_bytes
        self._memory = torch.zeros(0, dtype=torch.uint8)

    def memory(self) -> Tensor:
        """For as many threads as there are now."""
        wanted = torch.get_num_threads() * self.num_bytes
        if len(self._memory) < wanted:
            self._memory = torch.zeros(wanted, dtype=torch.uint8)
        return self._memory
