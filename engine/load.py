"""From a configuration to a running engine's parts: resolve, size, load, wire together."""

import time
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.device import choose_device, choose_dtype, default_kv_memory, dtype_name
from engine.engine import Engine, EngineInfo
from engine.errors import StartupError
from engine.kv.archive import Archive
from engine.kv.cache import CacheOptions, PageCache
from engine.kv.host import HostMemory, PageMover
from engine.kv.keeper import CacheKeeper
from engine.kv.moves import num_host_records, num_page_records
from engine.kv.pages import PagePools
from engine.kv.reclaim import make_reclaim
from engine.kv.report import PageSizes
from engine.kv.rules import PageRules
from engine.kv.shrink import Shrink, parse_shrink
from engine.kv.sizing import PoolSize, fit_pool, num_sequence_pages, smallest_pool
from engine.model.checkpoint import Checkpoint, open_checkpoint
from engine.model.fingerprint import fingerprint
from engine.model.linear import choose_projection
from engine.model.rows import AllRows, TiledRows
from engine.model.weights import Progress, load_llama
from engine.runner import Runner
from engine.scheduler import Scheduler
from engine.tokenizer import Tokenizer
from kernels.backend import PoolTensors
from kernels.format.layout import PageLayout, Pool
from kernels.format.recipe import RECIPE_NAMES, named_recipe
from kernels.torch_backend.backend import TorchBackend
from kernels.torch_backend.invariant import InvariantTorchBackend


def load_engine(config: EngineConfig, progress: Progress) -> Engine:
    """Everything from the model's name on. Raises StartupError with one line where that cannot work."""
    checkpoint = open_checkpoint(config.model)
    return build_engine(config, checkpoint, checkpoint.tokenizer(), progress)


@dataclass(frozen=True, slots=True)
class _Resolved:
    """What `auto` and None in the configuration came to."""

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    max_model_len: int
    layout: PageLayout
    shrink: Shrink | None


def build_engine(config: EngineConfig, checkpoint: Checkpoint, tokenizer: Tokenizer, progress: Progress) -> Engine:
    """`load_engine` for a checkpoint and a tokenizer that are there already."""
    resolved = _resolve(config, checkpoint)
    layout, device, length = resolved.layout, resolved.device, resolved.max_model_len
    rows = TiledRows(config.page_tokens) if config.batch_invariant else AllRows()
    # refuse before the weights are read what will not fit beside them either
    fit_pool(layout, config.kv_memory or default_kv_memory(device), config.max_num_seqs, length)
    options = _cache_options(config, layout)
    model = load_llama(
        checkpoint,
        layout.recipe,
        dtype=resolved.dtype,
        device=device,
        rows=rows,
        make_projection=choose_projection(device, resolved.dtype, is_invariant=config.batch_invariant),
        progress=progress,
    )
    memory = config.kv_memory
    if memory is None:  # known only now that the weights lie in memory
        enough = smallest_pool(layout, config.max_num_seqs, length, num_full=config.max_num_seqs)
        memory = min(default_kv_memory(device), enough.num_bytes)
    size = fit_pool(layout, memory, config.max_num_seqs, length)
    pool = _allocate(layout, size, device)
    backend = (InvariantTorchBackend if config.batch_invariant else TorchBackend)(pool)
    host = HostMemory(options.num_records, layout.page_bytes, device) if options.num_records else None
    mover = PageMover(pool, host)
    cache = PageCache(size, config.page_tokens, layout.recipe.sink_pages, options, time.monotonic)
    keeper = None
    if config.cache_dir is not None:
        archive = Archive.open(Path(config.cache_dir), layout, fingerprint(model))
        keeper = CacheKeeper(archive, cache, pool, host, mover) if archive else None
    num_restored = keeper.restore() if keeper else None
    core = EngineCore(
        _scheduler(config, layout, size, cache),
        Runner(model, backend, mover, rows, is_strict=config.poison),
        tokenizer,
        eos_token_ids=checkpoint.config.eos_token_ids,
    )
    info = _info(config, resolved, size)
    table = [
        *_start_table(info, resolved, size, memory, model.num_bytes, backend.name),
        *_cache_table(config, info, options.num_records, num_restored),
    ]
    return Engine(core, config=config, info=info, tokenizer=tokenizer, start_table=table, keeper=keeper)


def _cache_options(config: EngineConfig, layout: PageLayout) -> CacheOptions:
    return CacheOptions(
        reclaim=make_reclaim(config.reclaim, "--reclaim"),
        host_reclaim=make_reclaim(config.host_reclaim, "--host-reclaim"),
        num_records=num_host_records(config.host_memory, layout) if config.host_memory else 0,
        slot_records=num_page_records(Pool.OPEN, layout),
        is_poisoning=config.poison,
    )


