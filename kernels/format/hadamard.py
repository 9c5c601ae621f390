"""The orthonormal Hadamard rotation of a head's channels (Sylvester's construction)."""

import math


def hadamard(size: int) -> list[list[float]]:
    """`size` x `size`, symmetric and its own inverse. Where `size` is no power of two: one block of the largest power
    of two that divides it, repeated along the diagonal."""
    block = size & -size
    value = 1 / math.sqrt(block)

    def entry(row: int, column: int) -> float:
        if row // block != column // block:
            return 0.0
        return -value if bin((row % block) & (column % block)).count("1") % 2 else value

    return [[entry(row, column) for column in range(size)] for row in range(size)]
