"""The folder of a recipe: what is written is read back, and nothing else is."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from engine.errors import StartupError
from engine.recipe_file import ModelIdentity, SavedRecipe, read_recipe, write_recipe
from kernels.format.codec import (
    Centred,
    Float8,
    Integer,
    Parameters,
    Store,
    Symmetric,
    Table,
    per_channel,
    per_token,
    raw,
)
from kernels.format.recipe import LargestValues, LayerRecipe, MarkedTokens, Recipe, SinkRule

MODEL = ModelIdentity(
    name="tiny", architecture="A", hidden_size=64, num_layers=4, num_kv_heads=2, head_dim=16, weights="abc"
)
TABLE = Table((-1.0, -0.25, 0.125, 0.75), (-0.5, -0.0625, 0.4375000001), name="nuq")
LAYERS = (
    LayerRecipe(per_channel(TABLE), per_token(Integer(4)), before_rope=True),
    LayerRecipe(raw(), per_token(Centred(2), 8, Parameters.BYTE, 0.95), rotate_v=True, outliers=LargestValues(2)),
    LayerRecipe(Store(Symmetric(8), None, 1, num_outliers=3), raw(), rotate_k=True, norm_k=True),
    LayerRecipe(
        per_channel(Float8(5, 2), parameters=Parameters.UNIT),
        per_token(Table.nearest((0.0, 1.0, 2.0, 4.0), is_centred=True, name="x")),
        outliers=MarkedTokens(1),
    ),
)
RECIPE = Recipe("mine", LAYERS, 64, 1, 2, SinkRule(2, (5, 63), 12.75))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_recipe(tmp_path, SavedRecipe(RECIPE, MODEL))
    return tmp_path


def test_round_trip(folder: Path) -> None:
    found = read_recipe(str(folder))
    assert found.recipe == RECIPE and found.recipe.id == RECIPE.id and found.model == MODEL


def test_without_tables_there_is_one_file(tmp_path: Path) -> None:
    recipe = Recipe("plain", (LayerRecipe(per_channel(Integer(3)), raw()),) * 4, 32, 0)
    write_recipe(tmp_path, SavedRecipe(recipe, MODEL))
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.json"]
    assert read_recipe(str(tmp_path)).recipe == recipe


@pytest.mark.parametrize("field", ["architecture", "hidden_size", "num_kv_heads", "head_dim", "weights"])
def test_another_model_is_refused(folder: Path, field: str) -> None:
    saved = read_recipe(str(folder))
    other: dict[str, Any] = {field: "other" if isinstance(getattr(MODEL, field), str) else 7}
    with pytest.raises(StartupError, match=rf"made for tiny, which is not the model tiny \({field} differ\)"):
        saved.recipe_for(replace(MODEL, **other), "--kv-recipe x")
    assert saved.recipe_for(replace(MODEL, name="renamed"), "--kv-recipe x") == RECIPE


def edit(change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / "recipe.json"
        value = json.loads(path.read_text())
        change(value)
        path.write_text(json.dumps(value))

    return apply


def put(*path: str | int, value: Any) -> Callable[[Path], None]:
    def change(whole: Any) -> None:
        for step in path[:-1]:
            whole = whole[step]
        whole[path[-1]] = value

    return edit(change)


def drop(*path: str | int) -> Callable[[Path], None]:
    def change(whole: Any) -> None:
        for step in path[:-1]:
            whole = whole[step]
        del whole[path[-1]]

    return edit(change)


def tensors(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """The file of tables changed, and the sum in recipe.json with it."""

    def apply(folder: Path) -> None:
        path = folder / "codebooks.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path)
        put("codebooks_sha256", value=hashlib.sha256(path.read_bytes()).hexdigest())(folder)

    return apply


def values(*numbers: float) -> np.ndarray:
    return np.array(numbers, np.float16)


@pytest.mark.parametrize(
    ("tamper", "says"),
    [
        (lambda folder: (folder / "recipe.json").unlink(), "recipe.json cannot be read"),
        (lambda folder: (folder / "recipe.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "recipe.json").write_text("[]"), "expected an object"),
        (lambda folder: (folder / "recipe.json").write_bytes(b"\xff\xfe"), "not JSON"),
        (put("version", value=2), "field version is 2; expected one of 1"),
        (put("more", value=1), "field more is not known"),
        (put("layers", 2, "k", "more", value=1), r"layers\[2\]: k: field more is not known"),
        (drop("layers", 1, "rotate_v"), r"layers\[1\]: field rotate_v is missing"),
        (drop("layers", 3), "codebooks.safetensors: tensor layers.3.v.bounds belongs to no table"),
        (put("layers", value=7), "field layers is 7; expected a list"),
        (put("layers", 0, value=None), r"layers\[0\] is null; expected an object"),
        (put("layers", 0, "v", "codec", "bits", value=5), r"layers\[0\]: v: codec: field bits is 5"),
        (put("layers", 0, "v", "codec", "bits", value=True), "field bits is True"),
        (put("layers", 0, "v", "codec", "bits", value=4.0), "field bits is 4.0"),
        (put("sink_rule", "channels", value=[True]), "field channels is"),
        (put("layers", 0, "k", "codec", "bits", value=3), "field bits is 3; expected those of a table of 4 values"),
        (put("layers", 0, "k", "codec", "kind", value="zip"), "field kind is 'zip'"),
        (put("layers", 0, "k", "clip", value=float("nan")), "field clip is nan"),
        (put("layers", 0, "k", "clip", value=0), "field clip is 0"),
        (put("layers", 0, "k", "parameters", value="4-bit"), "field parameters is '4-bit'"),
        (put("layers", 0, "k", "parameters", value="unit"), "field parameters is 'unit'; expected scales for nuq2"),
        (
            put("layers", 1, "v", "codec", value={"kind": "symmetric", "bits": 4}),
            r"layers\[1\]: v: symmetric int4 has scales with a sign",
        ),
        (put("layers", 0, "k", "group_tokens", value=0), "field group_tokens is 0"),
        (put("layers", 2, "k", "num_outliers", value=33), "num_outliers is above 32"),
        (put("layers", 3, "k", "codec", "mantissa_bits", value=3), "expected e5m2 or e4m3"),
        (put("layers", 0, "before_rope", value=1), "field before_rope is 1"),
        (put("layers", 1, "largest_values", value=65), "outliers are 65 tokens of a page of 64"),
        (put("sink_rule", value=None), "marked_tokens needs a sink_rule"),
        (put("sink_rule", "layer", value=3), "marked_tokens needs a layer behind 3, whose outputs mark them"),
        (put("sink_rule", "layer", value=4), "field layer is 4; expected an integer from 0 to 3"),
        (put("sink_rule", "channels", value=[64]), "channels must be below 64"),
        (put("sink_rule", "channels", value=[]), "field channels is"),
        (put("sink_rule", "threshold", value=float("inf")), "field threshold is inf"),
        (put("layers", 0, "balance_k", value=True), "balance_k is after RoPE, so it cannot be with before_rope"),
        (put("name", value="a\nb"), "field name is 'a.*expected a short text without control characters"),
        (put("page_tokens", value=48), "field page_tokens is 48"),
        (put("sink_pages", value=-1), "field sink_pages is -1"),
        (put("model", "num_layers", value=5), "4 layers; the model it names has 5"),
        (put("codebooks_sha256", value="0"), "not the file that recipe.json was written with"),
        (put("codebooks_sha256", value=None), "tensor layers.0.k.values is missing"),
        (lambda folder: (folder / "codebooks.safetensors").unlink(), "codebooks.safetensors cannot be read"),
        (tensors(lambda t: t.pop("layers.0.k.bounds")), "layers.0.k.bounds is missing"),
        (tensors(lambda t: t.update(other=values(1))), "tensor other belongs to no table"),
        (tensors(lambda t: t.update({"layers.0.k.values": values(0, 1, 1, 2)})), "finite and ascending"),
        (tensors(lambda t: t.update({"layers.0.k.values": values(0, 1, 2, np.nan)})), "finite and ascending"),
        (tensors(lambda t: t.update({"layers.0.k.values": values(0, 1, 2)})), "3 values and 3 bounds"),
        (tensors(lambda t: t.update({"layers.0.k.values": np.arange(4.0)})), "expected a row of float16"),
    ],
)
def test_tampering_is_told_in_one_line(folder: Path, tamper: Callable[[Path], None], says: str) -> None:
    tamper(folder)
    with pytest.raises(StartupError, match=says) as error:
        read_recipe(str(folder))
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


def test_a_model_of_other_shape_than_its_codes_is_told(tmp_path: Path) -> None:
    write_recipe(tmp_path, SavedRecipe(RECIPE, replace(MODEL, head_dim=2)))
    with pytest.raises(StartupError, match="do not fill whole bytes"):
        read_recipe(str(tmp_path))
