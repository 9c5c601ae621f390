"""The compile report: how it reads machine code, and that the kernels compile as kernels.json says."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.kernels.triton.report.cases import Case, covering
from tests.kernels.triton.report.compile import ARCHES, Compiled, Launch
from tests.kernels.triton.report.figures import Demands, Figures, faults, figures, function_at, worse
from tests.kernels.triton.report.sass import parse
from tests.kernels.triton.report.table import Table

ROOT = Path(__file__).parents[3]
# a loop with a slow path behind the kernel's end, and the trap that every kernel ends with
LISTING = """
.text.kernel:
	//## File "/src/kernel.py", line 11
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/               @P0 LDG.E.U8.CONSTANT R2, desc[UR4][R2.64+0x10] ;
.L_x_1:
	//## File "/src/kernel.py", line 20
        /*0020*/                   LDGSTS.E.BYPASS.LTC128B.128 [R62+0x1800], desc[UR14][R12.64] ;
        /*0030*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0040*/         @!UP1 BRA `(.L_x_3) ;
.L_x_2:
	//## File "/src/kernel.py", line 21
        /*0050*/                   I2FP.F32.S32 R5, R6 ;
        /*0060*/              @!P5 BRA `(.L_x_1) ;
	//## File "/src/kernel.py", line 30
        /*0070*/                   I2F.F16 R5, R6 ;
        /*0080*/                   STG.E.128 desc[UR4][R2.64], R8 ;
        /*0090*/                   EXIT ;
.L_x_3:
        /*00a0*/                   SHFL.BFLY PT, R3, R3, 0x2, 0x1f ;
        /*00b0*/                   BRA `(.L_x_2) ;
.L_x_4:
        /*00c0*/                   BRA `(.L_x_4);
        /*00d0*/                   NOP ;
