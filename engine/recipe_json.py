"""A recipe as JSON and tables of numbers, and back. No torch.

Reading checks everything: a file may be damaged, edited or made by another version. What is wrong is told in one line
that names the file and the field.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.errors import StartupError
from kernels.format.codec import (
    Centred,
    Codec,
    Float8,
    Integer,
    Parameters,
    Raw,
    Store,
    Symmetric,
    Table,
    raw,
)
from kernels.format.recipe import LargestValues, LayerRecipe, MarkedTokens, Recipe, SinkRule

CODE_BITS = (2, 3, 4, 8)
FLOAT8 = ((5, 2), (4, 3))
PAGE_TOKENS = (32, 64, 128)
MOST = 2**24
CODEBOOKS = "codebooks.safetensors"

Tables = Mapping[str, NDArray[Any]]
"""`layers.N.k.values` fp16 [2^bits] and `layers.N.k.bounds` fp64 [2^bits - 1], the same for v."""


class Fields:
    """The fields of a JSON object, each taken once. `where`: file and path, for messages."""

    def __init__(self, value: Any, where: str):
        if not isinstance(value, dict):
            raise StartupError(f"{where} is {_shown(value)}; expected an object")
        self._left = dict(value)
        self.where = where

    def take(self, name: str) -> Any:
        if name not in self._left:
            raise StartupError(f"{self.where}: field {name} is missing")
        return self._left.pop(name)

    def has(self, name: str) -> bool:
        return self._left.get(name) is not None

    def wrong(self, name: str, value: Any, expected: str) -> StartupError:
        return StartupError(f"{self.where}: field {name} is {_shown(value)}; expected {expected}")

    def integer(self, name: str, least: int, most: int = MOST) -> int:
        value = self.take(name)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise self.wrong(name, value, f"an integer from {least} to {most}")
        return value

    def optional_integer(self, name: str, least: int, most: int = MOST) -> int | None:
        if not self.has(name):
            self.take(name)
            return None
        return self.integer(name, least, most)

    def number(self, name: str, above: float, most: float) -> float:
        value = self.take(name)
        # NaN, which Python reads from JSON, fails the comparison
        if not isinstance(value, int | float) or isinstance(value, bool) or not above < value <= most:
            raise self.wrong(name, value, f"a number above {above:g}, at most {most:g}")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if not isinstance(value, bool):
            raise self.wrong(name, value, "true or false")
        return value

    def text(self, name: str) -> str:
        value = self.take(name)
        if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable():
            raise self.wrong(name, value, "a short text without control characters")
        return value

    def one_of(self, name: str, choices: tuple[Any, ...]) -> Any:
        value = self.take(name)
        # in Python 4 == 4.0 and 1 == True
        if not any(value == choice and type(value) is type(choice) for choice in choices):
            raise self.wrong(name, value, "one of " + ", ".join(map(str, choices)))
        return value

    def object(self, name: str) -> "Fields":
        return Fields(self.take(name), f"{self.where}: {name}")

    def list(self, name: str) -> list[Any]:
        value = self.take(name)
        if not isinstance(value, list):
            raise self.wrong(name, value, "a list")
        return value

    def end(self) -> None:
        if self._left:
            raise StartupError(f"{self.where}: field {sorted(self._left)[0]} is not known")


def recipe_to_json(recipe: Recipe) -> tuple[dict[str, Any], dict[str, NDArray[Any]]]:
    """The recipe, with its tables apart."""
    tables: dict[str, NDArray[Any]] = {}
    layers = []
    for index, layer in enumerate(recipe.layers):
        for name, store in (("k", layer.k), ("v", layer.v)):
            if isinstance(store.codec, Table):
                tables[f"layers.{index}.{name}.values"] = np.array(store.codec.values, np.float16)
                tables[f"layers.{index}.{name}.bounds"] = np.array(store.codec.bounds, np.float64)
        layers.append(_layer_to_json(layer))
    rule = recipe.sink_rule
    value = {
        "name": recipe.name,
        "page_tokens": recipe.page_tokens,
        "sink_pages": recipe.sink_pages,
        "window_pages": recipe.window_pages,
        "sink_rule": rule and {"layer": rule.layer, "channels": list(rule.channels), "threshold": rule.threshold},
        "layers": layers,
    }
    return value, tables


def recipe_from_json(fields: Fields, tables: Tables) -> Recipe:
    """Takes the recipe's fields from `fields`. Raises StartupError for whatever `recipe_to_json` does not write."""
    left = dict(tables)
    name, page_tokens = fields.text("name"), fields.one_of("page_tokens", PAGE_TOKENS)
    sink_pages, window_pages = fields.integer("sink_pages", 0), fields.integer("window_pages", 0)
    items = fields.list("layers")
    rule = _sink_rule_from_json(fields, len(items))
    layers = []
    for index, item in enumerate(items):
        part = Fields(item, f"{fields.where}: layers[{index}]")
        layer = _layer_from_json(part, partial(_take_tables, left, f"layers.{index}"))
        if layer.outliers is not None and layer.outliers.num > page_tokens:
            raise StartupError(f"{part.where}: outliers are {layer.outliers.num} tokens of a page of {page_tokens}")
        if isinstance(layer.outliers, MarkedTokens) and (rule is None or index <= rule.layer):
            needs = "a sink_rule" if rule is None else f"a layer behind {rule.layer}, whose outputs mark them"
            raise StartupError(f"{part.where}: marked_tokens needs {needs}")
        layers.append(layer)
    if left:
        raise StartupError(f"{CODEBOOKS}: tensor {sorted(left)[0]} belongs to no table of a layer")
    return Recipe(name, tuple(layers), page_tokens, sink_pages, window_pages, rule)


