"""Tool calls found in an answer's text as it grows."""

import json
import secrets
from collections.abc import Collection, Generator
from dataclasses import dataclass

from server.tools.format import ToolFormat

ARGUMENTS_KEYS = ("arguments", "parameters")
WHITE = " \t\r\n"
Reader = Generator[None, str, str]
Steps = Generator[None, str, None]


@dataclass(frozen=True, slots=True)
class Content:
    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """Comes once for each call, before its arguments. `index` counts the calls of an answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of the JSON text of a call's arguments, as the model wrote it."""

    index: int
    text: str


Piece = Content | CallStart | CallArguments


class _NoCall(Exception):
    """What was read cannot be a call."""


class ToolParser:
    """Splits one answer into content and calls of the tools in `names`; does not depend on how its text arrives.

    Held back is only what may turn out to be a call or a marker, and white space that may be next to one: white space
    that touches a call belongs to it. A call starts as soon as its name is known and its arguments begin; where the
    arguments come first they wait for the name.

    What turns out not to be a call is content, markers included: broken JSON, the name of no tool, arguments that are
    no object, an end before the call started. A call that has started stays: where the text ends inside of it, or is
    broken there, its arguments are what the model wrote up to the bracket that balances them, and may not be JSON. A
    call without arguments has those of an empty object. Other members of the call's object are ignored.
    """

    def __init__(self, format: ToolFormat, names: Collection[str]):
        self.num_calls = 0
        self._format = format
        self._names = frozenset(names)
        self._pieces: list[Piece] = []
        self._run: list[str] = []  # text that belongs together: content, or arguments of the call `_run_index`
        self._run_index: int | None = None
        self._held: list[str] = []
        self._again: list[str] = []  # to be read once more, the next one last
        self._is_in_arguments = False
        self._touches_call = False
        self._awaits_closing = False
        self._steps = self._read_answer()
        next(self._steps)

    def feed(self, text: str) -> list[Piece]:
        """Take more text; return what is now certain, maybe nothing."""
        for char in text:
            self._steps.send(char)
        return self._take()

    def finish(self) -> list[Piece]:
        """The rest: what was held back in case more would come."""
        self._steps.close()
        # Of a call that is complete the closing marker may have been cut.
        if not self._awaits_closing or not self._format.closing.startswith("".join(self._held).strip(WHITE)):
            self._release_all()
        return self._take()

    def _read_answer(self) -> Steps:
        if self._format.opening:
            while True:
                yield from self._until_opening()
                if (yield from self._call()):
                    self._awaits_closing = True
                    yield from self._optional(self._format.closing)
                    self._awaits_closing = False
        yield from self._optional(self._format.optional_opening)
        while (yield from self._call()):
            yield from self._optional(self._format.separator)
        while True:
            char = yield from self._char()
            if char not in WHITE or not self._touches_call:
                self._release_all()

    def _until_opening(self) -> Steps:
        """Read up to the opening marker, which has its first character only once; release what is before it."""
        marker = self._format.opening
        num_matched = 0
        while num_matched < len(marker):
            char = yield from self._char()
            was_begun = num_matched > 0
            num_matched = num_matched + 1 if char == marker[num_matched] else int(char == marker[0])
            if num_matched <= 1 and (was_begun or char not in WHITE):
                begun = self._held[len(self._held) - num_matched :]
                del self._held[len(self._held) - num_matched :]
                self._release()
                self._held += begun

    def _optional(self, marker: str) -> Steps:
        """Read white space and `marker`, if they come next; else nothing."""
        start = len(self._held)
        char = yield from self._solid()
        for index, expected in enumerate(marker):
            if index:
                char = yield from self._char()
            if char != expected:
                self._unread(start)
                return
        if self._touches_call:
            self._held.clear()

    def _call(self) -> Generator[None, str, bool]:
        """Read the object of a call; whether it was one. Before it only markers and white space are held."""
        num_before = self.num_calls
        try:
            yield from self._object()
            self._held.clear()
        except _NoCall:
            self._unread(len(self._held) - 1)
            self._release()
        return self.num_calls > num_before

    def _object(self) -> Steps:
        if (yield from self._solid()) != "{":
            raise _NoCall
        name = arguments = None
        is_started = False
        char = yield from self._solid()
        while char != "}":
            key = yield from self._string(char)
            if (yield from self._solid()) != ":":
                raise _NoCall
            char = yield from self._solid()
            if key == "name" and not is_started:
                name = yield from self._string(char)
                if name not in self._names:
                    raise _NoCall
                if is_started := arguments is not None:
                    self._start(name, arguments or "")
            elif key in ARGUMENTS_KEYS and not is_started:
                if char != "{":
                    raise _NoCall
                if is_started := name is not None:
                    self._start(name or "", char)
                    self._is_in_arguments = True
                    yield from self._brackets()
                    self._is_in_arguments = False
                else:
                    start = len(self._held) - 1
                    yield from self._brackets()
                    arguments = "".join(self._held[start:])
            else:
                yield from self._value(char)
            char = yield from self._solid()
            if char == ",":
                char = yield from self._solid()
            elif char != "}":
                raise _NoCall
        if name is None:
            raise _NoCall
        if not is_started:
            self._start(name, "{}")

    def _string(self, char: str) -> Reader:
        """The string whose first quote is `char`."""
        start = len(self._held) - 1
        if char != '"':
            raise _NoCall
        yield from self._quoted()
        try:
            return str(json.loads("".join(self._held[start:])))
        except ValueError:
            raise _NoCall from None

    def _value(self, char: str) -> Steps:
        """The rest of a value that begins with `char`."""
        if char == '"':
            yield from self._quoted()
        elif char in "{[":
            yield from self._brackets()
        else:
            while (yield from self._char()) not in ",}" + WHITE:
                pass
            self._unread(len(self._held) - 1)

    def _quoted(self) -> Steps:
        while (char := (yield from self._char())) != '"':
            if char == "\\":
                yield from self._char()

    def _brackets(self) -> Steps:
        depth = 1
        while depth:
            char = yield from self._char()
            if char == '"':
                yield from self._quoted()
            else:
                depth += (char in "{[") - (char in "}]")

    def _solid(self) -> Reader:
        """The next character that is not white space."""
        while (char := (yield from self._char())) in WHITE:
            pass
        return char

    def _char(self) -> Reader:
        """The next character. It is held, or it is one more of the arguments."""
        char = self._again.pop() if self._again else (yield)
        if self._is_in_arguments:
            self._add(char, self.num_calls - 1)
        else:
            self._held.append(char)
        return char

    def _unread(self, start: int) -> None:
        """Let what is held from `start` on be read again."""
        self._again += reversed(self._held[start:])
        del self._held[start:]

    def _start(self, name: str, arguments: str) -> None:
        self._flush()
        self._pieces.append(CallStart(self.num_calls, f"call_{secrets.token_hex(12)}", name))
        self._add(arguments, self.num_calls)
        self.num_calls += 1
        self._held.clear()
        self._touches_call = True

    def _release(self) -> None:
        """What is held is content, but for white space at its end, which a call may follow."""
        text = "".join(self._held)
        num_solid = len(text.rstrip(WHITE))
        after = self._held[num_solid:]
        del self._held[num_solid:]
        self._release_all()
        self._held = after

    def _release_all(self) -> None:
        text = "".join(self._held)
        self._held.clear()
        if self._touches_call:
            text = text.lstrip(WHITE)
        if text:
            self._add(text, None)
            self._touches_call = False

    def _add(self, text: str, index: int | None) -> None:
        if index != self._run_index:
            self._flush()
        self._run.append(text)
        self._run_index = index

    def _flush(self) -> None:
        if self._run:
            text = "".join(self._run)
            self._pieces.append(Content(text) if self._run_index is None else CallArguments(self._run_index, text))
            self._run.clear()

    def _take(self) -> list[Piece]:
        self._flush()
        pieces, self._pieces = self._pieces, []
        return pieces
