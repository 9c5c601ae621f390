"""Layouts and filled pools for the kernel tests. Sealed pages are written by the oracle's encoder."""

import numpy as np
import torch
from torch import Tensor

from kernels.backend import PoolTensors
from kernels.format.layout import NULL_PAGE, PageLayout, PageRef, Pool
from kernels.format.recipe import named_recipe
from kernels.reference import PageReader, encode_page


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
    named = named_recipe(
        recipe, num_layers=num_layers, has_k_bias=False, page_tokens=page_tokens, sink_pages=sink_pages
    )
    return PageLayout(named, num_kv_heads=num_kv_heads, head_dim=head_dim, dtype=dtype)


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
            record = encode_page(self.layout, tile(k), tile(v))
            self.tensors.sealed[ref.id] = torch.from_numpy(record)

    def reader(self) -> PageReader:
        return PageReader(self.layout, self.tensors.sealed.numpy(), self.tensors.open.double().numpy())


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
        for name in places.__slots__:
            if (field := getattr(places, name)) is not None:
                fields[f"layer {layer} {name}"] = record[field.offset : field.offset + field.num_bytes]
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
