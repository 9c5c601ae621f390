"""The arithmetic of papers, each in a few lines written from its formulas, against pages of the torch backend."""

import itertools

import numpy as np
import pytest
import torch

from kernels.format.codec import Integer, Parameters, Store, Table, per_channel, per_token, raw
from kernels.format.hadamard import hadamard
from kernels.format.layout import PageRef, Pool
from kernels.format.recipe import LargestValues, LayerRecipe
from kernels.format.step import AttentionStep, DecodeRow, PrefillChunk
from kernels.torch_backend.backend import TorchBackend
from tests.kernels.papers import (
    HEADS,
    Array,
    D,
    P,
    assert_equal_but_for_rounding,
    ends,
    half,
    in_8_bits,
    in_blocks,
    keys,
    numbers,
    pool_for,
    read_page,
    stored,
    stored_k,
    stored_v,
    values,
)

SMALLEST_SCALE = np.float32(2.0**-14)  # ours: papers divide by zero where a block is constant


def kivi(blocks: Array, bits: int) -> Array:
    """arXiv 2402.02750: minimum and step in fp16, nearest code after both are rounded."""
    low, high = ends(blocks)
    scale = np.maximum(half((high - low) / np.float32(2**bits - 1)), SMALLEST_SCALE)
    codes = np.clip(np.rint((blocks - half(low)) / scale), 0, 2**bits - 1)
    return codes * scale + half(low)


@pytest.mark.parametrize("bits", [8, 4, 3, 2])
@pytest.mark.parametrize("group", [32, None])
def test_kivi(bits: int, group: int | None):
    k, v = keys(), values()
    actual_k, actual_v = stored(LayerRecipe(per_channel(Integer(bits), group), per_token(Integer(bits), group)), k, v)
    expected_k = in_blocks(k, group or P, 1, lambda x: kivi(x, bits))
    expected_v = in_blocks(v, 1, group or D, lambda x: kivi(x, bits))
    assert_equal_but_for_rounding(actual_k, expected_k, k, 1)
    assert_equal_but_for_rounding(actual_v, expected_v, v, 2)
    assert (actual_k[..., 4] == 0).all() and (actual_k[..., 3] == np.float16(1.7)).all()


@pytest.mark.parametrize("length", [1, 31, 32, 33, P - 1, P, P + 1, 2 * P, 2 * P + 32])
def test_kivis_tail_stays_exact(length: int):
    """K of the last T mod R tokens, none where R divides T; of V as many, where KIVI keeps the last R."""
    k, v = numbers(length, HEADS, D), numbers(length, HEADS, D, seed=1)
    pool = pool_for(LayerRecipe(per_channel(Integer(2), 32), per_token(Integer(2), 32)), HEADS, num_pages=2)
    pool.open.fill_(torch.nan)
    full, tail = divmod(length, P)
    targets = [PageRef(Pool.SEALED, page + 1) for page in range(full)] + [PageRef(Pool.OPEN, 1)] * (tail > 0)
    backend = TorchBackend(pool)
    tables = backend.prepare(AttentionStep((), (PrefillChunk(0, length, (), tuple(targets)),)))
    backend.append(0, torch.from_numpy(k), torch.from_numpy(v), tables)
    for page in range(full):
        page_k, page_v = (x[page * P : (page + 1) * P].swapaxes(0, 1) for x in (k, v))
        actual_k, actual_v = read_page(pool, page + 1)
        assert_equal_but_for_rounding(actual_k, in_blocks(page_k, 32, 1, lambda x: kivi(x, 2)), page_k, 1)
        assert_equal_but_for_rounding(actual_v, in_blocks(page_v, 1, 32, lambda x: kivi(x, 2)), page_v, 2)
    for side, x in enumerate((k, v)):
        kept = pool.open[1, 0, side].transpose(0, 1).numpy()
        assert np.array_equal(kept[:tail], x[full * P :]) and np.isnan(kept[tail:]).all()


SIGNPOSTS = np.array([-1, -0.625, -0.375, -0.125, 0.0625, 0.25, 0.5, 0.9375], np.float32)


def nuq(blocks: Array, signposts: Array, read_as: Array) -> Array:
    """arXiv 2401.18079: the range to [-1, 1], the nearest signpost; Q-Norm reads it as another number."""
    low, high = ends(blocks)
    zero = half((low + high) / 2)
    scale = np.maximum(half((high - low) / 2), SMALLEST_SCALE)
    places = np.abs(((blocks - zero) / scale)[..., None] - signposts).argmin(-1)
    return read_as[places] * scale + zero


