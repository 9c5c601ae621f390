"""Scales and zeros of blocks of a sealed page, in 16 bit or in bytes; see the top of tiles.py.

In decode, parameters in bytes are unpacked four at a time, since with small groups a thread has as many of them as
codes. Prefill has no registers for that.
"""

import triton
import triton.language as tl


@triton.jit
def byte_scale(x):
    """fp16, of the upper bits of its exponent and mantissa."""
    return (x.to(tl.uint16) << 6).to(tl.float16, bitcast=True)


@triton.jit
def byte_zero(x, store: tl.constexpr, DTYPE: tl.constexpr):
    """In scales."""
    number = ((x ^ 0x80).to(tl.uint16) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    return number.to(DTYPE) * store.zero_unit


@triton.jit
def scale_and_zero(record, index, store: tl.constexpr, DTYPE: tl.constexpr):
    """Of blocks number `index`, without the head's factor; the zero is 0 where there is none."""
    if store.is_byte:
        scale = byte_scale(tl.load(record + store.scale + index)).to(DTYPE)
    else:
        scale = tl.load((record + store.scale).to(tl.pointer_type(tl.float16)) + index).to(DTYPE)
    if store.has_zero:
        if store.is_byte:
            zero = byte_zero(tl.load(record + store.zero + index), store, DTYPE) * scale
        else:
            zero = tl.load((record + store.zero).to(tl.pointer_type(tl.float16)) + index).to(DTYPE)
    else:
        zero = scale * -store.centre
    return scale, zero


@triton.jit
def four_parameters(record, index, store: tl.constexpr, layer: tl.constexpr):
    """Of blocks number `4 * index` on: four fp16 tensors of scales, then four of zeros."""
    scales = tl.load((record + store.scale).to(tl.pointer_type(tl.uint32)) + index)
    zeros = tl.load((record + store.zero).to(tl.pointer_type(tl.uint32)) + index)
    if layer.is_interpreted:
        result = (
            byte_scale(scales.to(tl.uint8)),
            byte_scale((scales >> 8).to(tl.uint8)),
            byte_scale((scales >> 16).to(tl.uint8)),
            byte_scale((scales >> 24).to(tl.uint8)),
            byte_zero(zeros.to(tl.uint8), store, tl.float16) * byte_scale(scales.to(tl.uint8)),
            byte_zero((zeros >> 8).to(tl.uint8), store, tl.float16) * byte_scale((scales >> 8).to(tl.uint8)),
            byte_zero((zeros >> 16).to(tl.uint8), store, tl.float16) * byte_scale((scales >> 16).to(tl.uint8)),
            byte_zero((zeros >> 24).to(tl.uint8), store, tl.float16) * byte_scale((scales >> 24).to(tl.uint8)),
        )
    else:
        result = tl.inline_asm_elementwise(
            store.unpacker_of_parameters,
            "=h,=h,=h,=h,=h,=h,=h,=h,r,r",
            [scales, zeros],
            dtype=(tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16, tl.float16),
            is_pure=True,
            pack=1,
        )
    return result


@triton.jit
def in_turn(first, second):
    """[..., 2 N], of two tensors [..., N] by turns."""
    joined = tl.join(first, second)
    return tl.reshape(joined, joined.shape[:-2] + [2 * joined.shape[-2]])


@triton.jit
def channel_parameters(
    record,
    head,
    t: tl.constexpr,
    T: tl.constexpr,
    c: tl.constexpr,
    C: tl.constexpr,
    store: tl.constexpr,
    layer: tl.constexpr,
):
    """fp16 scales and zeros of channels, [1, C] where the tokens share them, else [T, C]."""
    WORDS: tl.constexpr = layer.head_dim // 4
    SIZE: tl.constexpr = store.group_tokens
    GROUPS: tl.constexpr = max(1, T // SIZE)
    group = head * (layer.page_tokens // SIZE) + t // SIZE + tl.arange(0, GROUPS)
    p = four_parameters(record, (group * WORDS + c // 4)[:, None] + tl.arange(0, C // 4)[None, :], store, layer)
    scale = in_turn(in_turn(p[0], p[2]), in_turn(p[1], p[3]))
    zero = in_turn(in_turn(p[4], p[6]), in_turn(p[5], p[7]))
    if GROUPS > 1:
        scale = tl.reshape(tl.broadcast_to(scale[:, None, :], [GROUPS, SIZE, C]), [T, C])
        zero = tl.reshape(tl.broadcast_to(zero[:, None, :], [GROUPS, SIZE, C]), [T, C])
    return scale, zero


@triton.jit
def token_parameters(
    record, head, t: tl.constexpr, T: tl.constexpr, c: tl.constexpr, store: tl.constexpr, layer: tl.constexpr
):
    """fp16 scales and zeros [1, T] of tokens, where channels near `c` share them."""
    GROUPS: tl.constexpr = layer.head_dim // store.group_channels
    GROUP: tl.constexpr = c // store.group_channels
    first = head * (layer.page_tokens * GROUPS // 4)
    if GROUPS >= 4:  # a word has four groups of a token
        tokens = t + tl.arange(0, T)
        p = four_parameters(record, first + tokens * (GROUPS // 4) + GROUP // 4, store, layer)
        scale = p[GROUP % 4]
        zero = p[4 + GROUP % 4]
    elif GROUPS == 2:
        p = four_parameters(record, first + t // 2 + tl.arange(0, T // 2), store, layer)
        scale = in_turn(p[GROUP], p[2 + GROUP])
        zero = in_turn(p[4 + GROUP], p[6 + GROUP])
    else:
        p = four_parameters(record, first + t // 4 + tl.arange(0, T // 4), store, layer)
        scale = in_turn(in_turn(p[0], p[2]), in_turn(p[1], p[3]))
        zero = in_turn(in_turn(p[4], p[6]), in_turn(p[5], p[7]))
    return scale[None, :], zero[None, :]


@triton.jit
def block_index(
    head,
    t: tl.constexpr,
    T: tl.constexpr,
    c: tl.constexpr,
    C: tl.constexpr,
    store: tl.constexpr,
    layer: tl.constexpr,
    IS_KEY: tl.constexpr,
):
    """Which block of parameters the T tokens from `t` on and C channels from `c` on belong to; an axis has size 1 where
    one block covers it. K is [tokens, channels], V [channels, tokens]."""
    GT: tl.constexpr = store.group_tokens
    GC: tl.constexpr = store.group_channels
    per_token: tl.constexpr = layer.head_dim // GC
    if GT % T == 0:
        tokens = tl.full((1, 1), t // GT, tl.int32)
    else:
        tokens = tl.expand_dims((t + tl.arange(0, T)) // GT, 1 if IS_KEY else 0)
    if GC % C == 0:
        channels = tl.full((1, 1), c // GC, tl.int32)
    else:
        channels = tl.expand_dims((c + tl.arange(0, C)) // GC, 0 if IS_KEY else 1)
    return head * (layer.page_tokens // GT * per_token) + tokens * per_token + channels


@triton.jit
def head_factor(record, head, store: tl.constexpr):
    """fp32: what the scales of a head in 8 bits are multiplied by."""
    return tl.load((record + store.factor).to(tl.pointer_type(tl.float16)) + head).to(tl.float32)


@triton.jit
def scales_and_zeros(
    record,
    head,
    t: tl.constexpr,
    T: tl.constexpr,
    c: tl.constexpr,
    C: tl.constexpr,
    store: tl.constexpr,
    layer: tl.constexpr,
    tiling: tl.constexpr,
    IS_KEY: tl.constexpr,
    DTYPE: tl.constexpr,
):
    """Of the T tokens from `t` on and C channels from `c` on; an axis has size 1 where one block covers it. Without the
    head's factor. K is [tokens, channels], V [channels, tokens]."""
    HAS_WORDS: tl.constexpr = tiling.query_axis == 1 and store.has_words and tl.float16 == DTYPE
    if HAS_WORDS and IS_KEY and store.group_channels == 1:
        scale, zero = channel_parameters(record, head, t, T, c, C, store, layer)
    elif HAS_WORDS and not IS_KEY and store.group_tokens == 1 and store.group_channels % C == 0:
        scale, zero = token_parameters(record, head, t, T, c, store, layer)
    else:
        index = block_index(head, t, T, c, C, store, layer, IS_KEY)
        scale, zero = scale_and_zero(record, index, store, DTYPE)
    return scale, zero
