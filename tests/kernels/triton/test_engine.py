"""The engine over the Triton kernels in the interpreter: the tokens of the torch backend, in fp32."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.core import EngineCore
from engine.errors import StartupError
from engine.graphs import DecodeGraphs, cuda_recorder
from engine.kv.shrink import HeavyHitters
from engine.request import Request
from tests.helpers import TINY, TINY_QWEN2, greedy, random_prompt, run, tiny_core

P = 64
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
MODELS = {
    model.architecture: replace(model, head_dim=64, num_heads=4, num_kv_heads=2, num_layers=2)
    for model in (TINY, TINY_QWEN2)
}
PROMPT = random_prompt(5, 2 * P + 9)


def core(kernels: str, recipe: str, architecture: str = "LlamaForCausalLM", **options: object) -> EngineCore:
    defaults: dict[str, object] = {"page_tokens": P, "kv_format": recipe, "kernels": kernels}
    defaults |= {"kv_memory": 64 * 2**20, "device": DEVICE}
    return tiny_core(MODELS[architecture], **(defaults | options))


def requests() -> list[Request]:
    """A page fills up while one decodes; one has the first's prompt, one has dropped pages."""
    whole = PROMPT + random_prompt(7, P - 11)
    shrunk = replace(greedy("shrunk", whole + PROMPT[:P], 4), shrink=HeavyHitters(heavy=1, recent=1, window=20))
    return [greedy("long", whole, 4), greedy("short", PROMPT[:7], 6), greedy("shared", PROMPT, 3), shrunk]


@pytest.mark.parametrize(
    "recipe, architecture",
    [("native", "LlamaForCausalLM"), ("int4", "LlamaForCausalLM"), ("int8", "Qwen2ForCausalLM")],
)
def test_tokens_are_those_of_the_torch_backend(recipe: str, architecture: str):
    options: dict[str, object] = {"host_memory": 2**26} if recipe != "native" else {}
    wanted, found = (
        [recorder.token_ids for recorder in run(core(kernels, recipe, architecture, **options), requests()[:2])]
        for kernels in ("torch", "triton")
    )
    assert [len(tokens) for tokens in wanted] == [4, 6]
    assert found == wanted


def test_a_request_that_drops_pages_by_attention_mass():
    wanted, found = (
        [recorder.token_ids for recorder in run(core(kernels, "int8", host_memory=2**26), requests()[-1:])]
        for kernels in ("torch", "triton")
    )
    assert len(wanted[0]) == 4
    assert found == wanted


def test_batched_is_alone_bit_for_bit():
    """In company, in other chunks, and behind a hit: equal log-sums are too much to ask of chance, so equal tokens of
    a flat model are not the measure; `test_invariance` compares bits. Here the engine takes that path at all."""
    watched = requests()[0]
    options: dict[str, object] = {"batch_invariant": True, "max_step_tokens": 2 * P + 8}
    (alone,) = run(core("triton", "int8", **options), [watched])
    company = core("triton", "int8", **options)
    assert company.runner.backend.name == "triton (batch-invariant)"
    recorders = run(company, requests()[:3])
    (again,) = run(company, [watched])
    assert recorders[0].token_ids == again.token_ids == alone.token_ids
    assert again.terminal.usage.num_cached_tokens == 2 * P


@pytest.mark.parametrize(
    "options, reason",
    [
        ({"page_tokens": 32}, "a page has 32 tokens; the Triton kernels take 64 or 128"),
        ({"model": TINY}, "head_dim is 16; the Triton kernels take 64, 128 or 256"),
        ({"kernels": "cuda"}, "--kernels is cuda; it must be auto, torch, triton or cpu"),
    ],
)
def test_what_has_no_kernel_is_refused_at_start(options: dict[str, object], reason: str):
    values = {"page_tokens": P, "kernels": "triton", "model": MODELS["LlamaForCausalLM"]} | options
    with pytest.raises(StartupError, match=reason):
        tiny_core(values.pop("model"), **values)  # type: ignore[arg-type]


def run_again(function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """What stands for a graph where there is none: it reads and writes the same memory each time."""
    result = function()
    return lambda: result.copy_(function()), result


@pytest.mark.parametrize("recipe", ["native", "int8"])
def test_replayed_steps_give_the_same_tokens(recipe: str):
    """Three rows take the places of four, and splits those of a power of two; pages fill up between steps."""
    step_by_step = core("triton", recipe)
    step_by_step.runner.replay = None
    plain = [recorder.token_ids for recorder in run(step_by_step, requests()[:3])]
    replayed = core("triton", recipe)
    runner = replayed.runner
    graphs = DecodeGraphs(runner.model, runner.backend, run_again if DEVICE == "cpu" else cuda_recorder())
    runner.replay = graphs
    assert [recorder.token_ids for recorder in run(replayed, requests()[:3])] == plain
    assert {rows for rows, _, _ in graphs.sizes} == {4, 1}
