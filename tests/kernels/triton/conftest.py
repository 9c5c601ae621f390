"""Triton's interpreter keeps bfloat16 as 16-bit integers and multiplies those; the product of two tiles is made right
here. Conversions from and to it are right."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@pytest.fixture(scope="package", autouse=True)
def bfloat16_products() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return

    original = InterpreterBuilder.create_dot

    def widened(x: TensorHandle) -> TensorHandle:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def create_dot(self, a, b, *rest):
        return original(self, widened(a), widened(b), *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        yield
