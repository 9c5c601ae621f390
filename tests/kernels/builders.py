"""Layouts and filled pools for the kernel tests. Sealed pages are written by the oracle's encoder."""

import numpy as np
import torch
from torch import Tensor

from kernels.backend import PoolTensors
from kernels.format.codec import (
    Centred,
    Float8,
    Integer,
    Parameters,
    Raw,
    Store,
    Symmetric,
    Table,
    per_channel,
    per_token,
    raw,
)
from kernels.format.layout import NULL_PAGE, Field, PageLayout, PageRef, Pool
from kernels.format.named import RECIPES
from kernels.format.recipe import LargestValues, LayerRecipe, MarkedTokens, Recipe
from kernels.reference import PageReader, encode_page
from kernels.rope import Rotary

BYTE, UNIT = Parameters.BYTE, Parameters.UNIT
NUQ2 = Table.nearest((-0.875, -0.25, 0.3125, 0.9375))
NUQ3 = Table.nearest((-1.0, -0.5, -0.25, -0.0625, 0.125, 0.25, 0.5, 1.0), is_centred=True)
SHIFTED = Table((-0.75, 0.0, 0.125, 0.5), (-0.5, -0.125, 0.375))  # as Q-Norm leaves it: bounds are not the middles
# what no named recipe has, so that every field and every combination of rules is met
ODD_RECIPES = {
    "groups": LayerRecipe(per_channel(Integer(2), 32, BYTE), per_token(Integer(2), 16, BYTE), norm_k=True),
    "clipped": LayerRecipe(per_channel(Integer(3), 16, clip=0.75), per_token(Integer(3), 32, clip=0.9)),
    "centred": LayerRecipe(per_channel(Centred(2), 16, BYTE), per_token(Centred(4), 32), norm_k=True),
    "by token": LayerRecipe(per_token(Integer(4), 16), per_token(Integer(8), 16, BYTE)),
    "wrong axes": LayerRecipe(per_token(Centred(2), 32, BYTE), per_channel(Integer(4), 16)),
    "blocks": LayerRecipe(per_token(Symmetric(8), 32), per_token(Symmetric(4), 32)),
    "blocks of bytes": LayerRecipe(per_channel(Symmetric(8), 32, BYTE), per_token(Symmetric(8), 16, BYTE)),
    "tables": LayerRecipe(per_channel(NUQ2), per_token(NUQ3, 16, BYTE)),
    "shifted table": LayerRecipe(per_channel(SHIFTED, 16, BYTE), per_token(SHIFTED, 16)),
    "half raw": LayerRecipe(raw(), per_token(Integer(4))),
    "other half": LayerRecipe(per_channel(Integer(4)), raw(), norm_k=True),
    "unit": LayerRecipe(per_channel(Float8(4, 3), None, UNIT), per_token(Float8(5, 2), None, UNIT)),
    "fp8 bytes": LayerRecipe(per_channel(Float8(5, 2), 16, BYTE), per_token(Float8(4, 3), 16, BYTE)),
    "outliers": LayerRecipe(
        Store(Integer(3), 16, 1, num_outliers=2), Store(Integer(2), 1, 16, BYTE, num_outliers=3), norm_k=True
    ),
    "rows": LayerRecipe(per_channel(Integer(2)), per_token(Integer(2)), outliers=LargestValues(2)),
    "marked rows": LayerRecipe(
        per_channel(Centred(2), 16), Store(NUQ3, 1, None, BYTE, num_outliers=1), norm_k=True, outliers=MarkedTokens(3)
    ),
    "before rope": LayerRecipe(per_channel(Integer(4)), per_token(Integer(4)), before_rope=True),
    "before rope, rotated": LayerRecipe(
        per_channel(Integer(3), 32),
        per_token(Integer(4)),
        rotate_k=True,
        norm_k=True,
        before_rope=True,
        outliers=LargestValues(1),
    ),
    "raw before rope": LayerRecipe(Store(Raw(), None, None), raw(), before_rope=True),
}


def make_layout(
    recipe: str,
    *,
    num_layers: int = 30,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    page_tokens: int = 64,
    sink_pages: int = 1,
    dtype: str = "bfloat16",
) -> PageLayout:
    """The default shape is SmolLM2-135M's."""
    layer = ODD_RECIPES[recipe] if recipe in ODD_RECIPES else RECIPES[recipe](False)
    if recipe == "native":
        sink_pages = 0
    made = Recipe(recipe, (layer,) * num_layers, page_tokens, sink_pages)
    return PageLayout(made, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)


