"""Configuration as values: what the user asked for, and what the checkpoint says. No torch here.

Each default is stated once, in the field. The command line and the environment are generated from the fields.
"""

import re
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

from engine.errors import StartupError


def option(default: Any, help: str, group: str, **extra: Any) -> Any:
    """A dataclass field that is also a command-line option (`--some-name`) and a variable (`QUIRE_SOME_NAME`).

    `fixed_by`: a field that, if it is given, says what this one says, so that giving both is an error.
    """
    return field(default=default, metadata={"help": help, "group": group, **extra})


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What the user asked of the engine. `None` means: work it out from the model and the device."""

    model: str
    kv_format: str = option(
        "auto",
        "how K and V are stored in sealed pages; auto chooses by device, context and memory (docs/capacity.md)",
        "KV pool",
        choices="recipes",
        fixed_by="kv_recipe",
    )
    kv_recipe: str | None = option(
        None, "folder that quire calibrate wrote: how K and V are stored in each layer, and the pages", "KV pool"
    )
    kv_memory: int | None = option(
        None,
        "memory for K and V, as bytes or 2GiB (default: enough for all sequences, at most a share of what is free)",
        "KV pool",
        parse="bytes",
    )
    page_tokens: int = option(64, "tokens in a page: 32, 64 or 128", "KV pool", fixed_by="kv_recipe")
    sink_pages: int = option(
        1, "first pages of a sequence that stay in 16 bit (native: always 0)", "KV pool", fixed_by="kv_recipe"
    )
    window_pages: int = option(
        0,
        "pages before a token's own that it reads in 16 bit; above 0 no page is shared or dropped (native: 0)",
        "KV pool",
        fixed_by="kv_recipe",
    )
    reclaim: str = option(
        "lru",
        "which cached page goes first: lru, lfu, slru, fifo, priority (slru and priority: with ttl=SECONDS), "
        "or path.py:Class",
        "prefix cache",
    )
    shrink: str = option(
        "none",
        "pages that requests drop as they grow: none, streaming:recent=N, h2o:heavy=N,recent=N or snapkv:keep=N",
        "prefix cache",
    )
    host_memory: int | None = option(
        None,
        "memory for cached pages that leave the pool, as bytes or 8GiB (default: none)",
        "prefix cache",
        parse="bytes",
    )
    host_reclaim: str = option("lru", "which page in host memory goes first; as --reclaim", "prefix cache")
    cache_dir: str | None = option(
        None, "folder that keeps cached pages while the server is down; holds users' tokens", "prefix cache"
    )
    poison: bool = option(
        False,
        "fill pages with NaN when they become free, and stop at the first number that is not finite",
        "prefix cache",
    )
    max_model_len: int | None = option(None, "longest prompt plus output, in tokens (default: the model's)", "engine")
    max_num_seqs: int = option(32, "sequences that run at the same time", "engine")
    max_step_tokens: int = option(1024, "tokens in one forward pass, prefill and decode together", "engine")
    max_queued_requests: int = option(256, "requests that may wait; more are refused", "engine")
    max_queued_tokens: int = option(2**20, "prompt tokens that may wait; more requests are refused", "engine")
    batch_invariant: bool = option(
        False, "bit-equal outputs whatever the batching, chunking and preemption (slower)", "engine"
    )
    revision: str | None = option(
        None, "branch, tag or commit of a model that comes from a hub (default: its main branch)", "model"
    )
    device: str = option("auto", "auto, cpu or cuda", "model")
    dtype: str = option("auto", "auto, float32, bfloat16 or float16", "model", choices="dtypes")
    kernels: str = option(
        "auto", "auto (triton on CUDA, else cpu; torch where that is not built), torch, triton or cpu", "model"
    )

    def __post_init__(self) -> None:
        if self.page_tokens not in (32, 64, 128):
            raise StartupError(f"--page-tokens is {self.page_tokens}; it must be 32, 64 or 128")
        if self.cache_dir == "":
            raise StartupError("--cache-dir is empty; name a folder")
        for name in ("sink_pages", "window_pages"):
            if (value := getattr(self, name)) < 0:
                raise StartupError(f"--{name.replace('_', '-')} is {value}; it must be at least 0")
        counts = ("max_num_seqs", "max_model_len", "max_queued_requests", "max_queued_tokens")
        for name in (*counts, "kv_memory", "host_memory"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise StartupError(f"--{name.replace('_', '-')} is {value}; it must be at least 1")
        least = self.max_num_seqs + self.page_tokens
        if self.max_step_tokens < least:
            raise StartupError(
                f"--max-step-tokens is {self.max_step_tokens}; with {self.max_num_seqs} sequences and pages of "
                f"{self.page_tokens} tokens it must be at least {least}"
            )


UNITS = {"": 1, "b": 1, "k": 10**3, "kb": 10**3, "m": 10**6, "mb": 10**6, "g": 10**9, "gb": 10**9,
         "kib": 2**10, "mib": 2**20, "gib": 2**30}  # fmt: skip


def parse_bytes(text: str) -> int:
    """`2GiB`, `500MB` or plain bytes. Raises ValueError with what is accepted."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if not match or match[2].lower() not in UNITS:
        raise ValueError(f"{text!r} is not a size; write bytes or a number with KiB, MiB, GiB, KB, MB or GB")
    return int(Fraction(match[1]) * UNITS[match[2].lower()])


@dataclass(frozen=True, slots=True, kw_only=True)
class DefaultRope:
    """Rotary embedding as in RoFormer: frequencies `theta ** (-2i / head_dim)`."""

    theta: float


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearRope:
    """All frequencies divided by `factor` (position interpolation)."""

    theta: float
    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Rope:
    """Llama 3.1: low frequencies divided by `factor`, high ones kept, a smooth blend between."""

    theta: float
    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnRope:
    """YaRN (arXiv 2309.00071): pairs that turn more than `beta_fast` times in the original context kept, those that
    turn less than `beta_slow` times divided by `factor`, a ramp between. cos and sin times `attention_factor`."""

    theta: float
    factor: float
    original_max_position: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    has_whole_bounds: bool
    """The ramp begins and ends at whole pairs (`truncate`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicRope:
    """NTK-aware scaling: theta grows with the context beyond the original one. Here the longest context that is served
    decides, once, so that K does not depend on how long its sequence becomes."""

    theta: float
    factor: float
    original_max_position: int


Rope = DefaultRope | LinearRope | Llama3Rope | YarnRope | DynamicRope


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer of the Llama family, as its checkpoint describes it."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position: int
    """The longest context: what RoPE scaling extends the original one to, where there is one."""
    rope: Rope
    tie_embeddings: bool
    qkv_bias: bool
    qk_norm: bool
    """Each head of Q and K is normalised by its root mean square before RoPE."""
    output_bias: bool
    mlp_bias: bool
    eos_token_ids: frozenset[int]

    @property
    def has_k_bias(self) -> bool:
        """A bias on K decides whether K may be rotated (docs/log.md)."""
        return self.qkv_bias
