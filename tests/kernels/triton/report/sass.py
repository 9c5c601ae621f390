"""Machine code as `nvdisasm -g -c` lists it: instructions with the source line that each comes from, and loops.

Triton compiles with line information and keeps the innermost place only, so an instruction that comes of a device
function carries that function's lines.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

WIDTHS = {"U8": 8, "S8": 8, "U16": 16, "S16": 16, "64": 64, "128": 128, "256": 256}
GLOBAL_LOADS = ("LDG", "LDGSTS", "LD")
BULK_LOADS = ("UBLKCP", "UTMALDG")
JUMPS = ("BRA", "JMP", "CALL", "EXIT", "RET")
INDIRECT = ("BRX", "BRXU", "JMX", "JMXU")
_LABEL = re.compile(r"^([\w.$]+):")
_PLACE = re.compile(r'//## File "([^"]*)", line (\d+)')
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@(!?U?P\w+)\s+)?([A-Z][\w.]*)\s*([^;]*);")
_TARGET = re.compile(r"`\(([\w.$]+)\)")


@dataclass(frozen=True)
class Instruction:
    """`predicate` is empty where it always runs; `file` is empty where no source line is known."""

    opcode: str
    operands: str
    predicate: str
    file: str
    line: int

    @property
    def place(self) -> str:
        return f"{Path(self.file).name}:{self.line}"

    @property
    def name(self) -> str:
        return self.opcode.split(".")[0]

    @property
    def load_bits(self) -> int:
        """Bits a thread loads from global memory; 0 where this is no such load, or a bulk copy."""
        if self.name not in GLOBAL_LOADS:
            return 0
        return next((WIDTHS[part] for part in self.opcode.split(".") if part in WIDTHS), 32)

    @property
    def target(self) -> str | None:
        """The label that this may go on at."""
        match = _TARGET.search(self.operands) if self.name in ("BRA", "JMP", "CALL") else None
        return match[1] if match else None

    @property
    def can_fall_through(self) -> bool:
        """Whether the next instruction may follow. `BRA.U !UP0, (label)` has its condition among the operands."""
        if self.name in ("BRA", "JMP"):
            return bool(self.predicate) or not self.operands.strip().startswith("`")
        return bool(self.predicate) or self.name not in ("EXIT", "RET")


@dataclass(frozen=True)
class Program:
    """`labels`: the place in `instructions` that each label stands before."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    @cached_property
    def _blocks(self) -> dict[int, range]:
        """Instructions that are run one after the other, by the first of them."""
        starts = {0, *self.labels.values()}
        for place, instruction in enumerate(self.instructions):
            if instruction.name in JUMPS:
                starts.add(place + 1)
        size = len(self.instructions)
        ordered = sorted(start for start in starts if start < size)
        return {start: range(start, stop) for start, stop in zip(ordered, [*ordered[1:], size], strict=True)}

    def _last(self, start: int) -> Instruction:
        return self.instructions[self._blocks[start][-1]]

    @cached_property
    def _edges(self) -> dict[int, tuple[int, ...]]:
        """The blocks that may follow each."""
        edges = {}
        for start, block in self._blocks.items():
            last = self._last(start)
            follow = [self.labels[last.target]] if last.target else []
            if last.can_fall_through:
                follow.append(block.stop)
            edges[start] = tuple(place for place in follow if place in self._blocks)
        return edges

    @cached_property
    def loops(self) -> tuple[frozenset[int], ...]:
        """The instructions of each loop, largest loop first, what it calls included.

        A loop is what can reach its end without passing its head, where no way to the end avoids the head (natural
        loops). Code moved behind the kernel's end that jumps back into the middle is therefore no loop.
        """
        heads: dict[int, set[int]] = {}
        reachable = self._reach(0)
        for start in reachable:
            for head in self._edges[start]:
                if start not in self._reach(0, without=head):
                    heads.setdefault(head, {head}).update(self._reaching(start, without=head))
        blocks = (self._with_calls(loop) for loop in heads.values())
        found = (frozenset(place for start in loop for place in self._blocks[start]) for loop in blocks)
        return tuple(sorted(found, key=len, reverse=True))

    def _reach(self, start: int, without: int | None = None) -> set[int]:
        seen, todo = set(), [start]
        while todo:
            block = todo.pop()
            if block not in seen and block != without:
                seen.add(block)
                todo.extend(self._edges[block])
        return seen

    def _reaching(self, end: int, without: int) -> set[int]:
        seen, todo = {without}, [end]
        while todo:
            block = todo.pop()
            if block not in seen:
                seen.add(block)
                todo.extend(start for start, follow in self._edges.items() if block in follow)
        return seen

    def _with_calls(self, loop: set[int]) -> set[int]:
        """A call whose code never returns is a jump out of the loop, not a part of it."""
        blocks = set(loop)
        for start in loop:
            last = self._last(start)
            if last.name == "CALL" and last.target:
                called = self._reach(self.labels[last.target])
                if any(self._last(block).name == "RET" for block in called):
                    blocks |= called
        return blocks


def parse(listing: str) -> Program:
    """Raises ValueError for a listing without instructions, or with branches whose targets it does not show."""
    instructions, labels = [], {}
    file, line = "", 0
    for text in listing.splitlines():
        if match := _LABEL.match(text):
            labels[match[1]] = len(instructions)
        elif match := _PLACE.search(text):
            file, line = match[1], int(match[2])
        elif match := _INSTRUCTION.match(text):
            instructions.append(Instruction(match[2], match[3].strip(), match[1] or "", file, line))
    if not instructions:
        raise ValueError("the listing has no instructions")
    if found := next((x for x in instructions if x.name in INDIRECT), None):
        raise ValueError(f"{found.opcode} has targets that the listing does not show, so loops cannot be found")
    return Program(tuple(instructions), labels)
