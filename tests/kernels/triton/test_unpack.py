"""The PTX snippets give the numbers of every byte. They are run here by a reading of their few instructions in numpy,
from PTX's specification, since the interpreter knows none."""

import re

import numpy as np
import pytest
import torch

from kernels.triton.unpack import unpack_e4m3, unpack_e5m2, unpack_integers

BYTES = np.arange(256, dtype=np.uint32)
# every byte in each of the four places of a word, among others
WORDS = BYTES | np.roll(BYTES, 1) << 8 | np.roll(BYTES, 7) << 16 | np.roll(BYTES, 50) << 24


def run(snippet: str, word: np.ndarray) -> np.ndarray:
    """fp16 [words, 4]: the two registers that a snippet makes of uint32 words, lower half first."""
    registers = {"$2": word}

    def value(name: str) -> np.ndarray:
        if name in registers:
            return registers[name]
        return np.full_like(word, int(name, 0))

    def halves(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x).view(np.float16).reshape(-1, 2)

    def packed(x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.astype(np.float16)).view(np.uint32).reshape(-1)

    def permute(a: np.ndarray, b: np.ndarray, selector: int) -> np.ndarray:
        pool = [(x >> (8 * place)) & 0xFF for x in (a, b) for place in range(4)]
        chosen = [pool[selector >> (4 * place) & 7] << (8 * place) for place in range(4)]
        return chosen[0] | chosen[1] | chosen[2] | chosen[3]

    for line in re.findall(r"^\s*([a-z][\w.]+ [^;]+);", snippet, re.MULTILINE):
        operation, rest = line.split(" ", 1)
        target, *sources = [word.strip() for word in rest.split(",")]
        match operation.split(".")[0], sources:
            case "mov", [x]:
                registers[target] = value(x)
            case "shr", [x, count]:
                registers[target] = value(x) >> value(count)
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
            case _:
                raise AssertionError(line)
    return np.concatenate([halves(registers["$0"]), halves(registers["$1"])], axis=1)


def in_places(numbers: np.ndarray) -> np.ndarray:
    """Of the four bytes of each word, given the number of each byte."""
    return np.stack([numbers[(WORDS >> (8 * place)) & 0xFF] for place in range(4)], axis=1)


@pytest.mark.parametrize("bits, plane", [(8, 0), (4, 0), (4, 1), (2, 0), (2, 1), (2, 2), (2, 3)])
def test_integers(bits: int, plane: int):
    codes = (BYTES >> (bits * plane)) & (2**bits - 1)
    assert np.array_equal(run(unpack_integers(bits, plane), WORDS), in_places(codes.astype(np.float64)))


@pytest.mark.parametrize(
    "snippet, dtype", [(unpack_e4m3(), torch.float8_e4m3fn), (unpack_e5m2(), torch.float8_e5m2)], ids=["e4m3", "e5m2"]
)
def test_float8(snippet: str, dtype: torch.dtype):
    """Also the sign of zero. Codes that stand for no finite number are never stored."""
    numbers = torch.arange(256, dtype=torch.uint8).view(dtype).double().numpy()
    expected, actual = in_places(numbers), run(snippet, WORDS).astype(np.float64)
    is_finite = np.isfinite(expected)
    assert np.array_equal(actual[is_finite], expected[is_finite])
    assert np.array_equal(np.signbit(actual[is_finite]), np.signbit(expected[is_finite]))
    assert is_finite.mean() > 0.95
