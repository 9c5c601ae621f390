"""K and V of a window as a page record gives them back, with the codecs that serve."""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.study.forms import Form, Geometry
from kernels.backend import PoolTensors
from kernels.format.codec import Table
from kernels.format.hadamard import hadamard
from kernels.format.layout import PageRef, Pool
from kernels.format.recipe import LayerRecipe
from kernels.rope import Rotary, turn
from kernels.torch_backend.codec import Blocks, quantize, read_scale, read_zero
from kernels.torch_backend.pages import LayerPages, PageIndex, Turns

PROBE = Table.nearest(tuple(float(code) for code in range(256)))  # any table has the same scales


class WindowPages:
    """K before RoPE and V, fp32 [T, kv_heads, D], of a window of whole pages. `factors` [kv_heads, D]: of balance."""

    def __init__(self, k: Tensor, v: Tensor, page_tokens: int, rotary: Rotary, factors: Tensor):
        self._k, self._v = k, v
        self._factors = factors
        self._rotary = rotary
        self._geometry = Geometry(k.shape[1], k.shape[2], page_tokens)
        self._num_pages = len(k) // page_tokens
        self._rotation = torch.tensor(hadamard(k.shape[2]), device=k.device)
        self._cos, self._sin = rotary.at(torch.arange(len(k), device=k.device))

    def turned(self, x: Tensor) -> Tensor:
        """RoPE of [T, heads, D]."""
        return turn(x, self._cos, self._sin)

    def read_back(self, layer: LayerRecipe) -> tuple[Tensor, Tensor]:
        """K after RoPE and V, fp32 [T, kv_heads, D], not rotated, out of pages that `layer` describes."""
        pool = PoolTensors.allocate(
            self._geometry.layout(layer), num_pages=self._num_pages + 1, num_slots=1, device=self._k.device
        )
        pages = LayerPages(pool, 0)
        numbers = torch.arange(1, self._num_pages + 1, device=self._k.device)
        marks = torch.zeros(self._num_pages, self._geometry.page_tokens, dtype=torch.bool, device=self._k.device)
        v = self._v @ self._rotation if layer.rotate_v else self._v
        pages.seal(self._tiles(self._stored_k(layer)), self._tiles(v), numbers, marks)
        refs = PageIndex([PageRef(Pool.SEALED, number) for number in numbers.tolist()], self._k.device)
        turns = Turns.up_to(self._num_pages, self._geometry.page_tokens, self._rotary, self._k.device)
        k, v = (x.transpose(0, 1) for x in pages.read_refs(refs, turns))
        if layer.rotate_k and not layer.before_rope:
            k = torch.matmul(k, self._rotation)
        if layer.balance_k:
            k = k / self._factors
        return k, torch.matmul(v, self._rotation) if layer.rotate_v else v

    def normalised(self, form: Form, grad: Tensor, pages: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The numbers of `pages` that a `Table` of this form sees, on [-1, 1], and their weights: Fisher information
        times the square of what one unit stands for. `grad`: of the loss, of K before RoPE or of V."""
        layer = form.layer(PROBE)
        fields = self._geometry.layout(layer).layers[0]
        if form.is_key:
            x, g = self._stored_k(layer), grad if form.before_rope else self.turned(grad)
            g = g / self._factors if form.is_balanced else g
            g = g @ self._rotation if form.is_rotated else g
            norm = x.flatten(1).norm(dim=1)[:, None, None].expand_as(x) if form.is_rotated else torch.ones_like(x)
        else:
            x, g = (value @ self._rotation if form.is_rotated else value for value in (self._v, grad))
            norm = torch.ones_like(x)
        tiles, weights, norms = (self._tiles(value)[list(pages)] for value in (x, g.square(), norm))
        tiles = tiles / norms
        store = fields.k if form.is_key else fields.v
        quantized, blocks = quantize(tiles, store), Blocks.of(store)
        assert quantized.scale is not None
        scale = Blocks.spread(read_scale(quantized.scale, quantized.factor))
        zero = read_zero(PROBE, quantized.scale, quantized.zero, quantized.factor)
        assert zero is not None
        numbers = (blocks.split(tiles) - Blocks.spread(zero)) / scale
        unit = scale * blocks.split(norms)
        return numbers, blocks.split(weights) * unit.square()

    def _stored_k(self, layer: LayerRecipe) -> Tensor:
        k = self._k if layer.before_rope else self.turned(self._k)
        k = k * self._factors if layer.balance_k else k
        return k.matmul(self._rotation) if layer.rotate_k else k

    def _tiles(self, x: Tensor) -> Tensor:
        """[T, kv_heads, D] as contiguous [pages, kv_heads, P, D]."""
        tiles: Tensor = x.unflatten(0, (self._num_pages, -1))
        return tiles.transpose(1, 2).contiguous()
