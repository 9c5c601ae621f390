"""A stored vector, and a page of it through the torch backend: what the tests of papers' arithmetic share."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from kernels.backend import PoolTensors
from kernels.format.codec import Store, raw
from kernels.format.layout import PageLayout, PageRef, Pool
from kernels.format.recipe import LayerRecipe, Recipe
from kernels.torch_backend.backend import TorchBackend
from kernels.torch_backend.pages import LayerPages, PageIndex

Array = NDArray[np.float32]
Method = Callable[[Array], NDArray[np.floating]]
"""What a method makes of the blocks of one head that share parameters, fp32 [blocks, numbers]."""

HEADS, P, D = 2, 64, 64


def numbers(*shape: int, seed: int = 0) -> Array:
    """Multiples of 1/1024 between -4.9 and 4.9, in an order without pattern."""
    place = np.arange(np.prod(shape), dtype=np.int64)
    return (((place * place * 31 + place * 7919 + seed * 1237) % 10007 - 5003) / 1024).astype(np.float32).reshape(shape)


def keys() -> Array:
    """[HEADS, P, D] with odd channels: constant, zero, huge, tiny, far from zero, and constant but for one number."""
    x = numbers(HEADS, P, D)
    x[..., 3], x[..., 4] = 1.7, 0
    x[..., 5] *= 1000
    x[..., 6] *= 2.0**-20
    x[..., 7] += 300
    x[..., 8], x[:, 11, 8] = -2.5, 9
    return x


def values() -> Array:
    """The same with tokens for channels."""
    return np.ascontiguousarray(keys().swapaxes(1, 2))


def half(x: Array) -> Array:
    return np.asarray(x).astype(np.float16).astype(np.float32)


def in_8_bits(x: Array) -> Array:
    """Scales in 8 bits: rounded to fp16, then to five significant bits, with a fixed step below 2^-14; ties go up."""
    step = np.exp2(np.floor(np.log2(np.maximum(half(x), 2.0**-14))) - 4)
    return np.maximum(np.floor(half(x) / step + 0.5) * step, 2.0**-18).astype(np.float32)


def ends(blocks: Array) -> tuple[Array, Array]:
    return blocks.min(1, keepdims=True), blocks.max(1, keepdims=True)


def in_blocks(x: Array, tokens: int, channels: int, method: Method) -> NDArray[np.floating]:
    """`method` for each head of x [heads, P, D], over blocks of `tokens` x `channels`."""
    grid = (x.shape[1] // tokens, tokens, x.shape[2] // channels, channels)
    heads = []
    for head in x:
        blocks = head.reshape(grid).swapaxes(1, 2)
        made = method(blocks.reshape(-1, tokens * channels)).reshape(blocks.shape)
        heads.append(made.swapaxes(1, 2).reshape(head.shape))
    return np.stack(heads)


def pool_for(layer: LayerRecipe, num_heads: int, num_pages: int = 1) -> PoolTensors:
    layout = PageLayout(Recipe("paper", (layer,), P, 0), num_kv_heads=num_heads, head_dim=D, dtype="float32")
    return PoolTensors.allocate(layout, num_pages=num_pages + 1, num_slots=2, device=torch.device("cpu"))


def read_page(pool: PoolTensors, page: int) -> tuple[Array, Array]:
    """K and V [heads, P, D]."""
    pages = PageIndex([PageRef(Pool.SEALED, page)], torch.device("cpu"))
    k, v = LayerPages(pool, 0).read_refs(pages, None)
    return k.numpy(), v.numpy()


def stored(layer: LayerRecipe, k: Array, v: Array) -> tuple[Array, Array]:
    """A page of K and V, each [heads, P, D], sealed and read back."""
    pool = pool_for(layer, len(k))
    pool.open[1, 0, 0], pool.open[1, 0, 1] = torch.from_numpy(k), torch.from_numpy(v)
    TorchBackend(pool).seal([1], [1])
    return read_page(pool, 1)


def stored_k(store: Store, x: Array) -> Array:
    return stored(LayerRecipe(store, raw()), x, np.zeros_like(x))[0]


def stored_v(store: Store, x: Array) -> Array:
    return stored(LayerRecipe(raw(), store), np.zeros_like(x), x)[1]


def assert_equal_but_for_rounding(actual: Array, expected: NDArray[np.floating], x: Array, axis: int) -> None:
    """`scale * code + zero` rounds at most twice in fp32, relative to the largest of x along `axis`."""
    assert (np.abs(actual - expected) <= np.abs(x).max(axis, keepdims=True) * 2.0**-22).all()
