"""Sealed pages and slots as tensors: quantize into records, read back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backend import PoolTensors, torch_dtype
from kernels.format.layout import Field, LayerFields, PageRef, Pool
from kernels.format.recipe import Codec, LayerRecipe, Raw
from kernels.torch_backend.codec import SMALLEST_NORMAL, code_bits, dequantize, quantize
from kernels.torch_backend.packing import pack, unpack


class LayerPages:
    """One layer of both pools. Tiles are [N, kv_heads, P, D]."""

    def __init__(self, pool: PoolTensors, layer: int):
        self._pool = pool
        self.recipe: LayerRecipe = pool.layout.recipe.layers[layer]
        fields: LayerFields = pool.layout.layers[layer]
        self._k_codes, self._v_codes = self._view(fields.k_codes), self._view(fields.v_codes)
        self._k_scale, self._v_scale = self._optional(fields.k_scale), self._optional(fields.v_scale)
        self._k_zero, self._v_zero = self._optional(fields.k_zero), self._optional(fields.v_zero)
        self._k_norm = self._optional(fields.k_norm)
        self.open_k, self.open_v = pool.open[:, layer, 0], pool.open[:, layer, 1]
        self._heads = torch.arange(pool.layout.num_kv_heads, device=pool.open.device).unsqueeze(-1)

    def _view(self, field: Field) -> Tensor:
        """[num_pages, *field.shape], a view of the records."""
        raw = self._pool.sealed[:, field.offset : field.offset + field.num_bytes]
        return raw.view(torch_dtype(field.dtype)).view(-1, *field.shape)

    def _optional(self, field: Field | None) -> Tensor | None:
        return None if field is None else self._view(field)

    def seal(self, k: Tensor, v: Tensor, pages: Tensor) -> None:
        """Quantize contiguous tiles of the model's dtype into `pages` [N]."""
        if self.recipe.is_raw:
            self._k_codes[pages], self._v_codes[pages] = k, v
            return
        keys = k.float()
        if self._k_norm is not None:
            # one norm a token over all heads; rows of one length and layout, so that sums do not depend on N
            rows = keys.transpose(1, 2).flatten(2)
            norm = rows.square().sum(-1).sqrt().clamp(SMALLEST_NORMAL, 65504.0).half()
            self._k_norm[pages] = norm
            keys = keys / norm.float()[:, None, :, None]
        self._store(keys, self.recipe.k, -2, self._k_codes, self._k_scale, self._k_zero, pages)
        self._store(v.float(), self.recipe.v, -1, self._v_codes, self._v_scale, self._v_zero, pages)

    @staticmethod
    def _store(
        x: Tensor, codec: Codec, dim: int, codes: Tensor, scale: Tensor | None, zero: Tensor | None, pages: Tensor
    ) -> None:
        assert not isinstance(codec, Raw) and scale is not None
        quantized = quantize(x, codec, dim)
        rows = quantized.codes if dim == -2 else quantized.codes.transpose(-1, -2).contiguous()
        codes[pages] = pack(rows, code_bits(codec))
        scale[pages] = quantized.scale
        if zero is not None and quantized.zero is not None:
            zero[pages] = quantized.zero

    def read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 K and V [N, kv_heads, M·P, D] of `pages` [N, M], tokens in the order of the pages."""
        index = (pages.unsqueeze(1), self._heads)  # head before page: the gather puts tokens of a head together
        k = self._load(self._k_codes[index], self.recipe.k, -2, self._k_scale, self._k_zero, index)
        if self._k_norm is not None:
            k *= self._k_norm[pages].float()[:, None, :, :, None]
        v = self._load(self._v_codes[index], self.recipe.v, -1, self._v_scale, self._v_zero, index)
        return k.flatten(2, 3), v.flatten(2, 3)

    @staticmethod
    def _load(
        codes: Tensor, codec: Codec, dim: int, scale: Tensor | None, zero: Tensor | None, index: tuple[Tensor, Tensor]
    ) -> Tensor:
        if isinstance(codec, Raw):
            return codes.float()
        assert scale is not None
        unpacked = unpack(codes, code_bits(codec))
        tile = unpacked if dim == -2 else unpacked.transpose(-1, -2)
        return dequantize(tile, scale[index], None if zero is None else zero[index], codec, dim)

    def read_open(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 K and V [N, kv_heads, M·P, D] of `slots` [N, M]."""
        index = (slots.unsqueeze(1), self._heads)
        return self.open_k[index].float().flatten(2, 3), self.open_v[index].float().flatten(2, 3)

    def read_refs(self, refs: "PageIndex") -> tuple[Tensor, Tensor]:
        """fp32 K and V [kv_heads, M·P, D] of sink and sealed pages of one sequence, sinks first."""
        if refs.pages.numel() == 0:
            k, v = self.read_open(refs.slots)
        else:
            k, v = self.read(refs.pages)
            if refs.slots.numel():
                sink_k, sink_v = self.read_open(refs.slots)
                k, v = torch.cat((sink_k, k), 2), torch.cat((sink_v, v), 2)
        return k[0], v[0]


class PageIndex:
    """Pages of one sequence as index tensors: `slots` [1, m] of sink pages, then `pages` [1, n]."""

    def __init__(self, refs: Sequence[PageRef], device: torch.device):
        slots = [ref.id for ref in refs if ref.pool is Pool.OPEN]
        pages = [ref.id for ref in refs if ref.pool is Pool.SEALED]
        self.slots = torch.tensor([slots], dtype=torch.int64, device=device)
        self.pages = torch.tensor([pages], dtype=torch.int64, device=device)
