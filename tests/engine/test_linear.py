"""Packed projections give what PyTorch's own product gives."""

import pytest
import torch
import torch.nn.functional as F

from engine.model.linear import WIDE_ROWS, PackedProjection, PlainProjection, choose_projection

needs_bf16 = pytest.mark.skipif(
    choose_projection(torch.device("cpu"), torch.bfloat16, is_invariant=False) is PlainProjection,
    reason="this CPU does not take packed bf16 weights",
)


@needs_bf16
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("rows", [1, 7, WIDE_ROWS - 1, WIDE_ROWS, WIDE_ROWS + 5])
def test_packed_equals_the_product_in_fp64(rows: int, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(rows)
    weight, x = (torch.randn(shape, generator=generator).bfloat16() for shape in ((96, 80), (rows, 80)))
    bias = torch.randn(96, generator=generator).bfloat16() if has_bias else None
    actual = PackedProjection(weight, bias)(x).double()
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    magnitude = F.linear(x.double().abs(), weight.double().abs())
    # the sum is fp32 (80 terms, each rounding once), the result at worst bf16, its bias added before or after
    assert ((actual - exact).abs() <= magnitude * 80 * 2.0**-24 + exact.abs() * 2.0**-8 + 2.0**-8).all()


def test_where_rows_must_not_change_results_the_product_is_plain() -> None:
    cpu = torch.device("cpu")
    assert choose_projection(cpu, torch.bfloat16, is_invariant=True) is PlainProjection
    assert choose_projection(cpu, torch.float32, is_invariant=False) is PlainProjection