def _layer_to_json(layer: LayerRecipe) -> dict[str, Any]:
    value: dict[str, Any] = {
        "k": _store_to_json(layer.k),
        "v": _store_to_json(layer.v),
        "rotate_k": layer.rotate_k,
        "norm_k": layer.norm_k,
        "rotate_v": layer.rotate_v,
        "balance_k": layer.balance_k,
        "before_rope": layer.before_rope,
    }
    match layer.outliers:
        case LargestValues(num):
            value["largest_values"] = num
        case MarkedTokens(num):
            value["marked_tokens"] = num
    return value


def _layer_from_json(fields: Fields, take_tables: Callable[[str], tuple[NDArray[Any], NDArray[Any]]]) -> LayerRecipe:
    k = _store_from_json(fields.object("k"), lambda: take_tables("k"))
    v = _store_from_json(fields.object("v"), lambda: take_tables("v"))
    flags = {name: fields.flag(name) for name in ("rotate_k", "norm_k", "rotate_v", "balance_k", "before_rope")}
    outliers: LargestValues | MarkedTokens | None = None
    if fields.has("largest_values"):
        outliers = LargestValues(fields.integer("largest_values", 1))
    elif fields.has("marked_tokens"):
        outliers = MarkedTokens(fields.integer("marked_tokens", 1))
    fields.end()
    try:
        return LayerRecipe(k, v, outliers=outliers, **flags)
    except ValueError as error:
        raise StartupError(f"{fields.where}: {error}") from error


def _sink_rule_from_json(fields: Fields, num_layers: int) -> SinkRule | None:
    if not fields.has("sink_rule"):
        fields.take("sink_rule")
        return None
    rule = fields.object("sink_rule")
    layer, channels = rule.integer("layer", 0, max(0, num_layers - 1)), rule.list("channels")
    if not channels or not all(type(item) is int and 0 <= item < MOST for item in channels):
        raise rule.wrong("channels", channels, "channels of the residual stream")
    threshold = rule.number("threshold", 0, 1e30)
    rule.end()
    return SinkRule(layer, tuple(channels), threshold)


def _store_to_json(store: Store) -> dict[str, Any]:
    if isinstance(store.codec, Raw):
        return {"codec": {"kind": "raw"}}
    return {
        "codec": _codec_to_json(store.codec),
        "group_tokens": store.group_tokens,
        "group_channels": store.group_channels,
        "parameters": store.parameters.value,
        "clip": store.clip,
        "num_outliers": store.num_outliers,
    }


