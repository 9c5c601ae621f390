"""What a model's K and V take, what fits on which GPUs, and which recipe is prescribed: the arithmetic of `quire plan`.

Weights and the model's dtype are 16-bit throughout.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from engine.config import EngineConfig
from engine.device import CUDA_SHARE
from engine.errors import StartupError
from engine.kv.sizing import max_full_sequences, smallest_pool
from engine.prescription import Prescription, prescribe
from engine.recipe_file import SavedRecipe
from engine.study.cards import CARDS, Gpus
from engine.study.known_models import GroupedHeads, LatentHeads, PlannedModel
from kernels.format.layout import PageLayout
from kernels.format.named import RECIPE_NAMES, named_recipe

NATIVE = "native"


class Storage(Protocol):
    """One way to keep a model's K and V."""

    @property
    def bytes_per_token(self) -> float:
        """Codes and parameters of a token that lies in a full page, all layers."""

    def pool_bytes(self, num_users: int, context: int) -> int:
        """What must be allocated so that `num_users` sequences of `context` tokens fit at once."""

    def num_users(self, memory: int, context: int) -> int:
        """Sequences of `context` tokens that fit in `memory` bytes at once."""


@dataclass(frozen=True, slots=True)
class PagedStorage:
    """Quire's two pools: sealed pages, and slots for open and sink pages."""

    layout: PageLayout

    @property
    def bytes_per_token(self) -> float:
        return self.layout.bytes_per_token

    def pool_bytes(self, num_users: int, context: int) -> int:
        return smallest_pool(self.layout, num_users, context, num_full=num_users).num_bytes

    def num_users(self, memory: int, context: int) -> int:
        return max_full_sequences(self.layout, memory, context)


