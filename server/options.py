"""Command-line options and environment variables made from the fields of a config dataclass."""

import argparse
import dataclasses
import re
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

from engine.config import parse_bytes
from engine.errors import StartupError

if typing.TYPE_CHECKING:
    Commands = argparse._SubParsersAction["Parser"]

ConfigT = TypeVar("ConfigT")
DTYPES = ("auto", "float32", "bfloat16", "float16")
BOOLEANS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclasses.dataclass(frozen=True, slots=True)
class Option:
    """One option: `name` is the field's; `read` turns its text into a value or raises ValueError with what it takes."""

    name: str
    group: str
    help: str
    default: Any
    read: Callable[[str], Any]
    is_flag: bool
    choices: tuple[str, ...] = ()
    fixed_by: str | None = None

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return "QUIRE_" + self.name.upper()

    def text(self, environ: Mapping[str, str]) -> str | None:
        """What the environment gives. An empty variable is none: Compose passes those that are not set as empty."""
        return environ.get(self.variable) or None

    def add_to(self, group: "argparse._ArgumentGroup") -> None:
        default = (
            "" if self.default is None else f"default: {str(self.default).lower() if self.is_flag else self.default}; "
        )
        text = f"{self.help} [{default}{self.variable}]".replace("%", "%%")
        metavar = "{" + ",".join(self.choices) + "}" if self.choices else "X"
        if self.is_flag:
            group.add_argument(self.flag, help=text, action=argparse.BooleanOptionalAction, default=None)
        else:
            group.add_argument(self.flag, help=text, metavar=metavar, default=None)

    def resolve(self, given: Any, environ: Mapping[str, str]) -> Any:
        """The value from the command line, else from the environment, else the default. Raises StartupError."""
        if isinstance(given, bool):
            return given
        source, text = (self.flag, given) if given is not None else (self.variable, self.text(environ))
        if text is None:
            return self.default
        try:
            return self.read(text)
        except ValueError as error:
            raise StartupError(f"{source} is {text!r}; it must be {error}") from None


def options_of(config: type[Any]) -> list[Option]:
    """The options of a config dataclass, in order: fields made with `engine.config.option`."""
    hints = typing.get_type_hints(config)
    found = []
    for field in dataclasses.fields(config):
        if "help" in field.metadata:
            kind, meta = _kind(hints[field.name]), field.metadata
            choices = _choices(meta["choices"]) if "choices" in meta else ()
            read = _reader(kind, choices, meta.get("parse"))
            found.append(
                Option(
                    field.name,
                    meta["group"],
                    meta["help"],
                    field.default,
                    read,
                    kind is bool,
                    choices,
                    meta.get("fixed_by"),
                )
            )
    return found


def add_options(parser: argparse.ArgumentParser, *configs: type[Any]) -> None:
    """The options of config dataclasses, in their groups."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for config in configs:
        for option in options_of(config):
            if option.group not in groups:
                groups[option.group] = parser.add_argument_group(option.group)
            option.add_to(groups[option.group])


def build(config: type[ConfigT], args: argparse.Namespace, environ: Mapping[str, str], **more: Any) -> ConfigT:
    """A config from parsed arguments and the environment. Raises StartupError naming what is wrong."""
    values = {option.name: option.resolve(getattr(args, option.name), environ) for option in options_of(config)}
    for option in options_of(config):
        if option.fixed_by is not None and values[option.fixed_by] is not None:
            _refuse(option, getattr(args, option.name), environ)
    try:
        return config(**values, **more)
    except StartupError as error:
        message = str(error)
        for option in options_of(config):
            # The config speaks of options; whoever set a variable looks for the variable's name.
            if getattr(args, option.name) is None and option.text(environ) is not None:
                message = re.sub(rf"{option.flag}\b(?!-)", option.variable, message)
        raise StartupError(message) from None


def _refuse(option: Option, given: Any, environ: Mapping[str, str]) -> None:
    """Raise StartupError if an option that another one fixes is given as well."""
    if given is not None or option.text(environ) is not None:
        source = option.flag if given is not None else option.variable
        fixed_by = "--" + str(option.fixed_by).replace("_", "-")
        raise StartupError(f"{source} is given beside {fixed_by}, which says that itself; leave one of them out")


def _kind(hint: Any) -> Any:
    """The type of a value: `int` of `int | None`."""
    if isinstance(hint, types.UnionType):
        return next(kind for kind in typing.get_args(hint) if kind is not types.NoneType)
    return hint


def _reader(kind: Any, choices: tuple[str, ...], parse: str | None) -> Callable[[str], Any]:
    if parse == "bytes":
        return _read_bytes
    if choices:
        return lambda text: _read_choice(text, choices)
    readers: dict[Any, Callable[[str], Any]] = {int: _read_int, float: _read_float, bool: _read_bool, str: _read_text}
    return readers[kind]


def _choices(choices: Any) -> tuple[str, ...]:
    if choices == "recipes":
        from kernels.format.named import RECIPE_NAMES

        return ("auto", *RECIPE_NAMES)
    return DTYPES if choices == "dtypes" else tuple(choices)


def _read_bytes(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError:
        raise ValueError("bytes, or a number with KiB, MiB, GiB, KB, MB or GB") from None


def _read_choice(text: str, choices: tuple[str, ...]) -> str:
    if text not in choices:
        raise ValueError(f"one of {', '.join(choices)}")
    return text


def _read_text(text: str) -> str:
    if not text:
        raise ValueError("some text")
    return text


def _read_int(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise ValueError("a whole number") from None


def _read_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError("a number") from None


def _read_bool(text: str) -> bool:
    if text.lower() not in BOOLEANS:
        raise ValueError("true or false")
    return BOOLEANS[text.lower()]


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}; see {self.prog} --help\n")