def _store_from_json(fields: Fields, take_tables: Callable[[], tuple[NDArray[Any], NDArray[Any]]]) -> Store:
    codec = _codec_from_json(fields.object("codec"), take_tables)
    if isinstance(codec, Raw):
        fields.end()
        return raw()
    group_tokens, group_channels = (fields.optional_integer(name, 1) for name in ("group_tokens", "group_channels"))
    parameters = Parameters(fields.one_of("parameters", tuple(item.value for item in Parameters)))
    clip, num_outliers = fields.number("clip", 0, 1), fields.integer("num_outliers", 0, 2**15)
    fields.end()
    if parameters is Parameters.UNIT and not isinstance(codec, Float8):
        raise fields.wrong("parameters", parameters.value, f"scales for {codec}")
    try:
        return Store(codec, group_tokens, group_channels, parameters, clip, num_outliers)
    except ValueError as error:
        raise StartupError(f"{fields.where}: {error}") from error


def _codec_to_json(codec: Codec) -> dict[str, Any]:
    match codec:
        case Raw():
            return {"kind": "raw"}
        case Integer(bits):
            return {"kind": "integer", "bits": bits}
        case Centred(bits):
            return {"kind": "centred", "bits": bits}
        case Symmetric(bits):
            return {"kind": "symmetric", "bits": bits}
        case Float8(exponent, mantissa):
            return {"kind": "float8", "exponent_bits": exponent, "mantissa_bits": mantissa}
        case Table():
            return {"kind": "table", "bits": codec.bits, "is_centred": codec.is_centred, "name": codec.name}


def _codec_from_json(fields: Fields, take_tables: Callable[[], tuple[NDArray[Any], NDArray[Any]]]) -> Codec:
    codec: Codec
    match fields.one_of("kind", ("raw", "integer", "centred", "symmetric", "float8", "table")):
        case "raw":
            codec = Raw()
        case "float8":
            codec = Float8(fields.integer("exponent_bits", 4, 5), fields.integer("mantissa_bits", 2, 3))
            if (codec.exponent_bits, codec.mantissa_bits) not in FLOAT8:
                raise StartupError(f"{fields.where} is {codec}; expected e5m2 or e4m3")
        case "table":
            bits, is_centred, name = fields.one_of("bits", CODE_BITS), fields.flag("is_centred"), fields.text("name")
            values, bounds = take_tables()
            if len(values) != 1 << bits:
                raise fields.wrong("bits", bits, f"those of a table of {len(values)} values in {CODEBOOKS}")
            codec = Table(tuple(values.tolist()), tuple(bounds.tolist()), is_centred, name)
        case "integer":
            codec = Integer(fields.one_of("bits", CODE_BITS))
        case "centred":
            codec = Centred(fields.one_of("bits", CODE_BITS))
        case _:
            codec = Symmetric(fields.one_of("bits", CODE_BITS))
    fields.end()
    return codec


def _take_tables(tables: dict[str, NDArray[Any]], layer: str, part: str) -> tuple[NDArray[Any], NDArray[Any]]:
    """Values and bounds of the table of K or V, checked."""
    found, name = [], f"{layer}.{part}"
    for kind, dtype in (("values", np.float16), ("bounds", np.float64)):
        tensor = tables.pop(f"{name}.{kind}", None)
        where = f"{CODEBOOKS}: tensor {name}.{kind}"
        if tensor is None:
            raise StartupError(f"{where} is missing")
        if tensor.dtype != dtype or tensor.ndim != 1:
            raise StartupError(f"{where} is {tensor.dtype} {list(tensor.shape)}; expected a row of {np.dtype(dtype)}")
        if not np.isfinite(tensor).all() or (np.diff(tensor) <= 0).any():
            raise StartupError(f"{where} must be finite and ascending")
        found.append(tensor)
    values, bounds = found
    if len(bounds) != len(values) - 1:
        raise StartupError(f"{CODEBOOKS}: {name} has {len(values)} values and {len(bounds)} bounds; expected one less")
    return values, bounds


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value) if isinstance(value, float) and math.isnan(value) else repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
