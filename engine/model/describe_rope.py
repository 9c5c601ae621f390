"""From the RoPE fields of a `config.json` to a `Rope`, or one line that says what is wrong with them."""

import math
from typing import Any

from engine.config import DefaultRope, DynamicRope, LinearRope, Llama3Rope, Rope, YarnRope
from engine.model.fields import MAX_POSITION, read_flag, read_integer, read_number, wrong_field

ROPE_KINDS = ("default", "linear", "llama3", "yarn", "dynamic")


def describe_rope(raw: dict[str, Any], *, head_dim: int, max_position: int) -> Rope:
    """Read the RoPE of a parsed `config.json`. `max_position`: its field `max_position_embeddings`.

    Current files keep all of it in `rope_parameters`; older ones have `rope_theta` and maybe `rope_scaling`.
    """
    name, fields = _fields(raw)
    partial = fields.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial is not None and partial != 1:
        raise wrong_field("partial_rotary_factor", partial, "1: rotating only some channels is not supported")

    kind = fields.get("rope_type", fields.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise wrong_field(f"rope_type in {name}", kind, f"one of {', '.join(ROPE_KINDS)}")
    theta = read_number(fields, "rope_theta", least=1.0, default=10000.0)
    if kind == "default":
        return DefaultRope(theta=theta)
    factor = read_number(fields, "factor", least=1.0)
    match kind:
        case "linear":
            return LinearRope(theta=theta, factor=factor)
        case "llama3":
            return _llama3(fields, theta, factor)
        case "yarn":
            return _yarn(fields, theta, factor, max_position)
        case _:
            if head_dim < 4:
                raise wrong_field("head_dim", head_dim, "at least 4 with dynamic RoPE")
            return DynamicRope(theta=theta, factor=factor, original_max_position=max_position)


def longest_context(rope: Rope, max_position: int) -> int:
    """The tokens that a model with `max_position_embeddings` is made for.

    Yarn and dynamic scaling extend the original context by their factor. Files do not agree on whether
    `max_position_embeddings` is the length before or after that, so the larger one holds. With the other kinds it is
    the length after.
    """
    if not isinstance(rope, YarnRope | DynamicRope):
        return max_position
    extended = int(rope.original_max_position * rope.factor)
    if extended > MAX_POSITION:
        most = f"at most {MAX_POSITION} positions with {rope.original_max_position} original ones"
        raise wrong_field("factor", rope.factor, most)
    return max(max_position, extended)


def _fields(raw: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The name of the field that holds the kind of RoPE, and what it holds, with theta."""
    old, new = (_object(raw, name) for name in ("rope_scaling", "rope_parameters"))
    if old and new and any(new.get(name) != value for name, value in old.items() if name != "type"):
        # typically added by hand to a current file; which of the two counts differs between programs
        raise wrong_field("rope_scaling", raw["rope_scaling"], "none beside rope_parameters; change those instead")
    name, fields = ("rope_parameters", new) if new else ("rope_scaling", old)
    return name, {"rope_theta": raw.get("rope_theta")} | fields


def _object(raw: dict[str, Any], name: str) -> dict[str, Any]:
    fields = raw.get(name)
    if fields is not None and not isinstance(fields, dict):
        raise wrong_field(name, fields, "an object or null")
    return fields or {}


def _llama3(fields: dict[str, Any], theta: float, factor: float) -> Llama3Rope:
    low = read_number(fields, "low_freq_factor", least=0.0)
    high = read_number(fields, "high_freq_factor", least=0.0)
    if high <= low:
        raise wrong_field("high_freq_factor", high, f"more than low_freq_factor ({low})")
    return Llama3Rope(
        theta=theta,
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=read_integer(fields, "original_max_position_embeddings", most=MAX_POSITION),
    )


def _yarn(fields: dict[str, Any], theta: float, factor: float, max_position: int) -> YarnRope:
    if theta == 1.0:
        raise wrong_field("rope_theta", theta, "more than 1 with yarn RoPE")
    fast = read_number(fields, "beta_fast", least=1e-6, default=32.0)
    slow = read_number(fields, "beta_slow", least=1e-6, default=1.0)
    if fast < slow:
        raise wrong_field("beta_fast", fast, f"at least beta_slow ({slow})")
    original = "original_max_position_embeddings"
    return YarnRope(
        theta=theta,
        factor=factor,
        original_max_position=read_integer(fields, original, most=MAX_POSITION, default=max_position),
        beta_fast=fast,
        beta_slow=slow,
        attention_factor=_attention_factor(fields, factor),
        has_whole_bounds="truncate" not in fields or read_flag(fields, "truncate"),
    )


def _attention_factor(fields: dict[str, Any], factor: float) -> float:
    """As stated; else YaRN's 0.1·ln(factor) + 1, or DeepSeek's quotient of two of that kind where both are given."""
    whole = 0.1 * math.log(factor)
    plain = read_number(fields, "attention_factor", least=1e-3, most=1e3, default=whole + 1.0)
    mscale = read_number(fields, "mscale", least=0.0, most=1e3, default=0.0)
    all_dim = read_number(fields, "mscale_all_dim", least=0.0, most=1e3, default=0.0)
    if fields.get("attention_factor") is None and mscale and all_dim:
        return (whole * mscale + 1.0) / (whole * all_dim + 1.0)
    return plain