"""


def opcodes(listing: str, number: int = 0) -> list[str]:
    """Of one of the loops, the largest first."""
    program = parse(listing)
    return [program.instructions[place].opcode for place in sorted(program.loops[number])]


def body(*lines: str) -> str:
    """A listing: "label:" or an instruction a line."""
    return "\n".join(line if line.endswith(":") else f"        /*0000*/     {line} ;" for line in lines)


def test_instructions_have_predicate_and_source_line() -> None:
    program = parse(LISTING)
    assert [x.opcode for x in program.instructions[:3]] == ["LDC", "LDG.E.U8.CONSTANT", "LDGSTS.E.BYPASS.LTC128B.128"]
    assert [x.predicate for x in program.instructions[:5]] == ["", "P0", "", "", "!UP1"]
    assert [x.place for x in program.instructions[:3]] == ["kernel.py:11", "kernel.py:11", "kernel.py:20"]
    assert program.instructions[1].operands == "R2, desc[UR4][R2.64+0x10]"
    assert len(program.instructions) == 14


def test_code_behind_the_end_that_jumps_back_belongs_to_the_loop_and_makes_none() -> None:
    program = parse(LISTING)
    assert len(program.loops) == 1
    assert opcodes(LISTING) == [
        "LDGSTS.E.BYPASS.LTC128B.128", "HMMA.16816.F32", "BRA", "I2FP.F32.S32", "BRA", "SHFL.BFLY", "BRA"
    ]  # fmt: skip


def test_nested_loops_are_two_and_the_outer_has_the_inner() -> None:
    listing = body(
        ".L_x_0:", "MOV R1, R2", ".L_x_1:", "FADD R3, R3, R4", "@P0 BRA `(.L_x_1)", "@P1 BRA `(.L_x_0)", "EXIT"
    )
    assert opcodes(listing, 0) == ["MOV", "FADD", "BRA", "BRA"]
    assert opcodes(listing, 1) == ["FADD", "BRA"]


def test_loops_one_after_the_other_are_apart() -> None:
    listing = body(".L_x_0:", "FADD R3, R3, R4", "@P0 BRA `(.L_x_0)", ".L_x_1:", "MOV R1, R2", "MOV R2, R1",
                   "@P0 BRA `(.L_x_1)", "EXIT")  # fmt: skip
    assert [opcodes(listing, number) for number in (0, 1)] == [["MOV", "MOV", "BRA"], ["FADD", "BRA"]]


def test_a_condition_among_the_operands_lets_the_loop_end() -> None:
    listing = body(".L_x_0:", "FADD R3, R3, R4", "BRA.U !UP0, `(.L_x_0)", "MOV R1, R2", "EXIT")
    assert opcodes(listing) == ["FADD", "BRA.U"]


def test_an_endless_loop_has_nothing_behind_it() -> None:
    assert opcodes(body(".L_x_0:", "FADD R3, R3, R4", "BRA `(.L_x_0)", "MOV R1, R2", "@P0 BRA `(.L_x_0)")) == [
        "FADD",
        "BRA",
    ]


def test_a_jump_over_a_loop_is_none() -> None:
    assert parse(body("@P0 BRA `(.L_x_0)", "MOV R1, R2", ".L_x_0:", "EXIT")).loops == ()


def test_a_call_that_never_returns_leaves_the_loop() -> None:
    """As ptxas writes the way out of a loop for sm_80."""
    listing = body(
        ".L_x_9:", "FADD R3, R3, R4", "@!P5 CALL.REL.NOINC `(.L_x_0)", "BRA `(.L_x_9)", ".L_x_0:", "I2F R1, R2", "EXIT"
    )
    assert opcodes(listing) == ["FADD", "CALL.REL.NOINC", "BRA"]


def test_a_function_called_in_the_loop_belongs_to_it() -> None:
    listing = body(".L_x_9:", "FADD R3, R3, R4", "CALL.REL.NOINC `($__internal_0_$div)", "@P0 BRA `(.L_x_9)", "EXIT",
                   "$__internal_0_$div:", "MUFU.RCP R1, R2", "RET.REL.NODEC R2 `(kernel)")  # fmt: skip
    assert opcodes(listing) == ["FADD", "CALL.REL.NOINC", "BRA", "MUFU.RCP", "RET.REL.NODEC"]


@pytest.mark.parametrize(
    "opcode, bits",
    [
        ("LDG.E.U8", 8),
        ("LDG.E.S8.CONSTANT", 8),
        ("LDG.E.U16", 16),
        ("LDG.E", 32),
        ("LDGSTS.E", 32),
        ("LDGSTS.E.64", 64),
        ("LDG.E.EF.64", 64),
        ("LDGSTS.E.BYPASS.LTC128B.128", 128),
        ("LDG.E.LTC128B", 32),
        ("LDG.E.ENL2.256", 256),
        ("LDS.128", 0),
        ("LDSM.16.M88.4", 0),
        ("STG.E.128", 0),
        ("LDGDEPBAR", 0),
        ("LDC.64", 0),
    ],
)
def test_width_of_loads(opcode: str, bits: int) -> None:
    assert parse(body(f"{opcode} R1, R2")).instructions[0].load_bits == bits


@pytest.mark.parametrize("listing, word", [("", "no instructions"), (body("BRX R2 -0x10", "EXIT"), "BRX")])
def test_a_listing_that_cannot_be_read_is_an_error(listing: str, word: str) -> None:
    with pytest.raises(ValueError, match=word):
        parse(listing)


def test_the_innermost_function_of_a_line(tmp_path: Path) -> None:
    file = tmp_path / "kernel.py"
    file.write_text("x = 1\n\n\n@jit\ndef outer():\n    def inner():\n        return 1\n    return inner\n")
    assert [function_at(str(file), line) for line in (1, 5, 7, 8)] == ["", "outer", "inner", "outer"]
    assert function_at(str(tmp_path / "none.py"), 1) == ""


DEMANDS = Demands(matrix=True, no_integer_to_float=True, wide_codes=True, codes_from=("load_codes",))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    file = tmp_path / "tiles.py"
    file.write_text("def load_codes():\n    return tl.load(x)\n    pass\n\ndef load_scale():\n    return tl.load(x)\n")
    return file


def compiled(source: Path, *loop: str, registers: int = 64, stack: int = 0, shared: int = 0) -> Compiled:
    """A kernel with one loop of instructions; before each that is of that function "codes", "rest", which loads none,
    or "scale"."""
    places = {"codes": 2, "rest": 3, "scale": 6}
    lines = [f'//## File "{source}", line {places[x]}' if x in places else f"  /*0000*/  {x} ;" for x in loop]
    end = ["  /*0000*/  @P0 BRA `(.L_x_0) ;", "  /*0000*/  EXIT ;"]
    return Compiled(parse("\n".join([".L_x_0:", *lines, *end])), registers, stack, shared)


GOOD = (
    "codes",
    "LDGSTS.E.BYPASS.128 [R1], desc[UR4][R2.64]",
    "scale",
    "LDG.E.U8 R1, desc[UR4][R2.64]",
    "HMMA.16816 R1",
)


def test_narrow_loads_of_others_are_no_fault(source: Path) -> None:
    assert list(faults(compiled(source, *GOOD, "rest", "LDG.E R1, desc[UR4][R2.64]"), DEMANDS, 90)) == []
    kernel = compiled(source, *GOOD)
    assert list(faults(kernel, DEMANDS, 90)) == []
    assert figures(kernel, DEMANDS) == Figures(64, 0, 0, 0, "HMMA:1", 0, 4, 5, loads="8:1 128:1", codes="128:1")


@pytest.mark.parametrize(
    "kernel, words",
    [
        ({"stack": 8}, "8 bytes of local memory"),
        ({"shared": (227 << 10) + 1}, "sm_90 has 232448"),
        (("STL [R1], R2",), "1 loads and stores"),
        (("LDL.64 R2, [R1]",), "1 loads and stores"),
        (("scale", "I2F.U8 R1, R2"), r"1 I2F.U8 at tiles.py:6 \(load_scale\)"),
        (("codes", "LDG.E R1, desc[UR4][R2.64]"), r"less than 64 bits: 1 LDG.E at tiles.py:2 \(load_codes\)"),
    ],
)
def test_faults(source: Path, kernel: dict[str, int] | tuple[str, ...], words: str) -> None:
    bad = compiled(source, *GOOD, **kernel) if isinstance(kernel, dict) else compiled(source, *GOOD, *kernel)
    (fault,) = faults(bad, DEMANDS, 90)
    assert re.search(words, fault), fault


def test_missing_instructions_are_faults(source: Path) -> None:
    found = list(faults(compiled(source, "scale", "LDG.E.128 R1, desc[UR4][R2.64]"), DEMANDS, 80))
    assert found == ["no matrix instruction", "no load of codes found in load_codes"]


def test_what_has_grown_is_worse() -> None:
    before = Figures(64, 0, 0, 0, "HMMA:1", 0, 100, 200, "128:4", "128:4")
    assert worse(before, before) == []
    assert worse(before, Figures(60, 0, 0, 0, "HMMA:1", 0, 90, 190, "128:4", "128:4")) == []
    assert worse(before, Figures(65, 0, 0, 0, "HMMA:1", 0, 99, 201, "128:4", "128:4")) == [
        "registers 64 -> 65", "instructions 200 -> 201"
    ]  # fmt: skip


def test_a_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    row = Figures(64, 0, 0, 0, "HMMA:1", 0, 100, 200, "128:4", "128:4")
    rows = {("decode int4", 90): row, ("decode int4", 80): row, ("combine", 80): row}
    Table("3.7.1", rows).write(tmp_path / "table.json")
    read = Table.read(tmp_path / "table.json")
    assert (read.triton, read.rows) == ("3.7.1", rows)
    assert [line.split(":")[0] for line in (tmp_path / "table.json").read_text().splitlines()[3:5]] == [
        '"combine"', '"decode int4"'
    ]  # fmt: skip


def test_a_table_with_other_columns_counts_as_none(tmp_path: Path) -> None:
    (tmp_path / "table.json").write_text('{"triton": "3.7.1", "columns": ["registers"], "kernels": {"x": {"80": [1]}}}')
    assert Table.read(tmp_path / "table.json").rows == Table.read(tmp_path / "none.json").rows == {}


def test_the_covering_part_has_every_feature_and_chip() -> None:
    def case(function: str, *features: str) -> Case:
        launch = Launch(f"kernels:{function}", (("features", features),), ())
        chips = [(function, "chip", str(arch)) for arch in ARCHES] if function == "decode" else []
        return Case(function, launch, Demands(), frozenset([(function,), *chips, *((function, x) for x in features)]))

    cases = [case("decode", "a"), case("decode", "a", "b"), case("decode", "c"), case("append"), case("append")]
    pairs = covering(cases)
    assert {arch for chosen, arch in pairs if chosen.name == "decode"} == set(ARCHES)
    assert {"a", "b", "c"} <= {feature for chosen, _ in pairs for feature in chosen.launch.given["features"]}
    assert [chosen.name for chosen, _ in pairs].count("append") == 1
    assert len(pairs) == len(ARCHES) + 1


@pytest.mark.skipif(sys.platform != "linux", reason="Triton is for Linux")
def test_kernels_compile_as_the_table_says(tmp_path: Path) -> None:
    """A covering part of all kernels, in a process where Triton compiles instead of interpreting."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.kernels.triton.report", "--check"],
        cwd=ROOT, env=environment | {"TRITON_CACHE_DIR": str(tmp_path)}, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
