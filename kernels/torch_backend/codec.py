"""Quantize and dequantize K or V tiles of whole pages, vectorised over pages.

A tile is [N pages, kv_heads, P tokens, D channels]; a block of it shares parameters (`Store`). Rounding is to nearest
even, against the parameters *as stored*.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from kernels.format.codec import Centred, Float8, Integer, Parameters, Quantizer, Raw, Symmetric, Table, zero_unit
from kernels.format.layout import StoreFields

SMALLEST_NORMAL = 2.0**-14
LARGEST = 65504.0  # of fp16
LARGEST_BYTE = 1.9375  # of a scale in 8 bits, which is an fp16 number without its sign and at both ends
LARGEST_STEP = 120  # of a zero in 8 bits, whose unit may be rounded down by a thirty-second
SPREAD_RANKS = 10  # outliers are measured in units of the distance between the tenths at both ends of a block


class Quantized(NamedTuple):
    """uint8 codes in the tile's shape; parameters as `StoreFields` has them, None where it has none."""

    codes: Tensor
    scale: Tensor | None
    zero: Tensor | None
    factor: Tensor | None


class Blocks(NamedTuple):
    """A view of tiles as blocks: [N, H, P, D] as [N, H, P/g, g, D/c, c], parameters as [N, H, P/g, 1, D/c, 1]."""

    group_tokens: int
    group_channels: int

    @classmethod
    def of(cls, fields: StoreFields) -> "Blocks":
        return cls(fields.group_tokens, fields.group_channels)

    def split(self, tile: Tensor) -> Tensor:
        blocks: Tensor = tile.unflatten(-1, (-1, self.group_channels)).unflatten(-3, (-1, self.group_tokens))
        return blocks

    @staticmethod
    def join(blocks: Tensor) -> Tensor:
        return blocks.flatten(-2, -1).flatten(-3, -2)

    @staticmethod
    def spread(parameter: Tensor) -> Tensor:
        return parameter.unsqueeze(-2).unsqueeze(-1)

    def extremes(self, tile: Tensor, excluded: Tensor | None) -> tuple[Tensor, Tensor]:
        """Smallest and largest of each block, 0 where all of it is `excluded`."""
        if excluded is None:
            if self.group_channels == 1 and self.group_tokens == tile.shape[-2]:  # most K: PyTorch is quick at this
                low, high = tile.aminmax(dim=-2)
                return low.unsqueeze(-2), high.unsqueeze(-2)
            blocks = self.split(tile)
            return blocks.amin((-3, -1)), blocks.amax((-3, -1))
        low = self.split(tile.masked_fill(excluded, float("inf"))).amin((-3, -1))
        high = self.split(tile.masked_fill(excluded, float("-inf"))).amax((-3, -1))
        is_empty = self.split(excluded).all(-1).all(-2)
        return low.masked_fill(is_empty, 0.0), high.masked_fill(is_empty, 0.0)


def float8_dtype(codec: Float8) -> torch.dtype:
    return torch.float8_e5m2 if codec.exponent_bits == 5 else torch.float8_e4m3fn


def to_scale(scale: Tensor) -> Tensor:
    """Rounds to fp16 away from zero and infinity: a constant range still divides, and never makes NaN."""
    return scale.clamp(SMALLEST_NORMAL, LARGEST).half()


def quantize(x: Tensor, fields: StoreFields, excluded: Tensor | None = None) -> Quantized:
    """`x`: fp32 tile. `excluded`: bool, numbers that ranges leave out (they get a code all the same)."""
    codec, parameters = fields.store.codec, fields.store.parameters
    assert not isinstance(codec, Raw)
    blocks = Blocks.of(fields)
    low, high = blocks.extremes(x, excluded)
    exact_scale, exact_zero = _affine(codec, low, high)
    if (clip := fields.store.clip) != 1:
        exact_scale = exact_scale * clip
        if isinstance(codec, Integer):
            exact_zero = low + (high - low) * ((1 - clip) / 2)
    if parameters is Parameters.UNIT:
        return Quantized(_encode(x, codec), None, None, None)
    factor: Tensor | None = None
    zero: Tensor | None = None
    if parameters is Parameters.HALF:
        scale = _signed_scale(exact_scale) if isinstance(codec, Symmetric) else to_scale(exact_scale)
        zero = None if exact_zero is None else exact_zero.clamp(-LARGEST, LARGEST).half() + 0.0  # never -0
    else:
        if exact_zero is not None:  # a zero far off must still be within reach
            exact_scale = torch.maximum(exact_scale, exact_zero.abs() / (LARGEST_STEP * zero_unit(codec)))
        factor = to_scale(exact_scale.amax((-2, -1)) / LARGEST_BYTE)
        steps = (exact_scale / factor.float()[..., None, None]).clamp(max=LARGEST_BYTE).half().view(torch.int16)
        scale = (steps + 32 >> 6).clamp(min=1).to(torch.uint8)
        if exact_zero is not None:
            unit = read_scale(scale, factor) * zero_unit(codec)
            zero = (exact_zero / unit).round().clamp(-128, 127).to(torch.int8)
    steps = blocks.split(x)
    offset = read_zero(codec, scale, zero, factor)
    if offset is not None:
        steps = steps - Blocks.spread(offset)
    codes = _encode(steps / Blocks.spread(read_scale(scale, factor)), codec)
    return Quantized(Blocks.join(codes), scale, zero, factor)


