"""A tiny random model and an engine around it, for tests that need no checkpoint on disk."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import tokenizers
import torch

from engine.config import DefaultRope, EngineConfig, ModelConfig
from engine.core import EngineCore
from engine.engine import Engine
from engine.load import build_engine
from engine.request import Delta, Event, Failed, Finished, Request, SamplingDefaults, SamplingParams
from engine.tokenizer import Tokenizer
from kernels.backend import PoolTensors
from kernels.format.recipe import Recipe

TINY = ModelConfig(
    architecture="LlamaForCausalLM",
    vocab_size=256,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    rms_norm_eps=1e-5,
    max_position=1024,
    rope=DefaultRope(theta=10000.0),
    tie_embeddings=True,
    qkv_bias=False,
    qk_norm=False,
    output_bias=False,
    mlp_bias=False,
    eos_token_ids=frozenset({0}),
)
TINY_QWEN3 = replace(TINY, architecture="Qwen3ForCausalLM", qk_norm=True)
TINY_QWEN2 = replace(TINY, architecture="Qwen2ForCausalLM", qkv_bias=True, tie_embeddings=False)

COVERING_RECIPES = ("native", "int8", "int4", "int2", "q4_0", "nvfp4", "fp8_e4m3_unit")
"""For slow tests: between them they have all that named recipes are made of (tests/kernels/test_named.py)."""


class RandomCheckpoint:
    """Weights drawn from a seeded generator: large enough that attention is not flat."""

    name = "tiny"

    def __init__(self, config: ModelConfig, seed: int = 0):
        self.config = config
        self.sampling_defaults = SamplingDefaults()
        self._seed = seed
        query, value = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self._shapes = {
            "embed_tokens.weight": (config.vocab_size, config.hidden_size),
            "lm_head.weight": (config.vocab_size, config.hidden_size),
            "q_proj.weight": (query, config.hidden_size),
            "k_proj.weight": (value, config.hidden_size),
            "v_proj.weight": (value, config.hidden_size),
            "q_proj.bias": (query,),
            "k_proj.bias": (value,),
            "v_proj.bias": (value,),
            "o_proj.weight": (config.hidden_size, query),
            "o_proj.bias": (config.hidden_size,),
            "gate_proj.weight": (config.intermediate_size, config.hidden_size),
            "up_proj.weight": (config.intermediate_size, config.hidden_size),
            "down_proj.weight": (config.hidden_size, config.intermediate_size),
            "gate_proj.bias": (config.intermediate_size,),
            "up_proj.bias": (config.intermediate_size,),
            "down_proj.bias": (config.hidden_size,),
        }

    def tensor(self, name: str) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(norm_width(self.config, name))
        shape = self._shapes[".".join(name.split(".")[-2:])]
        number = self._seed * 1_000_003 + sum(ord(letter) * 31**place for place, letter in enumerate(name)) % 2**31
        values = torch.randn(shape, generator=torch.Generator().manual_seed(number))
        return values if len(shape) == 1 else values * (3 / shape[1]) ** 0.5


def norm_width(config: ModelConfig, name: str) -> int:
    """How many channels the norm of this name takes."""
    return config.head_dim if name.endswith(("q_norm.weight", "k_norm.weight")) else config.hidden_size


def byte_tokenizer() -> Tokenizer:
    """256 tokens, one a byte."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = tokenizers.decoders.ByteLevel()
    return Tokenizer(backend, None)


def tiny_engine(
    model: ModelConfig = TINY,
    recipe: Recipe | None = None,
    *,
    checkpoint: RandomCheckpoint | None = None,
    **options: object,
) -> Engine:
    """An engine over the tiny model, native in fp32 on the CPU, not started; `options` are fields of EngineConfig, but
    for what `recipe` says in their place. `checkpoint`: where its weights come from, if they are to be special."""
    defaults: dict[str, object] = {
        "model": "tiny",
        "kv_format": "native",
        "dtype": "float32",
        "device": "cpu",
        "page_tokens": 32,
        "max_num_seqs": 8,
        "max_step_tokens": 256,
        "kv_memory": 16 * 2**20,
    }
    config = EngineConfig(**(defaults | options))  # type: ignore[arg-type]
    return build_engine(
        config, checkpoint or RandomCheckpoint(model), byte_tokenizer(), lambda done, total: None, recipe
    )


def tiny_core(model: ModelConfig = TINY, recipe: Recipe | None = None, **options: object) -> EngineCore:
    """The core of `tiny_engine`."""
    return tiny_engine(model, recipe, **options).core


def pool_of(core: EngineCore) -> PoolTensors:
    return core.runner.backend.pool


@dataclass
class Recorder:
    """Collects the events of one request."""

    events: list[Event] = field(default_factory=list)

    def __call__(self, event: Event) -> None:
        self.events.append(event)

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for event in self.events if isinstance(event, Delta) for token in event.token_ids)

    @property
    def text(self) -> str:
        return "".join(event.text for event in self.events if isinstance(event, Delta))

    @property
    def terminal(self) -> Finished | Failed:
        (terminal,) = (event for event in self.events if isinstance(event, Finished | Failed))
        assert terminal is self.events[-1]
        return terminal


def run(core: EngineCore, requests: Sequence[Request]) -> list[Recorder]:
    """Run requests together to their ends, checking the pool after every step."""
    recorders = [Recorder() for _ in requests]
    for request, recorder in zip(requests, recorders, strict=True):
        core.add([request], [recorder])
    while not core.is_idle:
        core.step()
        core.scheduler.check()
    return recorders


def greedy(id: str, prompt: Sequence[int], max_tokens: int, **sampling: object) -> Request:
    params = SamplingParams(max_tokens=max_tokens, **({"temperature": 0, "ignore_eos": True} | sampling))  # type: ignore[arg-type]
    return Request(id=id, prompt=tuple(prompt), sampling=params)


def random_prompt(seed: int, length: int, vocab_size: int = 256) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, vocab_size, (length,), generator=generator).tolist()
