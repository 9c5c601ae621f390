"""How numbers become codes and ranges parameters (docs/kv_layout.md, "Values"), and how codes are packed.

Every step rounds in fp32 as it is written: launch with `enable_fp_fusion=False`. `store` is the `StoreSpec`.
"""

import triton
import triton.language as tl

ROUNDING = tl.constexpr(1.5 * 2**23)  # a small number added to it is rounded to an integer, half to even
SMALLEST = tl.constexpr(2.0**-14)  # of fp16's normal numbers
LARGEST = tl.constexpr(65504.0)
LARGEST_BYTE = tl.constexpr(1.9375)  # of a scale in 8 bits
LARGEST_STEP = tl.constexpr(120.0)  # of a zero in 8 bits
NO_ROW = tl.constexpr(255)


@triton.jit
def rounded_bits(x):
    """int32 in 0 … 255: the integer nearest to fp32 `x` in -128 … 255, a negative one as its complement."""
    return (x + ROUNDING).to(tl.int32, bitcast=True) & 0xFF


@triton.jit
def to_float(x):
    """fp32 of the model's dtype. By bits: to Triton's interpreter, subnormal numbers of bfloat16 are 0."""
    if x.dtype == tl.bfloat16:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return x.to(tl.float32)


@triton.jit
def to_half(x):
    """fp16 of a scale or norm, away from zero and infinity."""
    return tl.minimum(tl.maximum(x, SMALLEST), LARGEST).to(tl.float16)


@triton.jit
def wanted_parameters(low, high, store: tl.constexpr):
    """fp32 scale and zero of blocks before they are rounded; a zero that is not stored is of no use."""
    zero = low
    if store.has_zero:
        reach = high - low
        if store.is_table:
            zero = (low + high) * 0.5
        elif store.clip < 1:
            zero = low + reach * ((1 - store.clip) / 2)
    elif store.is_signed:
        reach = tl.where(tl.abs(low) >= tl.abs(high), low, high)
    else:
        reach = tl.maximum(tl.abs(low), tl.abs(high))
    scale = tl.div_rn(reach, store.scale_divisor)
    if store.clip < 1:
        scale = scale * store.clip
    if store.is_byte and store.has_zero:  # a zero far off must still be within reach
        scale = tl.maximum(scale, tl.div_rn(tl.abs(zero), LARGEST_STEP * store.zero_unit))
    return scale, zero


@triton.jit
def rounded_scale(scale, factor, store: tl.constexpr):
    """A scale as it is stored, and the fp32 number that this stands for. `factor`: fp32, of scales in 8 bits."""
    if store.is_byte:
        half = tl.minimum(tl.div_rn(scale, factor), LARGEST_BYTE).to(tl.float16)
        kept = tl.maximum((half.to(tl.int16, bitcast=True).to(tl.int32) + 32) >> 6, 1)
        used = (kept << 6).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * factor
    else:
        kept = to_half(tl.abs(scale))
        if store.is_signed:
            kept = tl.where(scale < 0, -kept, kept)
        used = kept.to(tl.float32)
    return kept, used


@triton.jit
def rounded_zero(zero, scale, store: tl.constexpr):
    """The same of a zero. `scale`: fp32, as it is read back."""
    if store.is_byte:
        unit = scale * store.zero_unit
        steps = tl.minimum(tl.maximum(tl.div_rn(zero, unit), -128.0), 127.0)
        kept, used = rounded_bits(steps), ((steps + ROUNDING) - ROUNDING) * unit
    else:
        kept = tl.minimum(tl.maximum(zero, -LARGEST), LARGEST).to(tl.float16) + 0.0  # never -0
        used = kept.to(tl.float32)
    return kept, used


@triton.jit
def float8_codes(x, store: tl.constexpr):
    """Scaled by a power of two so that the mantissa is an integer, and rounded once; a carry goes into the exponent."""
    MANTISSA_BITS: tl.constexpr = 7 - store.exponent_bits
    SMALLEST_EXPONENT: tl.constexpr = 2 - 2 ** (store.exponent_bits - 1)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), store.max_code)
    exponent = tl.maximum((magnitude.to(tl.int32, bitcast=True) >> 23) - 127, SMALLEST_EXPONENT)
    power = ((MANTISSA_BITS + 127 - exponent) << 23).to(tl.float32, bitcast=True)
    return sign | (((exponent - SMALLEST_EXPONENT) << MANTISSA_BITS) + rounded_bits(magnitude * power))


@triton.jit
def encode(x, store: tl.constexpr):
    """int32 codes of fp32 numbers relative to zero, in units of the scale."""
    if store.is_table:
        codes = tl.zeros(x.shape, tl.int32)
        NUM: tl.constexpr = store.num_bounds
        for place in tl.static_range(NUM):
            codes += (x > store.bounds[place]).to(tl.int32)
    elif store.is_float8:
        codes = float8_codes(x, store)
    else:
        codes = rounded_bits(tl.minimum(tl.maximum(x, 0.0), store.max_code))
    return codes


@triton.jit
def packed(codes, BITS: tl.constexpr, PLANES: tl.constexpr):
    """int32 codes [rows, L] to bytes [rows, L / PLANES]: byte j holds the codes j, j + L / PLANES, …, lowest first."""
    planes = tl.reshape(codes, (codes.shape[0], PLANES, codes.shape[1] // PLANES))
    return tl.sum(planes << (tl.arange(0, PLANES) * BITS)[None, :, None], 1).to(tl.uint8)


@triton.jit
def store_codes(target, codes, store: tl.constexpr):
    """int32 [rows, L] to rows of bytes, the first of which `target` points to."""
    ROWS: tl.constexpr = codes.shape[0]
    LENGTH: tl.constexpr = codes.shape[1]
    row = target + (tl.arange(0, ROWS) * (LENGTH * store.bits // 8))[:, None]
    if store.bits == 3:
        tl.store(row + tl.arange(0, LENGTH // 4)[None, :], packed(codes & 3, 2, 4))
        tl.store(row + LENGTH // 4 + tl.arange(0, LENGTH // 8)[None, :], packed(codes >> 2, 1, 8))
    elif store.bits == 8:
        tl.store(row + tl.arange(0, LENGTH)[None, :], codes.to(tl.uint8))
    else:
        tl.store(row + tl.arange(0, LENGTH // store.planes)[None, :], packed(codes, store.bits, store.planes))
