"""The table that is printed at start: what the engine serves, and what its memory holds."""

from itertools import groupby

from engine.config import EngineConfig
from engine.info import EngineInfo
from engine.kv.sizing import PoolSize, num_sequence_pages
from kernels.format.layout import PageLayout
from kernels.format.recipe import Recipe

MOST_GROUPS = 4


def pool_rows(
    info: EngineInfo,
    layout: PageLayout,
    size: PoolSize,
    *,
    architecture: str,
    reason: str,
    memory: int,
    weight_bytes: int,
    backend: str,
) -> list[tuple[str, str]]:
    """The model and its pool; `reason` says why the recipe was chosen."""
    tokens = info.page_tokens
    needed = num_sequence_pages(info.max_model_len, tokens, info.sink_pages)
    full = min(info.max_num_seqs, info.num_sealed_pages // needed)
    codes, parameters, slot = (
        count / tokens for count in (layout.code_bytes, layout.parameter_bytes, layout.slot_bytes)
    )
    return [
        ("model", f"{info.model_name} ({architecture})"),
        ("weights", f"{info.dtype}, {_mebibytes(weight_bytes)}"),
        ("device", info.device),
        ("backend", backend),
        ("recipe", f"{info.recipe}: " + "; ".join(_grouped_layers(layout))),
        ("recipe chosen", reason),
        ("page", f"{tokens} tokens, {layout.page_bytes} bytes; in 16 bit: {_pages_in_16bit(layout.recipe)}"),
        (
            "bytes per token",
            f"{layout.bytes_per_token:.0f} sealed (codes {codes:.0f}, scales {parameters:.0f}); {slot:.0f} in 16 bit",
        ),
        ("KV memory", f"{_mebibytes(size.num_bytes)} of {_mebibytes(memory)} allowed"),
        ("sealed pool", f"{info.num_sealed_pages} pages, {info.num_sealed_pages * tokens} tokens"),
        ("open pool", f"{info.num_slots} slots, {_mebibytes(size.num_slots * layout.slot_bytes)}"),
        ("full requests", f"{full} of {info.max_model_len} tokens at once"),
    ]


def _pages_in_16bit(recipe: Recipe) -> str:
    window = f", the {recipe.window_pages} before a token's own" if recipe.window_pages else ""
    return f"the first {recipe.sink_pages}{window}"


def cache_rows(
    config: EngineConfig, info: EngineInfo, num_records: int, num_restored: int | None
) -> list[tuple[str, str]]:
    """What happens to pages that are not in use."""
    host = f"{num_records} page records, reclaimed by {config.host_reclaim}" if num_records else "none"
    disk = "none" if num_restored is None else f"{config.cache_dir}, {num_restored} pages taken back"
    return [
        ("reclaim", config.reclaim),
        ("shrink", str(info.shrink or "none")),
        ("host memory", host),
        ("cache folder", disk),
    ]


def _mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _grouped_layers(layout: PageLayout) -> list[str]:
    """Layers that are told alike in one line; codebooks may differ among them."""
    groups = []
    for recipe, items in groupby(enumerate(layout.recipe.layers), key=lambda item: str(item[1])):
        layers = [index for index, _ in items]
        span = f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
        groups.append(f"{span} {recipe}")
    if len(groups) > MOST_GROUPS:
        return [f"{layout.bits_per_element:.2f} bits per element, layers differ"]
    return groups
