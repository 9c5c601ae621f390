"""From a configuration to a running engine's parts: resolve, size, load, wire together."""

import time
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.config import EngineConfig, ModelConfig
from engine.core import EngineCore
from engine.device import (
    check_room,
    choose_device,
    choose_dtype,
    default_kv_memory,
    limit_threads,
    processor_of,
)
from engine.engine import Engine
from engine.errors import StartupError
from engine.info import EngineInfo
from engine.kernel_choice import Kernels, choose_kernels, find_compiled
from engine.kv.archive import Archive
from engine.kv.cache import CacheOptions, PageCache
from engine.kv.host import HostMemory, PageMover
from engine.kv.keeper import CacheKeeper
from engine.kv.moves import num_host_records, num_page_records
from engine.kv.pages import PagePools
from engine.kv.reclaim import make_reclaim
from engine.kv.report import PageSizes
from engine.kv.rules import PageRules
from engine.kv.shrink import Shrink, parse_shrink, why_none_is_dropped
from engine.kv.sizing import PoolSize, fit_pool, smallest_pool
from engine.model.checkpoint import Checkpoint, open_checkpoint
from engine.model.fingerprint import fingerprint
from engine.model.identity import identify
from engine.model.llama import Llama
from engine.model.rows import AllRows, TiledRows
from engine.model.size import num_parameters
from engine.model.weights import Progress, load_llama
from engine.prescription import prescribe
from engine.recipe_file import read_recipe
from engine.runner import Replay, Runner
from engine.scheduler import Scheduler
from engine.start_table import cache_rows, pool_rows
from engine.tokenizer import Tokenizer
from engine.warm_up import Trial
from kernels.backend import AttentionBackend, PoolTensors, dtype_name
from kernels.format.layout import PageLayout, Pool
from kernels.format.named import RECIPE_NAMES, named_recipe
from kernels.format.recipe import Recipe


def load_engine(config: EngineConfig, progress: Progress) -> Engine:
    """Everything from the model's name on. Raises StartupError with one line where that cannot work."""
    checkpoint = open_checkpoint(config.model, config.revision)
    recipe = None if config.kv_recipe is None else read_recipe_for(checkpoint, config.kv_recipe)
    return build_engine(config, checkpoint, checkpoint.tokenizer(), progress, recipe)


def read_recipe_for(checkpoint: Checkpoint, folder: str) -> Recipe:
    """A recipe that `quire calibrate` wrote. Raises StartupError where it is damaged or for another model."""
    return read_recipe(folder).recipe_for(identify(checkpoint), f"--kv-recipe {folder}")


@dataclass(frozen=True, slots=True)
class _Resolved:
    """What `auto` and None in the configuration came to."""

    checkpoint: Checkpoint
    device: torch.device
    dtype: torch.dtype
    weight_bytes: int
    max_model_len: int
    layout: PageLayout
    kernels: Kernels
    reason: str  # for the recipe
    shrink: Shrink | None


def resolve_layout(config: EngineConfig, checkpoint: Checkpoint, recipe: Recipe | None = None) -> PageLayout:
    """The pages that `build_engine` would make; raises the StartupError of a configuration that cannot be."""
    return _resolve(config, checkpoint, recipe).layout


def build_engine(
    config: EngineConfig,
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    progress: Progress,
    recipe: Recipe | None = None,
) -> Engine:
    """`load_engine` for a checkpoint and a tokenizer that are there already. `recipe`, if given, takes the place of
    what `config` says about the format and the geometry of pages."""
    limit_threads()
    if recipe is not None:
        config = replace(
            config,
            page_tokens=recipe.page_tokens,
            sink_pages=recipe.sink_pages,
            window_pages=recipe.window_pages,
        )
    resolved = _resolve(config, checkpoint, recipe)
    layout, device, length = resolved.layout, resolved.device, resolved.max_model_len
    needs_tiles = config.batch_invariant and not resolved.kernels.is_compiled
    rows = TiledRows(config.page_tokens) if needs_tiles else AllRows()
    weights = f"the weights of {checkpoint.name} in {layout.dtype}"
    check_room(device, resolved.weight_bytes, config.kv_memory or 0, weights)
    # refuse before the weights are read what will not fit beside them either
    fit_pool(layout, config.kv_memory or default_kv_memory(device), config.max_num_seqs, length)
    options = _cache_options(config, layout)
    try:
        model = load_llama(
            checkpoint,
            layout.recipe,
            max_model_len=length,
            dtype=resolved.dtype,
            device=device,
            rows=rows,
            make_projection=resolved.kernels.make_projection,
            progress=progress,
            make_row_ops=resolved.kernels.make_row_ops,
        )
    except torch.OutOfMemoryError as error:
        raise StartupError(f"{weights} take {resolved.weight_bytes} bytes, more than {device} has free") from error
    memory = config.kv_memory
    if memory is None:  # known only now that the weights lie in memory
        enough = smallest_pool(layout, config.max_num_seqs, length, num_full=config.max_num_seqs)
        memory = min(default_kv_memory(device), enough.num_bytes)
    size = fit_pool(layout, memory, config.max_num_seqs, length)
    pool = _allocate(layout, size, device)
    backend = resolved.kernels.make_backend(pool, model.rotary, checkpoint.config.num_heads)
    host = HostMemory(options.num_records, layout.page_bytes, device) if options.num_records else None
    mover = PageMover(pool, host)
    runner = Runner(
        model,
        backend,
        layout.recipe,
        mover,
        rows,
        is_strict=config.poison,
        replay=_replay(config, resolved, model, backend),
    )

    def make_core(cache: PageCache) -> EngineCore:
        scheduler = _scheduler(config, layout, size, cache)
        return EngineCore(scheduler, runner, tokenizer, eos_token_ids=checkpoint.config.eos_token_ids)

    def make_cache() -> PageCache:
        return PageCache(size, config.page_tokens, layout.recipe.sink_pages, options, time.monotonic)

    if resolved.kernels.trial_errors:
        trial = Trial(layout.recipe, length, config.max_step_tokens, resolved.shrink)
        trial.run(make_core(make_cache()), str(device), resolved.kernels.trial_errors)
    cache = make_cache()
    keeper = None
    if config.cache_dir is not None:
        archive = Archive.open(
            Path(config.cache_dir), layout, fingerprint(model, f"{backend.name} {resolved.kernels.build}")
        )
        keeper = CacheKeeper(archive, cache, pool, host, mover) if archive else None
    num_restored = keeper.restore() if keeper else None
    info = _info(config, resolved, size)
    table = [
        *pool_rows(
            info,
            layout,
            size,
            architecture=checkpoint.config.architecture,
            reason=resolved.reason,
            memory=memory,
            weight_bytes=model.num_bytes,
            backend=backend.name,
        ),
        *cache_rows(config, info, options.num_records, num_restored),
    ]
    return Engine(make_core(cache), config=config, info=info, tokenizer=tokenizer, start_table=table, keeper=keeper)


