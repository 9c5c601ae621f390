"""Reading fields of a checkpoint's JSON files; what is wrong with one is told in one line."""

from typing import Any

from engine.errors import StartupError

# Far above any real model. They keep a damaged file from asking for billions of layers or terabytes of tables.
MAX_SIZE = 2**24
MAX_LAYERS = 1024
MAX_POSITION = 2**31 - 1
CONFIG = "config.json"


def read_integer(
    fields: dict[str, Any],
    name: str,
    *,
    default: int | None = None,
    most: int = MAX_SIZE,
    file: str = CONFIG,
) -> int:
    """An integer from 1 to `most`. Missing and null are the default, if there is one."""
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise wrong_field(name, value, f"an integer from 1 to {most}", file)
    return value


def read_number(
    fields: dict[str, Any],
    name: str,
    *,
    least: float,
    most: float = 1e12,
    default: float | None = None,
    file: str = CONFIG,
) -> float:
    """A number from `least` to `most`. Missing and null are the default, if there is one."""
    value = fields.get(name)
    if value is None and default is not None:
        return default
    # NaN and the infinities, which Python reads from JSON, fail the comparison.
    if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
        raise wrong_field(name, value, f"a number from {least:g} to {most:g}", file)
    return float(value)


def read_flag(fields: dict[str, Any], name: str) -> bool:
    """True or false. Missing and null are false."""
    value = fields.get(name)
    if value is not None and not isinstance(value, bool):
        raise wrong_field(name, value, "true or false")
    return bool(value)


def wrong_field(field: str, value: Any, expected: str, file: str = CONFIG) -> StartupError:
    shown = "missing" if value is None else repr(value)
    # A damaged file can hold anything; the message stays one short line.
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return StartupError(f"{file}: field {field} is {shown}, expected {expected}")