@pytest.mark.parametrize("shift", [(1, 0), (0.875, 0.03125)], ids=["plain", "Q-Norm"])
def test_kvquants_codebooks(shift: tuple[float, float]):
    read_as = SIGNPOSTS * np.float32(shift[0]) + np.float32(shift[1])
    middles = tuple(float(a + b) / 2 for a, b in itertools.pairwise(SIGNPOSTS))
    codec = Table(tuple(map(float, read_as)), middles)
    k, v = keys(), values()
    actual_k, actual_v = stored(LayerRecipe(per_channel(codec), per_token(codec, 32)), k, v)
    assert_equal_but_for_rounding(actual_k, in_blocks(k, P, 1, lambda x: nuq(x, SIGNPOSTS, read_as)), k, 1)
    assert_equal_but_for_rounding(actual_v, in_blocks(v, 1, 32, lambda x: nuq(x, SIGNPOSTS, read_as)), v, 2)
    if shift == (1, 0):
        plain = Table.nearest(tuple(map(float, SIGNPOSTS)))
        assert np.array_equal(stored_k(per_channel(plain), k), actual_k)


def dense_and_sparse(blocks: Array, num_low: int, num_high: int) -> Array:
    """KVQuant's: the lowest and highest of each block stay as they are, and the range is that of the others."""
    order = blocks.argsort(1)
    sparse = np.concatenate([order[:, :num_low], order[:, blocks.shape[1] - num_high :]], 1)
    dense = np.take_along_axis(blocks, order[:, num_low : blocks.shape[1] - num_high], 1)
    made = np.empty_like(blocks)
    for row, (block, inside) in enumerate(zip(blocks, dense, strict=True)):
        clamped = np.append(np.clip(block, inside.min(), inside.max()), inside)[None]
        made[row] = nuq(clamped, SIGNPOSTS, SIGNPOSTS)[0, : block.size]
    np.put_along_axis(made, sparse, half(np.take_along_axis(blocks, sparse, 1)), 1)
    return made


def test_kvquants_outliers():
    """Ours are the farthest from the middle, whichever side, and as many for each token: the same numbers where each
    token has one on either side (V), or one in a channel of its own (K)."""
    codec = Table.nearest(tuple(map(float, SIGNPOSTS)))
    v, k, token = numbers(1, P, D), numbers(1, P, D, seed=2), np.arange(P)
    v[0, token, token * 7 % D], v[0, token, (token * 7 + 3) % D] = 50 + token, -90 - token
    k[0, token, token * 7 % D] = 200
    actual_v = stored_v(Store(codec, 1, None, num_outliers=2), v)
    assert_equal_but_for_rounding(actual_v, in_blocks(v, 1, D, lambda x: dense_and_sparse(x, 1, 1)), v, 2)
    actual_k = stored_k(Store(codec, None, 1, num_outliers=1), k)
    assert_equal_but_for_rounding(actual_k, in_blocks(k, P, 1, lambda x: dense_and_sparse(x, 0, 1)), k, 1)
    assert (actual_k[0, token, token * 7 % D] == 200).all()


def skvq(blocks: Array, bits: int, alpha: float) -> Array:
    """arXiv 2405.06219: a range smaller by `alpha`, scale and zero in 8 bits. Ours: the range keeps its middle, the
    scale has no sign and a bit more than e4m3, and the zero counts 32nds of the range, which reach a far one."""
    low, high = ends(blocks)
    codes = np.float32(2**bits - 1)
    scale = (high - low) / codes * np.float32(alpha)
    low = low + (high - low) * np.float32((1 - alpha) / 2)
    scale = np.maximum(scale, np.abs(low) / (120 * codes / 32))
    factor = np.maximum(half(scale.max() / np.float32(1.9375)), SMALLEST_SCALE)
    scale = in_8_bits(np.minimum(scale / factor, np.float32(1.9375))) * factor
    zero = np.clip(np.rint(low / (scale * (codes / 32))), -128, 127) * (scale * (codes / 32))
    return np.clip(np.rint((blocks - zero) / scale), 0, codes) * scale + zero


@pytest.mark.parametrize("bits, alpha", [(4, 1), (3, 1), (2, 1), (3, 0.9375), (2, 0.875)])
def test_skvq(bits: int, alpha: float):
    k, v = keys(), values()
    actual = stored_k(per_channel(Integer(bits), 32, Parameters.BYTE, alpha), k)
    assert_equal_but_for_rounding(actual, in_blocks(k, 32, 1, lambda x: skvq(x, bits, alpha)), k, 1)
    actual = stored_v(per_token(Integer(bits), 16, Parameters.BYTE, alpha), v)
    assert_equal_but_for_rounding(actual, in_blocks(v, 1, 16, lambda x: skvq(x, bits, alpha)), v, 2)


def test_clipping_is_skvqs_only_where_the_range_is_about_zero():
    """SKVQ multiplies both ends by alpha. Of a range that does not contain zero that leaves out numbers at one end
    and adds a gap at the other, so ours clips about the middle."""
    alpha = 0.5
    x = np.repeat(np.linspace(-6, 6, P, dtype=np.float32)[None, :, None], D, 2)
    x[..., 1] += 12  # from 6 to 18: clipped to 9 to 15, by SKVQ to 3 to 9
    actual = stored_k(per_channel(Integer(4), None, Parameters.HALF, alpha), x)
    assert actual[0, :, 0].min() == alpha * -6 and actual[0, :, 0].max() == pytest.approx(alpha * 6, rel=2**-10)
    assert actual[0, :, 1].min() == 9 and actual[0, :, 1].max() == pytest.approx(15, rel=2**-10)


