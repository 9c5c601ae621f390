"""Reads a GGUF file: metadata, the list of tensors, and tensors made into float32.

The `gguf` package has a reader too, but it builds an array object for each string of the vocabulary, which takes
3 seconds; its tables and its dequantization are used here.
"""

import math
import struct
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFValueType
from gguf.constants import GGML_QUANT_SIZES, GGUF_DEFAULT_ALIGNMENT
from gguf.quants import dequantize, quant_shape_to_byte_shape

from engine.errors import StartupError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
SCALAR_CODES = {
    GGUFValueType.UINT8: "B",
    GGUFValueType.INT8: "b",
    GGUFValueType.UINT16: "H",
    GGUFValueType.INT16: "h",
    GGUFValueType.UINT32: "I",
    GGUFValueType.INT32: "i",
    GGUFValueType.FLOAT32: "f",
    GGUFValueType.BOOL: "?",
    GGUFValueType.UINT64: "Q",
    GGUFValueType.INT64: "q",
    GGUFValueType.FLOAT64: "d",
}


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """`shape` is row-major, as PyTorch writes it. `offset` and `num_bytes` say where the data is in the file."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufFile:
    """Memory-maps the file and reads its head. Raises StartupError if it is truncated or not GGUF."""

    def __init__(self, path: Path):
        self.path = path
        try:
            self._data = np.memmap(path, mode="r")
            head = _Head(self._data)
            self.metadata = head.metadata
            self.tensors = head.tensors
        except (OSError, ValueError, struct.error, OverflowError, MemoryError) as error:
            raise StartupError(f"{path}: not a readable GGUF file ({error}); expected version 2 or 3") from error
        end = max((info.offset + info.num_bytes for info in self.tensors.values()), default=0)
        if end > len(self._data):
            raise StartupError(f"{path}: file is truncated, has {len(self._data)} bytes, its header expects {end}")

    def text(self, key: str) -> str:
        value = self.metadata.get(key)
        if not isinstance(value, str):
            raise StartupError(f"{self.path}: metadata {key} is missing, expected text")
        return value

    def array(self, key: str) -> list[Any]:
        value = self.metadata.get(key)
        if not isinstance(value, list):
            raise StartupError(f"{self.path}: metadata {key} is missing, expected an array")
        return value

    def tensor(self, name: str) -> "np.ndarray[Any, np.dtype[np.float32]]":
        """The tensor as float32, in its row-major shape, owning its memory."""
        info = self.tensors[name]
        raw = self._data[info.offset : info.offset + info.num_bytes]
        blocks = raw.reshape(quant_shape_to_byte_shape(info.shape, info.type))
        if info.type == GGMLQuantizationType.F32:
            return np.array(blocks.view(np.float32))
        values: np.ndarray[Any, np.dtype[np.float32]] = dequantize(blocks, info.type)
        return values


class _Head:
    """Everything before the tensor data, all of it little-endian."""

    def __init__(self, data: "np.ndarray[Any, np.dtype[np.uint8]]"):
        self._data = data
        self._at = 0
        if self._take(4) != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self._scalar("I")
        if version not in VERSIONS:
            raise ValueError(f"its version is {version}")
        num_tensors, num_metadata = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_metadata):
            key = self._string()
            self.metadata[key] = self._value(GGUFValueType(self._scalar("I")))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = self.metadata.get("general.alignment", GGUF_DEFAULT_ALIGNMENT)
        start = -(-self._at // alignment) * alignment
        self.tensors = {name: replace(info, offset=start + info.offset) for name, info in infos}

    def _take(self, num_bytes: int) -> bytes:
        start, self._at = self._at, self._at + num_bytes
        if self._at > len(self._data):
            raise ValueError("it ends inside its header")
        return self._data[start : self._at].tobytes()

    def _scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self._take(struct.calcsize("<" + code)))[0]

    def _string(self) -> str:
        return self._take(self._scalar("Q")).decode()

    def _value(self, type: GGUFValueType) -> Any:
        if type == GGUFValueType.STRING:
            return self._string()
        if type != GGUFValueType.ARRAY:
            return self._scalar(SCALAR_CODES[type])
        item, count = GGUFValueType(self._scalar("I")), self._scalar("Q")
        if item in SCALAR_CODES:
            format = f"<{count}{SCALAR_CODES[item]}"
            return list(struct.unpack(format, self._take(struct.calcsize(format))))
        return [self._value(item) for _ in range(count)]

    def _tensor_info(self) -> tuple[str, TensorInfo]:
        name = self._string()
        # GGUF lists the fastest axis first.
        shape = tuple(self._scalar("Q") for _ in range(self._scalar("I")))[::-1]
        type = GGMLQuantizationType(self._scalar("I"))
        block_elements, block_bytes = GGML_QUANT_SIZES[type]
        num_bytes = math.prod(shape) // block_elements * block_bytes
        return name, TensorInfo(shape=shape, type=type, offset=self._scalar("Q"), num_bytes=num_bytes)
