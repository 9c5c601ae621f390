"""The C structures of `src/abi.h`, and what they say of a page layout."""

import ctypes
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p

from kernels.format.codec import Centred, Codec, Float8, Parameters, Raw, Symmetric, Table, has_zero, zero_unit
from kernels.format.layout import Field, StoreFields

RAW_CODES = {"float32": 0, "bfloat16": 1, "float16": 2}
INTEGER_CODES = {8: 3, 4: 4, 3: 5, 2: 6}
FLOAT8_CODES = {4: 7, 5: 8}  # by bits of the exponent
PARAMETERS = {Parameters.UNIT: 0, Parameters.HALF: 1, Parameters.BYTE: 2}
NO_ZERO, STORED, CENTRED = range(3)


class Store(ctypes.Structure):
    _fields_ = [
        *((name, c_int64) for name in ("codes", "scale", "zero", "factor")),
        *((name, c_int32) for name in ("code", "parameters", "zero_kind", "group_tokens", "group_channels", "folds")),
        ("zero_unit", c_float),
        ("num_values", c_int32),
        ("values", POINTER(c_float)),
    ]


class Layer(ctypes.Structure):
    _fields_ = [
        ("k", Store),
        ("v", Store),
        ("norm", c_int64),
        *((name, c_void_p) for name in ("sealed", "open")),
        *((name, c_int64) for name in ("page_bytes", "slot_bytes")),
        *((name, c_int32) for name in ("slot_code", "num_kv_heads", "group", "page_tokens", "head_dim")),
    ]


class Rows(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("entries", "first_entry", "own_tokens", "first_split", "split_row")),
        *((name, c_int32) for name in ("num_rows", "num_splits", "split_pages", "is_observed")),
    ]


class Buffers(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("q", "out", "parts", "shares", "scratch")),
        ("scratch_bytes", c_int64),
    ]


class Linear(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("weights", "bias")),
        *((name, c_int64) for name in ("num_inputs", "num_outputs")),
        ("code", c_int32),
    ]


class Heads(ctypes.Structure):
    _fields_ = [
        (name, c_int32) for name in ("num_heads", "num_kv_heads", "head_dim", "is_rotated", "stores_before_rope")
    ]


class DecoderLayer(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("input_norm", "post_norm", "qk_norm", "qk_balance")),
        *((name, Linear) for name in ("qkv", "output", "gate_up", "down")),
        ("pages", Layer),
        ("heads", Heads),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(DecoderLayer)),
        ("norm", c_void_p),
        ("head", Linear),
        *((name, c_int32) for name in ("num_layers", "hidden_size", "intermediate_size")),
        ("eps", c_float),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("hidden", "cos", "sin", "logits", "activations", "parts", "scratch")),
        ("scratch_bytes", c_int64),
    ]


class Chunk(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("entries", "q", "k", "v", "out", "scratch")),
        ("scratch_bytes", c_int64),
        *((name, c_int32) for name in ("num_context", "num_rows")),
    ]


STRUCTS = (Chunk, Layer, Rows, Buffers, Linear, Heads, DecoderLayer, Model, Step)
STRUCT_BYTES = sum(ctypes.sizeof(struct) for struct in STRUCTS)


def offset(field: Field | None) -> int:
    return -1 if field is None else field.offset


def code_of(codec: Codec, dtype: str) -> int:
    match codec:
        case Raw():
            return RAW_CODES[dtype]
        case Float8():
            return FLOAT8_CODES[codec.exponent_bits]
    return INTEGER_CODES.get(codec.bits, -1)


def store_of(fields: StoreFields, dtype: str, *, is_key: bool) -> Store:
    """K or V of one layer of a model of `dtype`."""
    codec = fields.store.codec
    store = Store(*(offset(field) for field in (fields.codes, fields.scale, fields.zero, fields.factor)))
    store.code = code_of(codec, dtype)
    store.group_tokens, store.group_channels = fields.group_tokens, fields.group_channels
    store.folds = (fields.group_channels if is_key else fields.group_tokens) == 1
    if isinstance(codec, Raw):
        return store
    store.parameters = PARAMETERS[fields.store.parameters]
    if fields.scale is None:
        store.folds = True
    elif isinstance(codec, Centred | Symmetric):
        store.zero_kind, store.zero_unit = CENTRED, codec.centre
    elif has_zero(codec):
        store.zero_kind, store.zero_unit = STORED, zero_unit(codec)
    if isinstance(codec, Table):
        padded = codec.values + (float("nan"),) * ((1 << codec.bits) - len(codec.values))
        store.values, store.num_values, store.folds = (c_float * len(padded))(*padded), len(padded), False
    return store
