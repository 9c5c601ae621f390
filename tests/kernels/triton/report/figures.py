"""What counts in a kernel's machine code, what is wrong with it, and what has become worse."""

import ast
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from tests.kernels.triton.report.compile import Compiled
from tests.kernels.triton.report.sass import BULK_LOADS, Instruction

MATRIX = ("HMMA", "HGMMA", "IMMA", "IGMMA", "QMMA", "QGMMA", "OMMA", "UTCHMMA", "UTCIMMA", "UTCQMMA", "UTCOMMA")
INTEGER_TO_FLOAT = ("I2F", "I2FP", "UI2F", "UI2FP")
LOCAL = ("LDL", "STL")
NARROWEST_CODES = 64
# bytes that a block may have: CUDA programming guide, "Compute Capabilities", maximum per thread block
SHARED_LIMIT = {80: 163 << 10, 86: 99 << 10, 89: 99 << 10, 90: 227 << 10, 100: 227 << 10}
BETTER_IF_LESS = ("registers", "shared", "loop", "instructions")


@dataclass(frozen=True)
class Demands:
    """What the machine code must be like, beside fitting in the chip. `wide_codes`: loads of codes have at least 64
    bits; `codes_from`: the device functions that load codes, where there are any."""

    matrix: bool = False
    no_integer_to_float: bool = False
    wide_codes: bool = False
    codes_from: tuple[str, ...] = ()


@dataclass(frozen=True)
class Figures:
    """`stack`: bytes of local memory a thread; `local`: instructions that read or write it. `matrix`: products, as
    "opcode:number". `i2f`: conversions of integers inside loops. `loop`: instructions of the largest loop that loads
    codes, or of the largest. `loads`, `codes`: instructions that load from global memory, and those of them that load
    codes, as "bits:number"."""

    registers: int
    shared: int
    stack: int
    local: int
    matrix: str
    i2f: int
    loop: int
    instructions: int
    loads: str
    codes: str


def figures(compiled: Compiled, demands: Demands) -> Figures:
    program = compiled.program
    names = Counter(instruction.name for instruction in program.instructions)
    return Figures(
        registers=compiled.registers,
        shared=compiled.shared,
        stack=compiled.stack,
        local=sum(names[name] for name in LOCAL),
        matrix=" ".join(f"{name}:{names[name]}" for name in MATRIX if names[name]),
        i2f=len(list(conversions(compiled))),
        loop=len(tile_loop(compiled, demands)),
        instructions=len(program.instructions),
        loads=_widths(program.instructions),
        codes=_widths(code_loads(compiled, demands)),
    )


def faults(compiled: Compiled, demands: Demands, arch: int) -> Iterator[str]:
    """What must not be, in words that name the source line where one is to blame."""
    found = figures(compiled, demands)
    if found.stack or found.local:
        yield f"registers are spilled: {found.stack} bytes of local memory, {found.local} loads and stores"
    if found.shared > SHARED_LIMIT[arch]:
        yield f"{found.shared} bytes of shared memory, sm_{arch} has {SHARED_LIMIT[arch]}"
    if demands.matrix and not found.matrix:
        yield "no matrix instruction"
    if demands.no_integer_to_float and found.i2f:
        yield f"integers are converted in a loop: {_places(conversions(compiled))}"
    if demands.wide_codes:
        loads = code_loads(compiled, demands)
        narrow = [load for load in loads if 0 < load.load_bits < NARROWEST_CODES]
        if not loads:
            yield f"no load of codes found in {', '.join(demands.codes_from)}"
        if narrow:
            yield f"codes are loaded by less than {NARROWEST_CODES} bits: {_places(narrow)}"


def worse(before: Figures, now: Figures) -> list[str]:
    """The figures that have grown."""
    old, new = asdict(before), asdict(now)
    return [f"{name} {old[name]} -> {new[name]}" for name in BETTER_IF_LESS if new[name] > old[name]]


def conversions(compiled: Compiled) -> Iterator[Instruction]:
    """Those of integers to floats inside loops."""
    looped = frozenset().union(*compiled.program.loops)
    for place in sorted(looped):
        if compiled.program.instructions[place].name in INTEGER_TO_FLOAT:
            yield compiled.program.instructions[place]


def code_loads(compiled: Compiled, demands: Demands) -> list[Instruction]:
    return [instruction for instruction in compiled.program.instructions if _loads_codes(instruction, demands)]


def tile_loop(compiled: Compiled, demands: Demands) -> frozenset[int]:
    """The largest loop that loads codes; the largest one where none does."""
    program = compiled.program
    codes = (loop for loop in program.loops if any(_loads_codes(program.instructions[i], demands) for i in loop))
    return next(codes, next(iter(program.loops), frozenset()))


def _loads_codes(instruction: Instruction, demands: Demands) -> bool:
    """By its source line, which must have a call of `load`: where only the file changes, nvdisasm names no new place,
    and the load of a page's id in a line 79 seemed to be of line 79 of the file before."""
    is_load = instruction.load_bits > 0 or instruction.name in BULK_LOADS
    where = instruction.file, instruction.line
    return is_load and function_at(*where) in demands.codes_from and _has_load(*where)


def _widths(instructions: tuple[Instruction, ...] | list[Instruction]) -> str:
    """ "8:64 128:26 bulk:2"."""
    counts = Counter(instruction.load_bits for instruction in instructions if instruction.load_bits)
    bulk = sum(instruction.name in BULK_LOADS for instruction in instructions)
    parts = [f"{bits}:{count}" for bits, count in sorted(counts.items())]
    return " ".join(parts + ([f"bulk:{bulk}"] if bulk else []))


def _places(instructions: Iterator[Instruction] | list[Instruction]) -> str:
    counts = Counter(f"{x.opcode} at {x.place} ({function_at(x.file, x.line)})" for x in instructions)
    return ", ".join(f"{count} {place}" for place, count in counts.most_common(6))


def function_at(file: str, line: int) -> str:
    """The function that a line belongs to; empty where there is none."""
    inside = [(start, name) for start, stop, name in _functions(file) if start <= line <= stop]
    return max(inside, default=(0, ""))[1]


def _has_load(file: str, line: int) -> bool:
    return any(start <= line <= stop for start, stop in _loads(file))


@cache
def _loads(file: str) -> tuple[tuple[int, int], ...]:
    calls = [node for node in ast.walk(ast.parse(Path(file).read_text())) if isinstance(node, ast.Call)]
    found = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "load"]
    return tuple((call.lineno, call.end_lineno or call.lineno) for call in found)


@cache
def _functions(file: str) -> tuple[tuple[int, int, str], ...]:
    path = Path(file)
    if not path.is_file():
        return ()
    nodes = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)]
    return tuple((node.lineno, node.end_lineno or node.lineno, node.name) for node in nodes)
