"""The PTX snippets give the numbers of every byte. They are run here by a reading of their few instructions in numpy,
from PTX's specification, since the interpreter knows none."""

import re

import numpy as np
import pytest
import torch

from kernels.triton.unpack import unpack_e4m3, unpack_e5m2, unpack_integers, unpack_parameters

BYTES = np.arange(256, dtype=np.uint32)
# every byte in each of the four places of a word, among others
WORDS = BYTES | np.roll(BYTES, 1) << 8 | np.roll(BYTES, 7) << 16 | np.roll(BYTES, 50) << 24


def halves(x: np.ndarray) -> np.ndarray:
    """fp16 [words, 2] of uint32 registers, lower half first."""
    return np.ascontiguousarray(x).view(np.float16).reshape(-1, 2)


def run(snippet: str, inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All registers behind a snippet, given uint32 ones; halves of 16 bits as fp16."""
    registers = dict(inputs)
    some = next(iter(inputs.values()))

    def value(name: str) -> np.ndarray:
        if name in registers:
            return registers[name]
        return np.full_like(some, int(name, 0))

    def packed(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.astype(np.float16)).view(np.uint32).reshape(-1)

    def permute(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
        pool = [(x >> (8 * place)) & 0xFF for x in (a, b) for place in range(4)]
        chosen = [pool[selector >> (4 * place) & 7] << (8 * place) for place in range(4)]
        return chosen[0] | chosen[1] | chosen[2] | chosen[3]

    for line in re.findall(r"^\s*([a-z][\w.]+ [^;]+);", snippet, re.MULTILINE):
        operation, rest = line.split(" ", 1)
        if pair := re.fullmatch(r"\{(\S+), (\S+)\}, (\S+)", rest):
            low, high, source = pair.groups()
            registers[low], registers[high] = halves(value(source)).T
            continue
        target, *sources = [word.strip() for word in rest.split(",")]
        match operation.split(".")[0], sources:
            case "mov", [x]:
                registers[target] = value(x)
            case "shr", [x, count]:
                registers[target] = value(x) >> value(count)
            case "shl", [x, count]:
                registers[target] = value(x) << value(count)
            case "xor", [x, y]:
                registers[target] = value(x) ^ value(y)
            case "and", [x, y]:
                registers[target] = value(x) & value(y)
            case "or", [x, y]:
                registers[target] = value(x) | value(y)
            case "prmt", [x, y, selector]:
                registers[target] = permute(value(x), value(y), int(selector, 0))
            case "add", [x, y]:
                registers[target] = packed(halves(value(x)) + halves(value(y)))
            case "mul", [x, y]:
                registers[target] = packed(halves(value(x)) * halves(value(y)))
            case "fma", [x, y, z]:  # exact in float64, so there is one rounding
                x, y, z = (halves(value(name)).astype(np.float64) for name in (x, y, z))
                registers[target] = packed(x * y + z)
            case _:
                raise AssertionError(line)
    return registers


def unpacked(snippet: str) -> np.ndarray:
    """fp16 [words, 4]: the numbers of the bytes of `WORDS`."""
    registers = run(snippet, {"$2": WORDS})
    return np.concatenate([halves(registers["$0"]), halves(registers["$1"])], axis=1)


def in_places(numbers: np.ndarray) -> np.ndarray:
    """Of the four bytes of each word, given the number of each byte."""
    return np.stack([numbers[(WORDS >> (8 * place)) & 0xFF] for place in range(4)], axis=1)


@pytest.mark.parametrize("bits, plane", [(8, 0), (4, 0), (4, 1), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_integers(bits: int, plane: int):
    codes = (BYTES >> (bits * plane)) & (2**bits - 1)
    assert np.array_equal(unpacked(unpack_integers(bits, plane)), in_places(codes.astype(np.float64)))


@pytest.mark.parametrize(
    "snippet, dtype", [(unpack_e4m3(), torch.float8_e4m3fn), (unpack_e5m2(), torch.float8_e5m2)], ids=["e4m3", "e5m2"]
)
def test_float8(snippet: str, dtype: torch.dtype):
    """Also the sign of zero. Codes that stand for no finite number are never stored."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).double().numpy()
    expected, actual = in_places(numbers), unpacked(snippet).astype(np.float64)
    is_finite = np.isfinite(expected)
    assert np.array_equal(actual[is_finite], expected[is_finite])
    assert np.array_equal(np.signbit(actual[is_finite]), np.signbit(expected[is_finite]))
    assert is_finite.mean() > 0.95


@pytest.mark.parametrize("max_code", [3, 7, 15])
def test_parameters_in_bytes(max_code: int):
    """A scale is a fp16 number without its sign and its six lower bits; a zero is signed and counts 32nds of the range
    of codes (docs/kv_layout.md), here in scales, rounded to fp16 once."""
    zeros = np.roll(WORDS, 111)
    registers = run(unpack_parameters(max_code / 32), {"$8": WORDS, "$9": zeros})
    for place in range(4):
        scale = (((WORDS >> (8 * place)) & 0xFF) << 6).astype(np.uint16).view(np.float16)
        signed = ((zeros >> (8 * place)) & 0xFF).astype(np.uint8).view(np.int8)
        is_finite = np.isfinite(scale)
        expected = (scale.astype(np.float64) * signed * max_code / 32).astype(np.float16)
        assert np.array_equal(registers[f"${place}"][is_finite], scale[is_finite])
        assert np.array_equal(registers[f"${4 + place}"][is_finite], expected[is_finite])
        assert is_finite.mean() > 0.9


def test_a_unit_of_zeros_that_fp16_cannot_take_is_refused():
    with pytest.raises(ValueError, match="-9180.0 is no number of fp16"):
        unpack_parameters(255 / 32)
