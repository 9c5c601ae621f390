"""Codecs: how a number becomes a code, and where the parameters for that lie. Pure values, no torch.

All but `Raw` and `Table` read back as `scale * code + zero`. A block of numbers shares a scale and, where the codec has
one, a zero (`Store`).
"""

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True)
class Raw:
    """Values stay in the model's dtype."""


@dataclass(frozen=True, slots=True)
class Integer:
    """Asymmetric: zero = min, scale = (max - min) / (2^bits - 1)."""

    bits: int

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    def __str__(self) -> str:
        return f"int{self.bits}"


@dataclass(frozen=True, slots=True)
class Centred:
    """Symmetric about zero with no code for it: scale = max |x| / centre, zero = -centre * scale, centre =
    (2^bits - 1) / 2. For numbers that a rotation has made symmetric: all codes are used, and no zero is stored."""

    bits: int

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def centre(self) -> float:
        return self.max_code / 2

    def __str__(self) -> str:
        return f"centred int{self.bits}"


@dataclass(frozen=True, slots=True)
class Symmetric:
    """As llama.cpp's q8_0 and q4_0: zero = -centre * scale, centre = 2^(bits-1). With 8 bits scale = max |x| / 127;
    with fewer the number of largest magnitude, with its sign, becomes code 0: scale = -that / centre."""

    bits: int

    @property
    def max_code(self) -> int:
        return (1 << self.bits) - 1

    @property
    def centre(self) -> int:
        return 1 << (self.bits - 1)

    def __str__(self) -> str:
        return f"symmetric int{self.bits}"


@dataclass(frozen=True, slots=True)
class Float8:
    """8-bit floats under a scale that maps the largest magnitude to `max_code`; no zero.

    Both formats scale to 448, the largest e4m3 number: e5m2 has range to spare there, and one bound for both keeps
    the scale of ordinary values a normal fp16 number.
    """

    exponent_bits: int
    mantissa_bits: int

    @property
    def bits(self) -> int:
        return 8

    @property
    def max_code(self) -> float:
        return 448.0

    def __str__(self) -> str:
        return f"e{self.exponent_bits}m{self.mantissa_bits}"


@dataclass(frozen=True, slots=True)
class Table:
    """A code is a place in `values` (at most 2^bits, ascending, read as fp32) on the range normalised to [-1, 1]; it is
    the number of `bounds` (ascending) below the normalised number (KVQuant's nuq, arXiv 2401.18079, section 3.3).

    zero = (max + min) / 2, scale = (max - min) / 2; where `is_centred`, scale = max |x| and no zero is stored.
    """

    values: tuple[float, ...]
    bounds: tuple[float, ...]
    is_centred: bool = False
    name: str = "nuq"

    @classmethod
    def nearest(cls, values: tuple[float, ...], *, is_centred: bool = False, name: str = "nuq") -> "Table":
        """Each number becomes the nearest value."""
        bounds = tuple((low + high) / 2 for low, high in zip(values, values[1:], strict=False))
        return cls(values, bounds, is_centred, name)

    @property
    def bits(self) -> int:
        return (len(self.values) - 1).bit_length()

    @property
    def max_code(self) -> int:
        return len(self.values) - 1

    def __str__(self) -> str:
        return f"{self.name}{self.bits}"


Quantizer = Integer | Centred | Symmetric | Float8 | Table
Codec = Raw | Quantizer


class Parameters(Enum):
    """How scales and zeros are kept. `HALF`: both in fp16. `BYTE`: the scale as the bits 6 to 13 of an fp16 number
    (four of exponent, four of mantissa) under one fp16 factor for all of a head, the zero in int8, as a number of 32nds
    of the range; the scale is made large enough for that. SKVQ (arXiv 2405.06219) keeps both in e4m3, which is coarser
    (docs/log.md). `UNIT`: the scale is 1 and nothing is kept, as other servers do with fp8."""

    HALF = "fp16"
    BYTE = "8-bit"
    UNIT = "unit"


def has_zero(codec: Codec) -> bool:
    """Whether a block's zero is stored."""
    return isinstance(codec, Integer) or (isinstance(codec, Table) and not codec.is_centred)


def zero_unit(codec: Quantizer) -> float:
    """What a zero in 8 bits counts, in scales: a 32nd of the range."""
    return 1 / 16 if isinstance(codec, Table) else codec.max_code / 32


@dataclass(frozen=True, slots=True)
class Store:
    """How K or V of one layer is stored. Blocks of `group_tokens` x `group_channels` numbers share parameters, None:
    the page's tokens, the head's channels; a size that does not divide them is made smaller until it does.

    `clip`: the range is made smaller by this factor, about its middle: what is outside is clamped, and steps are finer
    for the rest (SKVQ clips towards zero, which suits only ranges about zero). `num_outliers`: for each token that many
    of its numbers, over all heads, are kept in fp16 and left out of ranges: those farthest from the middle of their
    block, in units of its spread (dense-and-sparse, KVQuant). Raises ValueError for 8-bit scales that need a sign.
    """

    codec: Codec
    group_tokens: int | None
    group_channels: int | None
    parameters: Parameters = Parameters.HALF
    clip: float = 1.0
    num_outliers: int = 0

    def __post_init__(self) -> None:
        is_signed = isinstance(self.codec, Symmetric) and self.codec.bits < 8
        if is_signed and self.parameters is Parameters.BYTE:
            raise ValueError(f"{self.codec} has scales with a sign, which 8-bit scales have no room for")

    @property
    def is_per_channel(self) -> bool:
        return self.group_channels == 1

    def __str__(self) -> str:
        if isinstance(self.codec, Raw):
            return "as it is"
        group = self.group_tokens if self.is_per_channel else self.group_channels
        words = f"{self.codec} per {'channel' if self.is_per_channel else 'token'}"
        words += f" in groups of {group}" if group else ""
        words += "" if self.parameters is Parameters.HALF else f", {self.parameters.value} scale"
        words += f", clipped to {self.clip:g}" if self.clip != 1 else ""
        return words + (f", {self.num_outliers} outliers a token" if self.num_outliers else "")


def raw() -> Store:
    return Store(Raw(), None, None)


def per_channel(
    codec: Quantizer, group: int | None = None, parameters: Parameters = Parameters.HALF, clip: float = 1.0
) -> Store:
    """Parameters for each channel, over `group` tokens (KIVI's axis for K)."""
    return Store(codec, group, 1, parameters, clip)


def per_token(
    codec: Quantizer, group: int | None = None, parameters: Parameters = Parameters.HALF, clip: float = 1.0
) -> Store:
    """Parameters for each token, over `group` channels of a head (KIVI's axis for V)."""
    return Store(codec, 1, group, parameters, clip)
