"""What the fingerprint of a loaded model tells apart, and what it does not."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engine.config import DynamicRope, ModelConfig, Rope
from engine.kernel_choice import make_products
from engine.model import fingerprint as module
from engine.model.linear import MakeProjection, PlainProjection
from engine.model.llama import Llama
from engine.model.rows import AllRows, Rows, TiledRows
from engine.model.weights import load_llama
from kernels.format.named import named_recipe
from tests.helpers import TINY, TINY_QWEN2, RandomCheckpoint
from tests.kernels.compiled import kernel_path

ROOT = Path(__file__).parents[2]
BIASED = replace(TINY_QWEN2, qk_norm=True, output_bias=True, mlp_bias=True)
DYNAMIC = DynamicRope(theta=10000.0, factor=4.0, original_max_position=256)


def fingerprint(model: Llama, kernels: str = "torch") -> str:
    return module.fingerprint(model, kernels)


class Changed:
    """A checkpoint with noise of one part in a thousand on one tensor."""

    def __init__(self, checkpoint: RandomCheckpoint, changed: str):
        self._checkpoint = checkpoint
        self._changed = changed
        self.config = checkpoint.config
        self.num_changes = 0

    def tensor(self, name: str) -> Tensor:
        tensor = self._checkpoint.tensor(name)
        if name != self._changed:
            return tensor
        self.num_changes += 1
        return tensor * (1 + torch.randn(tensor.shape, generator=torch.Generator().manual_seed(1)) / 1000)


def load(
    checkpoint: Any,
    *,
    kv_format: str = "native",
    dtype: torch.dtype = torch.float32,
    rows: Rows | None = None,
    make_projection: MakeProjection = PlainProjection,
    max_model_len: int = 1024,
) -> Llama:
    config: ModelConfig = checkpoint.config
    recipe = named_recipe(
        kv_format, num_layers=config.num_layers, has_k_bias=config.has_k_bias, page_tokens=32, sink_pages=1
    )
    return load_llama(
        checkpoint,
        recipe,
        max_model_len=max_model_len,
        dtype=dtype,
        device=torch.device("cpu"),
        rows=rows or AllRows(),
        make_projection=make_projection,
        progress=lambda done, total: None,
    )


def tensor_names(config: ModelConfig) -> list[str]:
    names = ["model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    for layer in range(config.num_layers):
        parts = ["input_layernorm.weight", "post_attention_layernorm.weight"]
        parts += ["self_attn.q_norm.weight", "self_attn.k_norm.weight"]
        for kind in ("weight", "bias"):
            parts += [f"self_attn.{name}_proj.{kind}" for name in "qkvo"]
            parts += [f"mlp.{name}_proj.{kind}" for name in ("gate", "up", "down")]
        names += [f"model.layers.{layer}.{part}" for part in parts]
    return names


@pytest.mark.parametrize("name", tensor_names(BIASED))
def test_noise_on_one_tensor_shows(name: str) -> None:
    checkpoint = RandomCheckpoint(BIASED)
    changed = Changed(checkpoint, name)
    assert fingerprint(load(changed)) != fingerprint(load(checkpoint))
    assert changed.num_changes == 1


def test_it_is_the_same_in_every_process() -> None:
    """And with any number of threads, and for any hash seed of Python's."""
    script = (
        "import torch; torch.set_num_threads(2)\n"
        "from tests.engine.test_fingerprint import *\n"
        "print(fingerprint(load(RandomCheckpoint(BIASED), kv_format='int4', dtype=torch.bfloat16)))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT)
    here = fingerprint(load(RandomCheckpoint(BIASED), kv_format="int4", dtype=torch.bfloat16))
    assert result.stdout == f"{here}\n"
    assert len(here) == 32


def test_whatever_decides_a_page_shows() -> None:
    """Other last bits make another model: a page must be what this very server would compute."""
    checkpoint = RandomCheckpoint(TINY)
    names = {
        fingerprint(load(checkpoint)),
        fingerprint(load(RandomCheckpoint(TINY, seed=1))),
        fingerprint(load(RandomCheckpoint(replace(TINY, rms_norm_eps=1e-6)))),
        fingerprint(load(RandomCheckpoint(replace(TINY, rope=replace(TINY.rope, theta=20000.0))))),
        fingerprint(load(RandomCheckpoint(replace(TINY, num_layers=1)))),
        fingerprint(load(checkpoint, dtype=torch.bfloat16)),
        fingerprint(load(checkpoint, dtype=torch.float16)),
        fingerprint(load(checkpoint, rows=TiledRows(32))),
        fingerprint(load(checkpoint, rows=TiledRows(64))),
        fingerprint(load(checkpoint), "cpu (avx2) 0123"),
        fingerprint(load(checkpoint), "cpu (avx2) 4567"),
    }
    assert len(names) == 11


def test_what_decides_no_page_does_not_show() -> None:
    name = fingerprint(load(RandomCheckpoint(TINY)))
    assert fingerprint(load(RandomCheckpoint(replace(TINY, eos_token_ids=frozenset({1, 2}))))) == name


def test_the_longest_context_shows_where_it_decides_the_frequencies() -> None:
    def name(rope: Rope, length: int) -> str:
        return fingerprint(load(RandomCheckpoint(replace(TINY, rope=rope)), max_model_len=length))

    assert len({name(DYNAMIC, length) for length in (256, 257, 1000, 1024)}) == 4
    assert name(DYNAMIC, 100) == name(DYNAMIC, 256)
    assert name(TINY.rope, 100) == name(TINY.rope, 1024)


def test_another_build_of_pytorch_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = load(RandomCheckpoint(TINY))
    name = fingerprint(model)
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert fingerprint(model) != name


@pytest.mark.parametrize("changed", ["model.layers.1.mlp.down_proj.weight", "model.layers.0.self_attn.k_proj.bias"])
def test_weights_in_another_order_are_seen(changed: str) -> None:
    checkpoint = RandomCheckpoint(BIASED)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "make_projection": make_products(kernel_path())}
    name = fingerprint(load(checkpoint, **options))
    assert fingerprint(load(checkpoint, **options)) == name
    noisy = Changed(checkpoint, changed)
    assert fingerprint(load(noisy, **options)) != name
    assert noisy.num_changes == 1
