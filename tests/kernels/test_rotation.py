"""The Hadamard rotation, and that attention does not see it."""

import numpy as np
import pytest
import torch

from engine.model.weights import rotate_value_rows, unrotate_output_columns
from kernels.format.hadamard import hadamard

SIZES = {16: 16, 64: 64, 80: 16, 96: 32, 128: 128}  # head size: largest power of two that divides it


@pytest.mark.parametrize("size", SIZES)
def test_rotation_is_orthonormal_and_symmetric(size: int):
    matrix = np.array(hadamard(size))
    assert np.array_equal(matrix, matrix.T)
    assert np.abs(matrix @ matrix.T - np.eye(size)).max() < 1e-14


@pytest.mark.parametrize("size, block", SIZES.items())
def test_rotation_is_sylvesters_matrix_along_the_diagonal(size: int, block: int):
    sylvester = np.ones((1, 1))
    while len(sylvester) < block:
        sylvester = np.block([[sylvester, sylvester], [sylvester, -sylvester]])
    expected = np.kron(np.eye(size // block), sylvester) / np.sqrt(block)
    assert np.abs(np.array(hadamard(size)) - expected).max() < 1e-15


@pytest.mark.parametrize("head_dim", [16, 64, 80])
@pytest.mark.parametrize("kv_heads, group", [(1, 4), (3, 3)])
def test_rotated_weights_leave_the_attention_block_alone(head_dim: int, kv_heads: int, group: int):
    generator = torch.Generator().manual_seed(head_dim + kv_heads)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    tokens, hidden_size = 7, 48
    heads = kv_heads * group
    hidden = random(tokens, hidden_size)
    value_weight, value_bias = random(kv_heads * head_dim, hidden_size), random(kv_heads * head_dim)
    output_weight = random(hidden_size, heads * head_dim)
    attention = random(heads, tokens, tokens).softmax(-1).double()

    def block(weight: torch.Tensor, bias: torch.Tensor, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """V [tokens, kv_heads, D] and the block's output, in float64."""
        values = (hidden.double() @ weight.double().T + bias.double()).unflatten(1, (kv_heads, head_dim))
        mixed = torch.einsum("hqt,thd->qhd", attention, values.repeat_interleave(group, 1))
        return values, mixed.flatten(1) @ output.double().T

    rotation = torch.tensor(hadamard(head_dim))
    plain, expected = block(value_weight, value_bias, output_weight)
    turned, actual = block(
        rotate_value_rows(value_weight, rotation),
        rotate_value_rows(value_bias, rotation),
        unrotate_output_columns(output_weight, rotation),
    )
    # each rotated weight is a sum of at most D products rounded to fp32: a few 2^-24 of its size
    assert (turned - plain @ rotation.double()).abs().max() < 1e-6 * plain.abs().max()
    assert (turned - plain).abs().max() > 0.1 * plain.abs().max()  # it does turn
    assert (actual - expected).abs().max() < 1e-6 * expected.abs().max() + 1e-5
