"""Compiled products with weights against float64, and what a row's bits must not depend on."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels.cpu.build import paths
from kernels.cpu.linear import CompiledProjection
from tests.kernels.builders import same_bits
from tests.kernels.compiled import kernel_path

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
in_every_path = pytest.mark.parametrize("path", list(paths()))


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def projection(path: str, num_outputs: int, num_inputs: int, dtype: torch.dtype, *, has_bias: bool = False):
    weight = draw(1, num_outputs, num_inputs).to(dtype)
    bias = draw(2, num_outputs).to(dtype) if has_bias else None
    return CompiledProjection(kernel_path(path), weight, bias), weight, bias


@in_every_path
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_outputs, num_inputs", [(96, 80), (33, 17), (1, 1), (130, 64)])
def test_it_is_the_product(num_outputs: int, num_inputs: int, has_bias: bool, dtype: torch.dtype, path: str) -> None:
    product, weight, bias = projection(path, num_outputs, num_inputs, dtype, has_bias=has_bias)
    for num_rows in (0, 1, 5, 13, 100):
        x = draw(3, num_rows, num_inputs)
        found = product(x)
        exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
        terms = F.linear(x.double().abs(), weight.double().abs(), None if bias is None else bias.double().abs())
        assert found.dtype == torch.float32 and found.shape == exact.shape
        # each of the products, sums and the bias rounds once
        assert ((found.double() - exact).abs() <= terms * (num_inputs + 2) * 2.0**-24).all()


@in_every_path
def test_neither_threads_nor_company_change_a_bit(path: str, threads: None) -> None:
    product, _, _ = projection(path, 200, 96, torch.bfloat16, has_bias=True)
    x = draw(4, 230, 96)
    whole = []
    for num_threads in (1, 2, 3):
        torch.set_num_threads(num_threads)
        whole.append(product(x))
    assert same_bits(whole[0], whole[1]) and same_bits(whole[0], whole[2])
    for first in (0, 1, 97, 229):
        for num_rows in range(1, 15):
            rows = slice(first, first + num_rows)
            assert same_bits(product(x[rows]), whole[0][rows])


@in_every_path
def test_nan_stays_in_its_row(path: str) -> None:
    product, _, _ = projection(path, 40, 24, torch.bfloat16)
    x = draw(5, 9, 24)
    x[4] = torch.nan
    found = product(x)
    assert found[4].isnan().all() and found[[0, 1, 2, 3, 5, 6, 7, 8]].isfinite().all()


@in_every_path
def test_rows_that_are_views_are_read_right(path: str) -> None:
    product, _, _ = projection(path, 40, 24, torch.bfloat16)
    wide = draw(6, 7, 48)
    assert same_bits(product(wide[:, 8:32]), product(wide[:, 8:32].contiguous()))
