"""Codes to fp16 numbers in PTX, four bytes at a time.

Triton unpacks bytes one by one, which takes three times the instructions. What a snippet computes is what
`kernels.triton.tiles.numbers` says; the interpreter, which knows no PTX, runs that.
"""

MINUS_1024 = 0xE400E400  # as two fp16 numbers
TIMES_256 = 0x5C005C00


def unpack_integers(bits: int, plane: int) -> str:
    """Codes of `bits` in plane `plane` of the bytes in $2: two fp16 numbers each in $0 and $1. The code becomes the low
    byte of an fp16 number from 1024 to 2047."""
    mask = ((1 << bits) - 1) * 0x01010101
    return f"""{{
        .reg .b32 code, offset;
        shr.b32 code, $2, {bits * plane};
        and.b32 code, code, {mask};
        prmt.b32 $0, code, 0x64646464, 0x4140;
        prmt.b32 $1, code, 0x64646464, 0x4342;
        mov.b32 offset, {MINUS_1024};
        add.rn.f16x2 $0, $0, offset;
        add.rn.f16x2 $1, $1, offset;
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
