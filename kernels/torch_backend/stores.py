"""K or V of sealed pages in their records: written, read back, and multiplied without being read back."""

import math

import torch
from torch import Tensor

from kernels.backend import torch_dtype
from kernels.format.codec import Codec, Float8, Raw, Table
from kernels.format.layout import Field, LayerFields, StoreFields
from kernels.torch_backend.codec import dequantize, float8_dtype, outliers, quantize, read_scale, read_zero
from kernels.torch_backend.packing import pack, unpack


class StoreView:
    """K or V of one layer in records [N, bytes] that begin at byte `start` of the page."""

    def __init__(self, records: Tensor, fields: StoreFields, start: int):
        self.fields = fields
        self.codec: Codec = fields.store.codec
        self._codes = view(records, fields.codes, start)
        self._scale = optional_view(records, fields.scale, start)
        self._zero = optional_view(records, fields.zero, start)
        self._factor = optional_view(records, fields.factor, start)
        self._places = optional_view(records, fields.outlier_places, start)
        self._values = optional_view(records, fields.outlier_values, start)

    @property
    def codes(self) -> Tensor:
        """As stored."""
        return self._codes

    def write(self, x: Tensor, pages: Tensor, excluded: Tensor | None, *, is_key: bool) -> None:
        """Quantize tiles of fp32 (of the model's dtype where they stay raw) into `pages` [N] of the records."""
        if isinstance(self.codec, Raw):
            self._codes[pages] = x.to(self._codes.dtype)
            return
        if self._places is not None and self._values is not None:
            self._places[pages], self._values[pages], mask = outliers(x, self.fields)
            excluded = mask if excluded is None else mask | excluded
        quantized = quantize(x, self.fields, excluded)
        rows = quantized.codes if is_key else quantized.codes.transpose(-1, -2).contiguous()
        self._codes[pages] = pack(rows, self.codec.bits)
        for field, value in (
            (self._scale, quantized.scale),
            (self._zero, quantized.zero),
            (self._factor, quantized.factor),
        ):
            if field is not None and value is not None:
                field[pages] = value

    def numbers(self) -> Tensor:
        """Codes unpacked to fp32, laid out as stored; 16-bit values as they are."""
        match self.codec:
            case Raw():
                return self._codes.float()
            case Float8():
                return self._codes.view(float8_dtype(self.codec)).float()
            case Table(values):  # codes that nothing is stored as can lie in a page that nobody wrote
                padded = values + (math.nan,) * ((1 << self.codec.bits) - len(values))
                table = torch.tensor(padded, dtype=torch.float32, device=self._codes.device)
                return table[unpack(self._codes, self.codec.bits).int()]
        return unpack(self._codes, self.codec.bits).float()

    def affine(self) -> tuple[Tensor | None, Tensor | None]:
        """fp32 scale and zero [N, H, P/group_tokens, D/group_channels], None where there are none."""
        if self._scale is None or isinstance(self.codec, Raw):
            return None, None
        scale = read_scale(self._scale, self._factor)
        return scale, read_zero(self.codec, self._scale, self._zero, self._factor)

    def read(self, *, is_key: bool) -> Tensor:
        """fp32 tiles [N, H, P, D]."""
        numbers = self.numbers()
        if isinstance(self.codec, Raw):
            return numbers
        tile = numbers if is_key else numbers.transpose(-1, -2)
        scale, zero = self.affine()
        if scale is not None:
            tile = dequantize(tile, self.fields, scale, zero)
        if self._places is not None and self._values is not None:
            by_token = tile.transpose(1, 2).flatten(2)
            by_token = by_token.scatter(-1, self._places.long(), self._values.float())
            tile = by_token.unflatten(-1, (tile.shape[1], -1)).transpose(1, 2)
        return tile

    @property
    def folds_as_key(self) -> bool:
        """Whether `logits` can be used: parameters per channel, and nothing that takes the place of codes."""
        return isinstance(self.codec, Raw) or (self.fields.group_channels == 1 and self._places is None)

    @property
    def folds_as_value(self) -> bool:
        """Whether `mix` can be used: parameters per token, and nothing that takes the place of codes."""
        return isinstance(self.codec, Raw) or (self.fields.group_tokens == 1 and self._places is None)

    def logits(self, q: Tensor) -> Tensor:
        """q . K of fp32 q [N, H, M, D]: [N, H, M, P]. Scales go into the query, so that codes are only converted: for
        each group of tokens `(q * scale) . code + q . zero`."""
        numbers = self.numbers()
        scale, zero = self.affine()
        if scale is None:
            return torch.matmul(q, numbers.transpose(-1, -2))
        groups = numbers.unflatten(-2, (-1, self.fields.group_tokens))  # [N, H, P/g, g, D]
        logits = torch.matmul(q.unsqueeze(2) * scale.unsqueeze(-2), groups.transpose(-1, -2))  # [N, H, P/g, M, g]
        if zero is not None:
            logits += torch.matmul(q.unsqueeze(2), zero.unsqueeze(-1))
        return logits.transpose(2, 3).flatten(-2)

    def mix(self, weights: Tensor) -> Tensor:
        """weights . V of fp32 `weights` [N, H, M, P]: [N, H, M, D]. Scales go into the weights: for each group of
        channels `(weights * scale) . code + weights . zero`."""
        numbers = self.numbers()
        if isinstance(self.codec, Raw):
            return torch.matmul(weights, numbers)
        scale, zero = self.affine()
        groups = numbers.unflatten(-2, (-1, self.fields.group_channels))  # [N, H, D/c, c, P]
        by_group = weights.unsqueeze(2)
        scaled = by_group if scale is None else by_group * scale.permute(0, 1, 3, 2).unsqueeze(-2)
        mixed = torch.matmul(scaled, groups.transpose(-1, -2))  # [N, H, D/c, M, c]
        if zero is not None:
            mixed += torch.matmul(by_group, zero.permute(0, 1, 3, 2).unsqueeze(-1))
        return mixed.transpose(2, 3).flatten(-2)


class LayerView:
    """All fields of one layer in records [N, bytes] that begin at byte `start` of the page."""

    def __init__(self, records: Tensor, fields: LayerFields, start: int):
        self.k = StoreView(records, fields.k, start)
        self.v = StoreView(records, fields.v, start)
        self.k_norm = optional_view(records, fields.k_norm, start)
        self.row_places = optional_view(records, fields.row_places, start)
        self.k_rows = optional_view(records, fields.k_rows, start)
        self.v_rows = optional_view(records, fields.v_rows, start)


def view(records: Tensor, field: Field, start: int) -> Tensor:
    first = field.offset - start
    raw = records[:, first : first + field.num_bytes]
    return raw.view(torch_dtype(field.dtype)).view(-1, *field.shape)


def optional_view(records: Tensor, field: Field | None, start: int) -> Tensor | None:
    return None if field is None else view(records, field, start)
