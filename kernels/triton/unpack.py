"""Codes to fp16 numbers in PTX, four bytes at a time.

Triton unpacks bytes one by one, which takes three times the instructions. What a snippet computes is what
`numbers` in tiles.py and `four_parameters` in parameters.py say; the interpreter, which knows no PTX, runs that.
"""

import struct

TIMES_256 = 0x5C005C00  # as two fp16 numbers


def is_half(number: float) -> bool:
    """Whether fp16 has it."""
    return abs(number) < 65520 and struct.unpack("<e", struct.pack("<e", number))[0] == number


def halves(number: float) -> int:
    """Twice, as two fp16 numbers. Raises ValueError where there is none."""
    if not is_half(number):
        raise ValueError(f"{number} is no number of fp16")
    (bits,) = struct.unpack("<H", struct.pack("<e", number))
    return int(bits) * 0x10001


def unpack_integers(bits: int, plane: int) -> str:
    """Codes of `bits` in plane `plane` of the bytes in $2: two fp16 numbers each in $0 and $1. The byte becomes the
    lower one of an fp16 number from 1024 to 2047, which planes share; in it the code counts 2^(bits * plane)."""
    shift = bits * plane
    mask = (0xFF00 | ((1 << bits) - 1) << shift) * 0x10001
    return f"""{{
        .reg .b32 factor, offset;
        prmt.b32 $0, $2, 0x64646464, 0x4140;
        prmt.b32 $1, $2, 0x64646464, 0x4342;
        and.b32 $0, $0, {mask};
        and.b32 $1, $1, {mask};
        mov.b32 factor, {halves(2.0**-shift)};
        mov.b32 offset, {halves(-1024 * 2.0**-shift)};
        fma.rn.f16x2 $0, $0, factor, offset;
        fma.rn.f16x2 $1, $1, factor, offset;
    }}"""


def unpack_parameters(zero_unit: float) -> str:
    """Of four bytes each, scales in $8 and signed zeros in $9 that count `zero_unit` scales: as fp16 numbers in $0 to
    $3 and $4 to $7. Raises ValueError where fp16 does not have 1152 zero units."""
    return f"""{{
        .reg .b32 code, unit, offset, scale0, scale1, zero0, zero1;
        prmt.b32 scale0, $8, 0, 0x4140;
        prmt.b32 scale1, $8, 0, 0x4342;
        shl.b32 scale0, scale0, 6;
        shl.b32 scale1, scale1, 6;
        xor.b32 code, $9, {0x80808080};
        prmt.b32 zero0, code, 0x64646464, 0x4140;
        prmt.b32 zero1, code, 0x64646464, 0x4342;
        mov.b32 unit, {halves(zero_unit)};
        mov.b32 offset, {halves(-1152 * zero_unit)};
        fma.rn.f16x2 zero0, zero0, unit, offset;
        fma.rn.f16x2 zero1, zero1, unit, offset;
        mul.rn.f16x2 zero0, zero0, scale0;
        mul.rn.f16x2 zero1, zero1, scale1;
        mov.b32 {{$0, $1}}, scale0;
        mov.b32 {{$2, $3}}, scale1;
        mov.b32 {{$4, $5}}, zero0;
        mov.b32 {{$6, $7}}, zero1;
    }}"""


def unpack_e5m2() -> str:
    """The byte is the upper one of an fp16 number."""
    return """{
        prmt.b32 $0, $2, 0, 0x1404;
        prmt.b32 $1, $2, 0, 0x3424;
    }"""


def unpack_e4m3() -> str:
    """Its seven lower bits are those of an fp16 number that is smaller by 2^8."""
    return f"""{{
        .reg .b32 upper, rest, factor;
        mov.b32 factor, {TIMES_256};
        prmt.b32 upper, $2, 0, 0x1404;
        and.b32 rest, upper, 0x7F007F00;
        shr.b32 rest, rest, 1;
        and.b32 upper, upper, 0x80008000;
        or.b32 upper, upper, rest;
        mul.rn.f16x2 $0, upper, factor;
        prmt.b32 upper, $2, 0, 0x3424;
        and.b32 rest, upper, 0x7F007F00;
        shr.b32 rest, rest, 1;
        and.b32 upper, upper, 0x80008000;
        or.b32 upper, upper, rest;
        mul.rn.f16x2 $1, upper, factor;
    }}"""