class Pools:
    """Both pools with NaN in all places but the null ones, and pages taken from them in random order."""

    def __init__(self, layout: PageLayout, *, num_pages: int, num_slots: int, seed: int = 0):
        self.layout = layout
        self.generator = torch.Generator().manual_seed(seed)
        self.tensors = PoolTensors.allocate(
            layout, num_pages=num_pages, num_slots=num_slots, device=torch.device("cpu")
        )
        self.tensors.sealed[NULL_PAGE + 1 :] = 0xFF  # NaN as fp16, bf16, fp32, e4m3 and e5m2
        self.tensors.open[NULL_PAGE + 1 :] = torch.nan
        self._free = {
            Pool.SEALED: (1 + torch.randperm(num_pages - 1, generator=self.generator)).tolist(),
            Pool.OPEN: (1 + torch.randperm(num_slots - 1, generator=self.generator)).tolist(),
        }

    @property
    def dtype(self) -> torch.dtype:
        return getattr(torch, self.layout.dtype)

    def take(self, pool: Pool) -> PageRef:
        return PageRef(pool, self._free[pool].pop())

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype)

    def random_keys(self, tokens: int) -> Tensor:
        """[tokens, layers, kv_heads, D] of multiples of 1/32, whose squares sum without rounding in any order, so
        that token norms are equal to the last bit."""
        shape = (tokens, len(self.layout.layers), self.layout.num_kv_heads, self.layout.head_dim)
        return (torch.randint(-127, 128, shape, generator=self.generator) / 32).to(self.dtype)

    def random_values(self, tokens: int) -> Tensor:
        return self.random(tokens, len(self.layout.layers), self.layout.num_kv_heads, self.layout.head_dim)

    def target(self, index: int, is_full: bool) -> PageRef:
        """Where page `index` of a sequence goes."""
        return self.take(Pool.SEALED if is_full and index >= self.layout.recipe.sink_pages else Pool.OPEN)

    def place(self, k: Tensor, v: Tensor) -> tuple[PageRef, ...]:
        """Writes a sequence's first tokens [tokens, layers, kv_heads, D] to pages; the last may be partial."""
        size, refs = self.layout.page_tokens, []
        if not len(k):
            return ()
        for index, (keys, values) in enumerate(zip(k.split(size), v.split(size), strict=True)):
            refs.append(self.target(index, len(keys) == size))
            self.write(refs[-1], keys, values)
        return tuple(refs)

    def write(self, ref: PageRef, k: Tensor, v: Tensor) -> None:
        """Puts up to P tokens at the start of a slot, or P tokens into a sealed page."""
        if ref.pool is Pool.OPEN:
            for kind, x in enumerate((k, v)):
                self.tensors.open[ref.id, :, kind, :, : len(x)] = x.permute(1, 2, 0, 3)
        else:
            write_record(self.layout, self.tensors.sealed[ref.id], k, v)

    def reader(self) -> PageReader:
        return PageReader(self.layout, self.tensors.sealed.numpy(), self.tensors.open.double().numpy(), turn)


def frequencies(head_dim: int) -> np.ndarray:
    """fp32 [D/2], radians a token."""
    return (100.0 ** -(np.arange(head_dim // 2) / (head_dim // 2))).astype(np.float32)


def rotary(head_dim: int, device: torch.device | None = None) -> Rotary:
    return Rotary(torch.from_numpy(frequencies(head_dim)).to(device or "cpu"))


def turn(k: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """RoPE of float64 [..., tokens, D] as turned complex numbers. Angles are fp32 products, as everywhere."""
    half = k.shape[-1] // 2
    angles = (positions[:, None].astype(np.float32) * frequencies(k.shape[-1])).astype(np.float64)
    turned = (k[..., :half] + 1j * k[..., half:]) * np.exp(1j * angles)
    return np.concatenate([turned.real, turned.imag], -1)


def write_record(layout: PageLayout, record: Tensor, k: Tensor, v: Tensor) -> None:
    """Writes the fields of a full page, tokens [P, layers, kv_heads, D], and leaves the padding between them alone."""
    encoded = torch.from_numpy(encode_page(layout, tile(k), tile(v)))
    for layer in layout.layers:
        for field in layer.fields:
            place = slice(field.offset, field.offset + field.num_bytes)
            record[place] = encoded[place]


def tile(x: Tensor) -> np.ndarray:
    """[P, layers, kv_heads, D] to the encoder's fp32 [layers, kv_heads, P, D]."""
    return x.permute(1, 2, 0, 3).float().contiguous().numpy()


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the last bit, NaN included."""
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def record_fields(layout: PageLayout, record: np.ndarray) -> dict[str, np.ndarray]:
    """The bytes of each field of a record by name, for messages that say which one differs."""
    fields = {}
    for layer, places in enumerate(layout.layers):
        for side, owner in (("", places), ("k.", places.k), ("v.", places.v)):
            for name in owner.__slots__:
                if isinstance(field := getattr(owner, name), Field):
                    key = f"layer {layer} {side}{name}"
                    fields[key] = record[field.offset : field.offset + field.num_bytes]
    return fields


def assert_same_record(layout: PageLayout, actual: np.ndarray, expected: np.ndarray) -> None:
    wanted = record_fields(layout, expected)
    wrong = {name: int((data != wanted[name]).sum()) for name, data in record_fields(layout, actual).items()}
    assert not any(wrong.values()), {name: count for name, count in wrong.items() if count}
    assert np.array_equal(actual, expected), "padding between the fields was written"


def stored_norms(layout: PageLayout, record: np.ndarray) -> np.ndarray:
    """fp16 [layers, P], as stored; for recipes that have them."""
    names = [name for name in record_fields(layout, record) if name.endswith("k_norm")]
    return np.stack([record_fields(layout, record)[name].view(np.float16) for name in names])