@pytest.mark.parametrize("codec", [Integer(4), Integer(3), Integer(2), Table.nearest((-1.0, -0.5, 0.0, 1.0))], ids=str)
def test_a_zero_in_8_bits_reaches_far(codec: Integer | Table):
    """Channels whose mean is far larger than their range, of either sign: constant ones, zero, and others."""
    x = numbers(1, P, D)
    means = np.array([(-1) ** place * 0.2 * 1.2**place for place in range(D // 2)])
    x[..., : D // 2] = means
    x[..., D // 2 :] = x[..., D // 2 :] / 64 + means
    x[..., 3] = 0
    actual = stored_k(per_channel(codec, 32, Parameters.BYTE), x)
    assert (np.abs(actual - x) <= np.abs(x) / 120)[..., : D // 2].all() and (actual[..., 3] == 0).all()
    blocks = x.reshape(1, 2, 32, D)
    # a range that its zero, at most 120 32nds of it, can reach
    spans = np.maximum(blocks.max(2) - blocks.min(2), np.abs(blocks).max(2) * 32 / 120).repeat(32, 1)
    gap = 1 / codec.max_code if isinstance(codec, Integer) else 0.5  # the widest between two values, of the range
    # of the range, too: a 64th by which the zero is off, a 32nd by which it may have become smaller
    assert (np.abs(actual - x) <= spans * (gap / 2 + 1 / 64 + 1 / 32)).all()


def test_oscar():
    """arXiv 2605.19660: K rotated, divided by the norm of the token over all heads, stored as KIVI's, and the logit
    multiplied by the norm. Attention of a rotated query to the page, and to its own token in 16 bit."""
    rotation = np.ones((1, 1), np.float32)
    while len(rotation) < D:
        rotation = np.kron(np.array([[1, 1], [1, -1]], np.float32), rotation)
    rotation /= np.float32(np.sqrt(D))
    assert np.allclose(rotation, hadamard(D), atol=1e-7)
    k, v, own = keys() @ rotation, values(), numbers(2, HEADS, D, seed=5)
    k *= (2.0 ** (np.arange(P) % 7 - 3)).astype(np.float32)[None, :, None]  # uneven norms
    norm = half(np.sqrt(np.square(k).sum((0, 2))))[None, :, None]
    expected_k = in_blocks(k / norm, 32, 1, lambda x: kivi(x, 2)).astype(float) * norm
    expected_v = in_blocks(v, 1, 32, lambda x: kivi(x, 2)).astype(float)
    layer = LayerRecipe(per_channel(Integer(2), 32), per_token(Integer(2), 32), rotate_k=True, norm_k=True)
    actual_k, actual_v = stored(layer, k, v)
    assert_equal_but_for_rounding(actual_k / norm, expected_k / norm, expected_k / norm, 1)
    assert_equal_but_for_rounding(actual_v, expected_v, v, 2)

    pool = pool_for(layer, HEADS)
    pool.open[1, 0, 0], pool.open[1, 0, 1] = torch.from_numpy(k), torch.from_numpy(v)
    backend = TorchBackend(pool)
    backend.seal([1], [1])
    tables = backend.prepare(AttentionStep((DecodeRow(P, (PageRef(Pool.SEALED, 1), PageRef(Pool.OPEN, 1))),), ()))
    q = numbers(1, HEADS, D, seed=7) @ rotation / 64
    own_k, own_v = (torch.from_numpy(x[None]) for x in own)
    backend.append(0, own_k, own_v, tables)
    actual = backend.attend(0, torch.from_numpy(q), own_k, own_v, tables)[0]
    for head in range(HEADS):
        all_k, all_v = (np.vstack([x[head], y[head]]) for x, y in ((expected_k, own[0]), (expected_v, own[1])))
        logits = all_k @ q[0, head] / np.sqrt(D)
        weights = np.exp(logits - logits.max())
        assert np.abs(actual[head].numpy() - weights @ all_v / weights.sum()).max() < 1e-5 * np.abs(all_v).max()


def test_tokens_of_largest_values():
    """Their rows of K and V are kept, and ranges of K are those of the others."""
    k, v = keys(), values()
    places = np.argsort(-np.square(v.astype(float)).sum((0, 2)))[:3]
    k[:, places] *= 40
    others = np.setdiff1d(np.arange(P), places)
    expected_k = k.astype(float)
    for head in range(HEADS):
        expected_k[head, others] = kivi(k[head, others].T, 4).T
    layer = LayerRecipe(per_channel(Integer(4)), raw(), outliers=LargestValues(3))
    actual_k, actual_v = stored(layer, k, v)
    assert_equal_but_for_rounding(actual_k, expected_k, k, 1)
    assert np.array_equal(actual_k[:, places], k[:, places]) and np.array_equal(actual_v, v)