def _weight_bytes(model: ModelConfig, dtype: torch.dtype, *, is_compiled: bool) -> int:
    """Compiled products keep the head in an order of their own, beside the embedding that it is tied to."""
    copy = model.vocab_size * model.hidden_size if model.tie_embeddings and is_compiled else 0
    return (num_parameters(model) + copy) * dtype.itemsize


def _replay(config: EngineConfig, resolved: _Resolved, model: Llama, backend: AttentionBackend) -> Replay | None:
    """What needs the hidden states of every step is not replayed: `--poison`, and a rule for sinks."""
    make = resolved.kernels.make_replay
    needs_hidden = config.poison or resolved.layout.recipe.sink_rule is not None
    return None if make is None or needs_hidden else make(model, backend)


def _cache_options(config: EngineConfig, layout: PageLayout) -> CacheOptions:
    for option, value in (("--cache-dir", config.cache_dir), ("--host-memory", config.host_memory)):
        if layout.recipe.window_pages and value is not None:
            raise StartupError(
                f"{option} is of no use with --window-pages: with a window no page is cached; leave one out"
            )
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
        window_pages=layout.recipe.window_pages,
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


def _resolve(config: EngineConfig, checkpoint: Checkpoint, recipe: Recipe | None = None) -> _Resolved:
    model = checkpoint.config
    length = config.max_model_len or model.max_position
    if length > model.max_position:
        raise StartupError(
            f"--max-model-len is {length}; {checkpoint.name} was made for at most {model.max_position} positions"
        )
    device = choose_device(config.device)
    compiled = find_compiled(config.kernels, device)
    dtype = choose_dtype(config.dtype, device, is_compiled=compiled is not None)

    weight_bytes = _weight_bytes(model, dtype, is_compiled=compiled is not None)

    def layout_of(recipe: Recipe) -> PageLayout:
        return PageLayout(recipe, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype=dtype_name(dtype))

    def named_layout(name: str) -> PageLayout:
        return layout_of(
            named_recipe(
                name,
                num_layers=model.num_layers,
                has_k_bias=model.has_k_bias,
                page_tokens=config.page_tokens,
                sink_pages=config.sink_pages,
                window_pages=config.window_pages,
            )
        )

    if recipe is not None:
        layout, reason = layout_of(recipe), f"read from {config.kv_recipe}" if config.kv_recipe else "given as a recipe"
    elif config.kv_format == "auto":
        choice = prescribe(
            processor_of(device),
            named_layout,
            memory=config.kv_memory or default_kv_memory(device, weight_bytes),
            max_num_seqs=config.max_num_seqs,
            max_model_len=length,
        )
        layout, reason = named_layout(choice.recipe), f"auto: {choice.reason}"
    elif config.kv_format in RECIPE_NAMES:
        layout, reason = named_layout(config.kv_format), "asked for with --kv-format"
    else:
        names = ", ".join(("auto", *RECIPE_NAMES))
        raise StartupError(f"--kv-format is {config.kv_format}; it must be one of {names}")
    kernels = choose_kernels(
        config.kernels, device, layout, compiled, num_heads=model.num_heads, is_invariant=config.batch_invariant
    )
    shrink = _resolve_shrink(config, layout.recipe)
    return _Resolved(checkpoint, device, dtype, weight_bytes, length, layout, kernels, reason, shrink)


def _resolve_shrink(config: EngineConfig, recipe: Recipe) -> Shrink | None:
    try:
        shrink = parse_shrink(config.shrink)
    except ValueError as error:
        raise StartupError(f"--shrink is {config.shrink!r}; {error}") from error
    if shrink is not None and (reason := why_none_is_dropped(recipe)):
        raise StartupError(f"--shrink is {config.shrink}; {reason}; leave it out")
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
        eos_token_ids=resolved.checkpoint.config.eos_token_ids,
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
        why_none_is_dropped=why_none_is_dropped(layout.recipe),
        has_host_memory=config.host_memory is not None,
        page_sizes=PageSizes(layout.page_bytes, layout.slot_bytes),
    )