@dataclass(frozen=True, slots=True)
class LatentStorage:
    """16-bit numbers, one behind the other: Quire has no pool for MLA."""

    bytes_per_token: int

    def pool_bytes(self, num_users: int, context: int) -> int:
        return num_users * context * self.bytes_per_token

    def num_users(self, memory: int, context: int) -> int:
        return max(0, memory // (context * self.bytes_per_token))


@dataclass(frozen=True, slots=True)
class Format:
    """A format and what it takes; without a storage Quire cannot keep this model so."""

    name: str
    storage: Storage | None
    bits_per_element: float | None


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """What GPUs hold beside the weights. `users`: by format and context, None where the format has no storage.
    `prescriptions`: by context; empty for a model that Quire does not serve, or where the weights leave no room."""

    gpus: Gpus
    memory: int
    users: dict[str, dict[int, int | None]]
    prescriptions: dict[int, Prescription]


@dataclass(frozen=True, slots=True)
class CapacityPlan:
    """Everything that `quire plan` shows. `asked`: the GPUs that were named; `cards`: one of every known kind."""

    model: PlannedModel
    contexts: tuple[int, ...]
    num_users: int
    page_tokens: int
    sink_pages: int
    formats: tuple[Format, ...]
    asked: tuple[GpuPlan, ...]
    cards: tuple[GpuPlan, ...]
    notes: tuple[str, ...]


def make_plan(
    model: PlannedModel,
    *,
    contexts: tuple[int, ...],
    num_users: int,
    formats: tuple[str, ...],
    recipes: Mapping[str, SavedRecipe],
    gpus: tuple[Gpus, ...],
) -> CapacityPlan:
    """The plan for `num_users` sequences that run at once. `formats` are recipe names, `recipes` go by their names.
    Raises StartupError for a format that the model's head size does not allow and for a recipe of another model."""
    geometry = EngineConfig(model=model.name)
    planned = tuple(_format(model.heads, name, geometry) for name in formats)
    planned += tuple(_calibrated(model, name, saved) for name, saved in recipes.items())

    def on(chosen: Gpus) -> GpuPlan:
        memory = max(0, int((chosen.num_bytes - model.weight_bytes) * CUDA_SHARE))
        users: dict[str, dict[int, int | None]] = {
            format.name: {
                context: format.storage.num_users(memory, context) if format.storage else None for context in contexts
            }
            for format in planned
        }
        heads = model.heads
        prescriptions = {}
        if memory and isinstance(heads, GroupedHeads):
            for context in contexts:
                prescriptions[context] = prescribe(
                    chosen.card.generation,
                    lambda name: _layout(heads, name, geometry),
                    memory=memory,
                    max_num_seqs=num_users,
                    max_model_len=context,
                )
        return GpuPlan(chosen, memory, users, prescriptions)

    return CapacityPlan(
        model,
        contexts,
        num_users,
        geometry.page_tokens,
        geometry.sink_pages,
        planned,
        tuple(on(chosen) for chosen in gpus),
        tuple(on(Gpus(1, card)) for card in CARDS),
        (*_notes(model, contexts, planned, gpus), *_other_pages(recipes, geometry)),
    )


def _layout(heads: GroupedHeads, name: str, geometry: EngineConfig) -> PageLayout:
    try:
        recipe = named_recipe(
            name,
            num_layers=heads.num_layers,
            has_k_bias=heads.has_k_bias,
            page_tokens=geometry.page_tokens,
            sink_pages=geometry.sink_pages,
        )
        return PageLayout(recipe, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, dtype="bfloat16")
    except ValueError as error:
        raise StartupError(f"--kv-format {name} does not suit heads of {heads.head_dim} channels: {error}") from error


def _format(heads: GroupedHeads | LatentHeads, name: str, geometry: EngineConfig) -> Format:
    storage: Storage
    if isinstance(heads, GroupedHeads):
        storage = PagedStorage(_layout(heads, name, geometry))
    elif name == NATIVE:
        storage = LatentStorage(2 * heads.num_elements)
    else:
        return Format(name, None, None)
    return Format(name, storage, 8 * storage.bytes_per_token / heads.num_elements)


def _calibrated(model: PlannedModel, name: str, saved: SavedRecipe) -> Format:
    """Only sizes can be compared: a config.json has no weights that would say which model it is."""
    heads, made_for = model.heads, saved.model
    has_k_bias = isinstance(heads, GroupedHeads) and heads.has_k_bias
    theirs = GroupedHeads(made_for.num_layers, made_for.num_kv_heads, made_for.head_dim, has_k_bias)
    if heads != theirs:
        raise StartupError(f"--kv-recipe {name}: made for {theirs}; {model.name} has {heads}")
    layout = PageLayout(saved.recipe, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, dtype="bfloat16")
    return Format(name, PagedStorage(layout), 8 * layout.bytes_per_token / heads.num_elements)


def _notes(
    model: PlannedModel, contexts: tuple[int, ...], formats: tuple[Format, ...], gpus: tuple[Gpus, ...]
) -> list[str]:
    notes = []
    if isinstance(model.heads, LatentHeads):
        notes.append(
            f"Quire does not serve {model.name}: it has no attention for MLA. 16-bit sizes are for comparison."
        )
    if max(contexts) > model.max_position:
        notes.append(
            f"{model.name} was made for {model.max_position} positions; quire serve refuses a longer --max-model-len."
        )
    if any(chosen.count > 1 for chosen in gpus):
        notes.append(
            "Several GPUs count as one memory, as with tensor parallelism; Quire itself serves on one GPU today."
        )
    notes.append(
        f"Room for K and V is {CUDA_SHARE:.0%} of what 16-bit weights leave, GB are 10^9 bytes, "
        "and a card's memory is its data sheet's."
    )
    return notes


def _other_pages(recipes: Mapping[str, SavedRecipe], geometry: EngineConfig) -> list[str]:
    return [
        f"{name} is counted with its own pages: {recipe.page_tokens} tokens, {recipe.sink_pages} sink pages, a window "
        f"of {recipe.window_pages}."
        for name, recipe in ((name, saved.recipe) for name, saved in recipes.items())
        if (recipe.page_tokens, recipe.sink_pages, recipe.window_pages)
        != (geometry.page_tokens, geometry.sink_pages, geometry.window_pages)
    ]


def parse_formats(text: str) -> tuple[str, ...]:
    """Names of recipes, separated by commas; `fp16` and `bf16` mean native. Raises StartupError with the list."""
    names = []
    for item in text.split(","):
        name = item.strip().lower()
        name = NATIVE if name in ("fp16", "bf16") else name
        if name not in RECIPE_NAMES:
            raise StartupError(
                f"--kv-format has {item.strip()!r}; it must be one of {', '.join(RECIPE_NAMES)} (or fp16)"
            )
        names.append(name)
    return tuple(dict.fromkeys(names))