def _affine(codec: Quantizer, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scale and, where it is stored, zero, before they are rounded."""
    match codec:
        case Integer():
            return (high - low) / codec.max_code, low
        case Table(is_centred=False):
            return (high - low) / 2, (low + high) / 2
        case Symmetric(bits) if bits < 8:
            return torch.where(low.abs() >= high.abs(), low, high) / -codec.centre, None
    largest = torch.maximum(low.abs(), high.abs())
    match codec:
        case Centred():
            return largest / codec.centre, None
        case Symmetric():
            return largest / (codec.max_code - codec.centre), None
        case Float8():
            return largest / codec.max_code, None
        case Table():
            return largest, None


def _signed_scale(scale: Tensor) -> Tensor:
    return torch.where(scale < 0, -1.0, 1.0).half() * to_scale(scale.abs())


def _encode(x: Tensor, codec: Quantizer) -> Tensor:
    """Numbers relative to zero, in units of the scale, to codes."""
    match codec:
        case Float8():
            return x.clamp(-codec.max_code, codec.max_code).to(float8_dtype(codec)).view(torch.uint8)
        case Table():
            bounds = torch.tensor(codec.bounds, dtype=torch.float32, device=x.device)
            return torch.bucketize(x, bounds, out_int32=True).to(torch.uint8)
    return x.round().clamp_(0, codec.max_code).to(torch.uint8)


def read_scale(scale: Tensor, factor: Tensor | None) -> Tensor:
    """fp32 scales of stored ones."""
    if factor is None:
        return scale.float()
    return (scale.to(torch.int16) << 6).view(torch.float16).float() * factor.float()[..., None, None]


def read_zero(codec: Quantizer, scale: Tensor, zero: Tensor | None, factor: Tensor | None) -> Tensor | None:
    """fp32 zeros, None where the codec knows none."""
    if isinstance(codec, Centred | Symmetric):
        return read_scale(scale, factor) * -codec.centre
    if zero is None:
        return None
    return zero.float() if factor is None else zero.float() * (read_scale(scale, factor) * zero_unit(codec))


def dequantize(numbers: Tensor, fields: StoreFields, scale: Tensor, zero: Tensor | None) -> Tensor:
    """Codes as fp32 numbers [N, H, P, D] to an fp32 tile, with fp32 parameters."""
    blocks = Blocks.of(fields).split(numbers)
    if zero is None:
        return Blocks.join(blocks * Blocks.spread(scale))
    return Blocks.join(torch.addcmul(Blocks.spread(zero), blocks, Blocks.spread(scale)))


def outliers(x: Tensor, fields: StoreFields) -> tuple[Tensor, Tensor, Tensor]:
    """The numbers of each token of fp32 `x` that are farthest from the middle of their block, in units of its spread.

    Returns int16 places [N, P, n] in [0, H·D), their values in fp16, and a bool mask in the tile's shape.
    """
    blocks = Blocks.of(fields)
    split = blocks.split(x)
    flat = split.transpose(-3, -2).flatten(-2)  # [N, H, P/g, D/c, g·c]
    ranked = flat.sort(-1).values
    size = ranked.shape[-1]
    low, high = ranked[..., size // SPREAD_RANKS], ranked[..., size - 1 - size // SPREAD_RANKS]
    distance = (split - Blocks.spread((low + high) / 2)).abs() / Blocks.spread((high - low).clamp(min=SMALLEST_NORMAL))
    by_token = Blocks.join(distance).transpose(1, 2).flatten(2)  # [N, P, H·D]
    places = by_token.sort(dim=-1, descending=True, stable=True).indices[..., : fields.store.num_outliers]
    values = x.transpose(1, 2).flatten(2).gather(-1, places)
    mask = torch.zeros_like(by_token, dtype=torch.bool).scatter_(-1, places, True)
    mask = mask.unflatten(-1, (x.shape[1], -1)).transpose(1, 2)
    return places.to(torch.int16), values.clamp(-LARGEST, LARGEST).half(), mask
