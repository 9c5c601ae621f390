"""What the tests of several kernels need around them."""

from collections.abc import Iterator

import pytest
import torch

from tests.kernels.triton.row_checks import Guard


@pytest.fixture
def threads() -> Iterator[None]:
    """The test may change PyTorch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def guard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Guard]:
    """Nothing is left out of, or written beside, what `torch.empty` gives."""
    guard = Guard()
    monkeypatch.setattr(torch, "empty", guard.empty)
    yield guard
    guard.check()
