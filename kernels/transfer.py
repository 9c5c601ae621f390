"""From the host to a device."""

from typing import Any

import torch
from torch import Tensor


def to_device(values: list[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of (nested) numbers. On CUDA what the device does now is not waited for."""
    tensor = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return tensor.to(device, non_blocking=True)
