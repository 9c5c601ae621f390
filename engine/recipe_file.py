"""The folder of a calibrated recipe: `recipe.json`, and `codebooks.safetensors` where it has tables. No torch."""

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path

from safetensors import SafetensorError
from safetensors.numpy import load, save

from engine.errors import StartupError
from engine.recipe_json import CODEBOOKS, Fields, Tables, recipe_from_json, recipe_to_json
from kernels.format.layout import PageLayout
from kernels.format.recipe import Recipe

RECIPE = "recipe.json"
VERSION = 1
MOST_BYTES = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelIdentity:
    """Which model a recipe was made for, whatever device, dtype or rotation it runs with. `weights`: hex digits from a
    sample of the checkpoint's tensors. `name` is only told."""

    name: str
    architecture: str
    hidden_size: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    weights: str


@dataclass(frozen=True, slots=True)
class SavedRecipe:
    """A recipe and the model it was made for."""

    recipe: Recipe
    model: ModelIdentity

    def recipe_for(self, model: ModelIdentity, source: str) -> Recipe:
        """The recipe; raises StartupError where `model` is another one. `source`: where it comes from."""
        mine, theirs = asdict(self.model), asdict(model)
        different = [name for name in mine if name != "name" and mine[name] != theirs[name]]
        if different:
            raise StartupError(
                f"{source}: made for {self.model.name}, which is not the model {model.name} "
                f"({', '.join(different)} differ); run quire calibrate for this one"
            )
        return self.recipe


def write_recipe(folder: Path, saved: SavedRecipe) -> None:
    """Write the files into a folder that is there."""
    value, tables = recipe_to_json(saved.recipe)
    codebooks = save(tables) if tables else None
    text = {
        "version": VERSION,
        "model": asdict(saved.model),
        "codebooks_sha256": None if codebooks is None else hashlib.sha256(codebooks).hexdigest(),
        **value,
    }
    if codebooks is not None:
        (folder / CODEBOOKS).write_bytes(codebooks)
    (folder / RECIPE).write_text(json.dumps(text, indent=1, allow_nan=False) + "\n", encoding="utf-8")


def read_recipe(path: str, flag: str = "--kv-recipe") -> SavedRecipe:
    """Read and check a folder that `write_recipe` wrote. Raises StartupError with one line for anything else."""
    folder = Path(path)
    try:
        value = json.loads(_read(folder / RECIPE, flag))
    except (ValueError, RecursionError) as error:
        raise StartupError(f"{folder / RECIPE}: not JSON ({error}); run quire calibrate again") from error
    fields = Fields(value, str(folder / RECIPE))
    fields.one_of("version", (VERSION,))
    model = _identity(fields.object("model"))
    recipe = recipe_from_json(fields, _tables(folder, fields, flag))
    fields.end()
    if len(recipe.layers) != model.num_layers:
        raise StartupError(f"{fields.where}: {len(recipe.layers)} layers; the model it names has {model.num_layers}")
    if recipe.sink_rule is not None and max(recipe.sink_rule.channels) >= model.hidden_size:
        raise StartupError(f"{fields.where}: sink_rule: channels must be below {model.hidden_size}")
    if any(max(layer.k.num_outliers, layer.v.num_outliers) > model.num_kv_heads * model.head_dim
           for layer in recipe.layers):  # fmt: skip
        raise StartupError(f"{fields.where}: num_outliers is above {model.num_kv_heads * model.head_dim} of a token")
    try:
        PageLayout(recipe, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype="float16")
    except ValueError as error:
        raise StartupError(f"{fields.where}: {error}") from error
    return SavedRecipe(recipe, model)


def _identity(fields: Fields) -> ModelIdentity:
    identity = ModelIdentity(
        name=fields.text("name"),
        architecture=fields.text("architecture"),
        hidden_size=fields.integer("hidden_size", 1),
        num_layers=fields.integer("num_layers", 1),
        num_kv_heads=fields.integer("num_kv_heads", 1),
        head_dim=fields.integer("head_dim", 1),
        weights=fields.text("weights"),
    )
    fields.end()
    return identity


def _tables(folder: Path, fields: Fields, flag: str) -> Tables:
    if not fields.has("codebooks_sha256"):
        fields.take("codebooks_sha256")
        return {}
    expected, path = fields.text("codebooks_sha256"), folder / CODEBOOKS
    data = _read(path, flag)
    if hashlib.sha256(data).hexdigest() != expected:
        raise StartupError(f"{path}: not the file that {RECIPE} was written with; run quire calibrate again")
    try:
        tables: Tables = load(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise StartupError(f"{path}: not readable as safetensors ({error}); run quire calibrate again") from error
    return tables


def _read(path: Path, flag: str) -> bytes:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise StartupError(f"{flag} {path.parent}: {path.name} is larger than {MOST_BYTES} bytes")
        return path.read_bytes()
    except OSError as error:
        raise StartupError(
            f"{flag} {path.parent}: {path.name} cannot be read ({error.strerror}); name a folder that quire calibrate "
            "wrote"
        ) from error
