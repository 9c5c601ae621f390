"""Planes by their definition: byte j of a row of length L holds the elements j, j + L/n, …, the first lowest."""

import numpy as np
import pytest
import torch

from kernels import reference
from kernels.torch_backend.packing import pack, unpack


def rows(length: int, bits: int, num: int = 3) -> torch.Tensor:
    generator = torch.Generator().manual_seed(length * 8 + bits)
    return torch.randint(0, 2**bits, (num, length), dtype=torch.uint8, generator=generator)


def test_two_planes_of_a_row_worked_out_by_hand():
    codes = torch.tensor([1, 2, 3, 4, 5, 6, 7, 8], dtype=torch.uint8)
    assert pack(codes, 4).tolist() == [0x51, 0x62, 0x73, 0x84]
    assert reference.pack_row(codes.numpy(), 4).tolist() == [0x51, 0x62, 0x73, 0x84]


def test_four_planes_of_a_row_worked_out_by_hand():
    codes = torch.tensor([0, 1, 2, 3, 3, 0, 1, 2], dtype=torch.uint8)  # elements 0, 2, 4, 6 and 1, 3, 5, 7
    assert pack(codes, 2).tolist() == [0b01_11_10_00, 0b10_00_11_01]
    assert reference.pack_row(codes.numpy(), 2).tolist() == [0b01_11_10_00, 0b10_00_11_01]


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [16, 80, 128])
def test_each_element_lies_in_its_plane(bits: int, length: int):
    codes = rows(length, bits)
    packed = pack(codes, bits)
    planes = 8 // bits
    assert packed.shape == (3, length // planes) and packed.dtype == torch.uint8
    for row, line in zip(codes.tolist(), packed.tolist(), strict=True):
        for byte, value in enumerate(line):
            elements = [row[byte + plane * length // planes] for plane in range(planes)]
            assert value == sum(element * 2 ** (bits * plane) for plane, element in enumerate(elements))


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
@pytest.mark.parametrize("length", [16, 80, 128])
def test_round_trip_and_agreement_with_the_oracle(bits: int, length: int):
    codes = rows(length, bits)
    packed = pack(codes, bits)
    assert torch.equal(unpack(packed, bits), codes)
    assert np.array_equal(reference.pack_row(codes.numpy(), bits), packed.numpy())
    assert np.array_equal(reference.unpack_row(packed.numpy(), bits), codes.numpy())


def test_packing_does_not_write_to_its_input():
    codes = rows(64, 4)
    before = codes.clone()
    pack(codes, 4)
    assert torch.equal(codes, before)