def _scheduler(config: EngineConfig, layout: PageLayout, size: PoolSize, cache: PageCache) -> Scheduler:
    rules = PageRules(
        page_tokens=config.page_tokens,
        sink_pages=layout.recipe.sink_pages,
        shrink_sinks=config.sink_pages,
        num_pages=size.num_pages - 1,
        max_chunk_pages=-(-config.max_step_tokens // config.page_tokens),
        slot_records=num_page_records(Pool.OPEN, layout),
    )
    pools = PagePools(cache, rules)
    return Scheduler(pools, max_num_seqs=config.max_num_seqs, max_step_tokens=config.max_step_tokens)


def _allocate(layout: PageLayout, size: PoolSize, device: torch.device) -> PoolTensors:
    try:
        return PoolTensors.allocate(layout, num_pages=size.num_pages, num_slots=size.num_slots, device=device)
    except (RuntimeError, TypeError) as error:  # out of memory, on CUDA too; a count that no tensor can have
        raise StartupError(
            f"--kv-memory: {size.num_bytes} bytes for K and V are more than {device} can give; lower it"
        ) from error


def _resolve(config: EngineConfig, checkpoint: Checkpoint) -> _Resolved:
    model = checkpoint.config
    length = config.max_model_len or model.max_position
    if length > model.max_position:
        raise StartupError(
            f"--max-model-len is {length}; {checkpoint.name} was made for at most {model.max_position} positions"
        )
    if config.kv_format not in RECIPE_NAMES:
        raise StartupError(f"--kv-format is {config.kv_format}; it must be one of {', '.join(RECIPE_NAMES)}")
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    recipe = named_recipe(
        config.kv_format,
        num_layers=model.num_layers,
        has_k_bias=model.has_k_bias,
        page_tokens=config.page_tokens,
        sink_pages=config.sink_pages,
    )
    layout = PageLayout(recipe, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype=dtype_name(dtype))
    return _Resolved(checkpoint, device, dtype, length, layout, _resolve_shrink(config))


def _resolve_shrink(config: EngineConfig) -> Shrink | None:
    try:
        shrink = parse_shrink(config.shrink)
    except ValueError as error:
        raise StartupError(f"--shrink is {config.shrink!r}; {error}") from error
    if shrink is not None and not shrink.is_positional and config.host_memory is None:
        raise StartupError(
            f"--shrink {config.shrink} needs --host-memory: its pages cannot be computed again after preemption"
        )
    return shrink


def _info(config: EngineConfig, resolved: _Resolved, size: PoolSize) -> EngineInfo:
    layout = resolved.layout
    return EngineInfo(
        model_name=resolved.checkpoint.name,
        max_model_len=resolved.max_model_len,
        vocab_size=resolved.checkpoint.config.vocab_size,
        page_tokens=layout.page_tokens,
        sink_pages=layout.recipe.sink_pages,
        recipe=layout.recipe.name,
        dtype=layout.dtype,
        device=str(resolved.device),
        num_sealed_pages=size.num_pages - 1,
        num_slots=size.num_slots - 1,
        bytes_per_token=layout.bytes_per_token,
        max_num_seqs=config.max_num_seqs,
        max_queued_requests=config.max_queued_requests,
        sampling_defaults=resolved.checkpoint.sampling_defaults,
        shrink=resolved.shrink,
        has_host_memory=config.host_memory is not None,
        page_sizes=PageSizes(layout.page_bytes, layout.slot_bytes),
    )


def _start_table(
    info: EngineInfo, resolved: _Resolved, size: PoolSize, memory: int, weight_bytes: int, backend: str
) -> list[tuple[str, str]]:
    layout, tokens = resolved.layout, info.page_tokens
    needed = num_sequence_pages(info.max_model_len, tokens, info.sink_pages)
    full = min(info.max_num_seqs, info.num_sealed_pages // needed)
    codes, parameters, slot = (
        count / tokens for count in (layout.code_bytes, layout.parameter_bytes, layout.slot_bytes)
    )
    return [
        ("model", f"{info.model_name} ({resolved.checkpoint.config.architecture})"),
        ("weights", f"{info.dtype}, {mebibytes(weight_bytes)}"),
        ("device", info.device),
        ("backend", backend),
        ("recipe", f"{info.recipe}: " + "; ".join(_grouped_layers(layout))),
        ("page", f"{tokens} tokens, {layout.page_bytes} bytes; sink pages kept in 16 bit: {info.sink_pages}"),
        (
            "bytes per token",
            f"{layout.bytes_per_token:.0f} sealed (codes {codes:.0f}, scales {parameters:.0f}); {slot:.0f} in 16 bit",
        ),
        ("KV memory", f"{mebibytes(size.num_bytes)} of {mebibytes(memory)} allowed"),
        ("sealed pool", f"{info.num_sealed_pages} pages, {info.num_sealed_pages * tokens} tokens"),
        ("open pool", f"{info.num_slots} slots, {mebibytes(size.num_slots * layout.slot_bytes)}"),
        ("full requests", f"{full} of {info.max_model_len} tokens at once"),
    ]


def _cache_table(
    config: EngineConfig, info: EngineInfo, num_records: int, num_restored: int | None
) -> list[tuple[str, str]]:
    host = f"{num_records} page records, reclaimed by {config.host_reclaim}" if num_records else "none"
    disk = "none" if num_restored is None else f"{config.cache_dir}, {num_restored} pages taken back"
    return [
        ("reclaim", config.reclaim),
        ("shrink", str(info.shrink or "none")),
        ("host memory", host),
        ("cache folder", disk),
    ]


def mebibytes(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


def _grouped_layers(layout: PageLayout) -> list[str]:
    groups = []
    for recipe, items in groupby(enumerate(layout.recipe.layers), key=lambda item: item[1]):
        layers = [index for index, _ in items]
        span = f"layers {layers[0]}-{layers[-1]}" if len(layers) > 1 else f"layer {layers[0]}"
        groups.append(f"{span} {recipe}")
    return groups
