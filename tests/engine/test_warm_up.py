"""The trial before the server is ready, over the torch backend: what it runs, and what it says where that fails."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import engine.load
from engine.core import EngineCore
from engine.errors import StartupError
from engine.kernel_choice import Kernels, choose_kernels
from engine.plan import StepPlan
from engine.warm_up import NUM_GENERATED, Trial
from kernels.torch_backend.backend import TorchBackend
from tests.helpers import greedy, pool_of, random_prompt, run, tiny_core, tiny_engine

P = 32


class KernelError(Exception):
    """What stands for an error of Triton's."""


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the torch backend, as if they had to be compiled."""

    def choose(*args: Any, **options: Any) -> Kernels:
        return replace(choose_kernels(*args, **options), trial_errors=(KernelError,))

    monkeypatch.setattr(engine.load, "choose_kernels", choose)


def watched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the torch backend is called for from now on."""
    calls: list[str] = []
    for name in ("append", "attend", "seal"):
        method = getattr(TorchBackend, name)

        def call(self: TorchBackend, *args: Any, name: str = name, method: Callable[..., Any] = method) -> Any:
            calls.append(name)
            return method(self, *args)

        monkeypatch.setattr(TorchBackend, name, call)
    return calls


def try_out(core: EngineCore, max_model_len: int, max_step_tokens: int) -> None:
    Trial(pool_of(core).layout.recipe, max_model_len, max_step_tokens, None).run(core, "cpu", (KernelError,))


@pytest.mark.parametrize("options", [{}, {"sink_pages": 2}, {"max_step_tokens": 4 * P}])
def test_pages_are_sealed_from_a_step_and_from_a_slot(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    core = tiny_core(kv_format="int8", kernels="torch", **options)
    calls = watched(monkeypatch)
    num_tokens = options.get("max_step_tokens", 256)
    try_out(core, 1024, num_tokens)
    pool = pool_of(core)
    assert calls.count("seal") == 1
    assert calls.count("append") == calls.count("attend") == NUM_GENERATED * len(pool.layout.layers)
    assert pool.sealed.any(1).sum() == num_tokens // P - pool.layout.recipe.sink_pages
    core.scheduler.check()


@pytest.mark.parametrize("max_model_len", [4, P + 1, P + 2, 2 * P + 2, 257, 1024])
@pytest.mark.parametrize("max_step_tokens", [2 * P, 3 * P + 5, 256])
@pytest.mark.parametrize("options", [{}, {"sink_pages": 2}, {"kv_format": "native"}, {"window_pages": 3}])
def test_the_prompt_is_never_refused(max_model_len: int, max_step_tokens: int, options: dict[str, Any]):
    """Every model length and step size that the engine itself takes."""
    sizes = {"max_model_len": max_model_len, "max_step_tokens": max_step_tokens}
    core = tiny_core(**({"kv_format": "int8"} | sizes | options))
    steps: list[StepPlan] = []
    run_step = core.runner.run
    core.runner.run = lambda plan: steps.append(plan) or run_step(plan)  # type: ignore[method-assign, func-returns-value]
    try_out(core, max_model_len, max_step_tokens)
    assert sum(len(plan.sampled) for plan in steps) == NUM_GENERATED


def test_nothing_of_it_is_left(compiled: None, monkeypatch: pytest.MonkeyPatch):
    """Counters are 0, no page is cached, and the first request gets the tokens that it gets without a trial."""
    prompt = random_prompt(3, 2 * P + 5)
    tried = tiny_engine(kv_format="int8")
    snapshot = tried.core.scheduler.snapshot(tried.info.page_sizes)
    with monkeypatch.context() as patch:
        patch.setattr(engine.load, "choose_kernels", choose_kernels)
        plain = tiny_engine(kv_format="int8")
    assert snapshot == plain.core.scheduler.snapshot(plain.info.page_sizes)
    (found,), (wanted,) = (run(engine.core, [greedy("a", prompt, 6)]) for engine in (tried, plain))
    assert found.token_ids == wanted.token_ids


@pytest.mark.parametrize(
    "error, reason",
    [
        (
            KernelError("shared memory, Required: 9\nmore"),
            "KernelError: shared memory, Required: 9;",
        ),
        (torch.OutOfMemoryError("tried to allocate"), "--kv-memory leaves cpu too little for a step of 256 tokens"),
    ],
)
def test_what_does_not_run_is_a_line_at_start(
    error: Exception, reason: str, compiled: None, monkeypatch: pytest.MonkeyPatch
):
    def fail(*args: Any) -> None:
        raise error

    monkeypatch.setattr(TorchBackend, "append", fail)
    with pytest.raises(StartupError, match=reason) as caught:
        tiny_engine(kv_format="int8")
    assert "\n" not in str(caught.value)


def test_weights_that_do_not_fit_are_a_line_at_start(monkeypatch: pytest.MonkeyPatch):
    def fail(*args: Any, **options: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(engine.load, "load_llama", fail)
    with pytest.raises(StartupError, match="the weights of .* in float32 take [0-9]+ bytes, more than cpu has free"):
        tiny_engine(kv_format="int8")
