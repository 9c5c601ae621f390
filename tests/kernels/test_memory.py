"""Slots and records as memory: copied whole, and reached as bytes."""

import pytest
import torch

from kernels.format.layout import PageRef, Pool
from kernels.torch_backend.backend import TorchBackend
from kernels.torch_backend.invariant import InvariantTorchBackend
from tests.kernels.builders import Pools, make_layout, same_bits


@pytest.mark.parametrize("backend_type", [TorchBackend, InvariantTorchBackend])
@pytest.mark.parametrize("sources, targets", [([3], [1]), ([2, 2, 5], [6, 1, 3]), ([], [])])
def test_copies_whole_slots_and_nothing_else(sources: list[int], targets: list[int], backend_type: type[TorchBackend]):
    pools = Pools(make_layout("int4", num_layers=3), num_pages=3, num_slots=7)
    pools.tensors.open[1:4] = pools.random(3, *pools.layout.slot_shape)  # the others are NaN
    sealed, expected = pools.tensors.sealed.clone(), pools.tensors.open.clone()
    for source, target in zip(sources, targets, strict=True):
        expected[target] = expected[source]
    backend_type(pools.tensors).copy(sources, targets)
    assert same_bits(pools.tensors.open, expected)
    assert same_bits(pools.tensors.sealed, sealed)


@pytest.mark.parametrize("recipe", ["native", "int4"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_record_is_the_memory_of_one_page(recipe: str, dtype: str):
    layout = make_layout(recipe, num_layers=2, dtype=dtype)
    tensors = Pools(layout, num_pages=4, num_slots=4).tensors
    for pool, memory, num_bytes in (
        (Pool.SEALED, tensors.sealed, layout.page_bytes),
        (Pool.OPEN, tensors.open, layout.slot_bytes),
    ):
        before = memory.clone()
        record = tensors.record(PageRef(pool, 2))
        assert record.dtype == torch.uint8 and record.shape == (num_bytes,)
        record[:] = torch.arange(num_bytes) % 7
        assert same_bits(memory[2].view(torch.uint8).flatten(), record)
        others = [0, 1, 3]
        assert same_bits(memory[others], before[others])
