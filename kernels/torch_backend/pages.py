"""Sealed pages and slots as tensors: quantize into records, read back."""

from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.backend import PoolTensors, torch_dtype
from kernels.format.layout import Field, LayerFields, PageRef, Pool
from kernels.format.recipe import Codec, Float8, Integer, LayerRecipe, Raw
from kernels.torch_backend.codec import LARGEST, SMALLEST_NORMAL, code_bits, dequantize, float8_dtype, quantize
from kernels.torch_backend.packing import pack, unpack
from kernels.torch_backend.softmax import Partial


class LayerPages:
    """One layer of both pools. Tiles are [N, kv_heads, P, D]."""

    def __init__(self, pool: PoolTensors, layer: int):
        self.recipe: LayerRecipe = pool.layout.recipe.layers[layer]
        self._fields = pool.layout.layers[layer]
        self._sealed = _FieldViews(pool.sealed, self._fields, 0)
        self._start, end = self._fields.span
        self._records = pool.sealed[:, self._start : end]
        self.open = pool.open[:, layer]
        self.open_k, self.open_v = self.open[:, 0], self.open[:, 1]
        # PyTorch's CPU attention takes 16-bit keys and values as they are
        self.attends_in_16bit = self.recipe.is_raw and pool.open.is_cpu and pool.open.dtype != torch.float32

    def seal(self, k: Tensor, v: Tensor, pages: Tensor) -> None:
        """Quantize contiguous tiles of the model's dtype into `pages` [N]."""
        fields = self._sealed
        if self.recipe.is_raw:
            fields.k_codes[pages], fields.v_codes[pages] = k, v
            return
        keys = k.float()
        if fields.k_norm is not None:
            # one norm a token over all heads; rows of one length and layout, so that sums do not depend on N
            rows = keys.transpose(1, 2).flatten(2)
            norm = rows.square().sum(-1).sqrt().clamp(SMALLEST_NORMAL, LARGEST).half()
            fields.k_norm[pages] = norm
            keys = keys / norm.float()[:, None, :, None]
        self._store(keys, self.recipe.k, -2, fields.k_codes, fields.k_scale, fields.k_zero, pages)
        self._store(v.float(), self.recipe.v, -1, fields.v_codes, fields.v_scale, fields.v_zero, pages)

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

    def _gather(self, pages: Tensor) -> "_FieldViews":
        """The fields of `pages` [N] in one copy of their records: far faster than gathering field by field."""
        return _FieldViews(self._records.index_select(0, pages), self._fields, self._start)

    def attend_pages(self, q: Tensor, pages: Tensor) -> Partial:
        """Attention of one query tile a page: fp32 q [N, kv_heads, M, D] (scaled) over `pages` [N].

        Scales are folded into the query and the weights, so that codes are only converted: per page
        `logit_t = norm_t * ((q * s) . code_t + q . z)` and `P . V = (p * s) . code + sum(p * z)`.
        """
        fields = self._gather(pages)
        keys = _numbers(fields.k_codes, self.recipe.k)
        if fields.k_scale is None:
            logits = torch.matmul(q, keys.transpose(-1, -2))
        else:
            logits = torch.matmul(q * fields.k_scale.float().unsqueeze(-2), keys.transpose(-1, -2))
        if fields.k_zero is not None:
            logits += torch.matmul(q, fields.k_zero.float().unsqueeze(-1))
        if fields.k_norm is not None:
            logits *= fields.k_norm.float()[:, None, None]
        largest = logits.amax(-1)
        weights = logits.sub_(largest.unsqueeze(-1)).exp_()
        total = weights.sum(-1)
        values = _numbers(fields.v_codes, self.recipe.v)
        if fields.v_scale is None:
            return Partial(largest, total, torch.matmul(weights, values))
        mixed = torch.matmul(weights * fields.v_scale.float().unsqueeze(-2), values.transpose(-1, -2))
        if fields.v_zero is not None:
            mixed += torch.matmul(weights, fields.v_zero.float().unsqueeze(-1))
        return Partial(largest, total, mixed)

    def tiles_16bit(self, slots: Tensor, pages: Tensor) -> Tensor:
        """[m + n, 2 (K, V), kv_heads, P, D] of `slots` [m] and raw `pages` [n], whose records are laid out as slots."""
        tiles = self.open.new_empty(len(slots) + len(pages), *self.open.shape[1:])
        records = self._records.view(tiles.dtype)
        torch.index_select(self.open, 0, slots, out=tiles[: len(slots)])
        torch.index_select(records, 0, pages, out=tiles[len(slots) :].view(len(pages), records.shape[1]))
        return tiles

    def read(self, pages: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 K and V [kv_heads, N·P, D] of `pages` [N], tokens in the order of the pages."""
        fields = self._gather(pages)
        keys = _numbers(fields.k_codes, self.recipe.k)
        if fields.k_scale is not None:
            keys = dequantize(keys, fields.k_scale, fields.k_zero, -2)
        if fields.k_norm is not None:
            keys *= fields.k_norm.float()[:, None, :, None]
        values = _numbers(fields.v_codes, self.recipe.v)
        if fields.v_scale is not None:
            values = dequantize(values.transpose(-1, -2), fields.v_scale, fields.v_zero, -1)
        return keys.transpose(0, 1).flatten(1, 2), values.transpose(0, 1).flatten(1, 2)

    def read_open(self, slots: Tensor) -> tuple[Tensor, Tensor]:
        """fp32 K and V [N, kv_heads, P, D] of `slots` [N]."""
        k, v = self.open.index_select(0, slots).float().unbind(1)
        return k, v

    def read_refs(self, refs: "PageIndex") -> tuple[Tensor, Tensor]:
        """fp32 K and V [kv_heads, M·P, D] of sink and sealed pages of one sequence, sinks first."""
        parts = []
        if refs.slots.numel():
            k, v = (x.transpose(0, 1).flatten(1, 2) for x in self.read_open(refs.slots))
            parts.append((k, v))
        if refs.pages.numel():
            parts.append(self.read(refs.pages))
        if len(parts) == 1:
            return parts[0]
        k, v = (torch.cat(tensors, 1) for tensors in zip(*parts, strict=True))
        return k, v


class _FieldViews:
    """The fields of a layer as views of records [N, bytes] that begin at byte `start` of the page."""

    def __init__(self, records: Tensor, fields: LayerFields, start: int):
        def view(field: Field | None) -> Tensor | None:
            if field is None:
                return None
            first = field.offset - start
            raw = records[:, first : first + field.num_bytes]
            return raw.view(torch_dtype(field.dtype)).view(-1, *field.shape)

        k_codes, v_codes = view(fields.k_codes), view(fields.v_codes)
        assert k_codes is not None and v_codes is not None
        self.k_codes, self.v_codes = k_codes, v_codes
        self.k_scale, self.k_zero, self.k_norm = view(fields.k_scale), view(fields.k_zero), view(fields.k_norm)
        self.v_scale, self.v_zero = view(fields.v_scale), view(fields.v_zero)


def _numbers(codes: Tensor, codec: Codec) -> Tensor:
    """Codes as stored to fp32, unpacked; 16-bit values as they are."""
    match codec:
        case Raw():
            return codes.float()
        case Float8():
            return codes.view(float8_dtype(codec)).float()
        case Integer(bits):
            return unpack(codes, bits).float()


class PageIndex:
    """Pages of one sequence as index tensors: `slots` [m] of sink pages, then `pages` [n]."""

    def __init__(self, refs: Sequence[PageRef], device: torch.device):
        slots = [ref.id for ref in refs if ref.pool is Pool.OPEN]
        pages = [ref.id for ref in refs if ref.pool is Pool.SEALED]
        self.slots = torch.tensor(slots, dtype=torch.int64, device=device)
        self.pages = torch.tensor(pages, dtype=torch.int64, device=device)
