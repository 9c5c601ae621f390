"""Decode steps of a model of random weights through the engine, and what of a step is not kernels."""

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from engine.config import DefaultRope, EngineConfig, ModelConfig
from engine.core import EngineCore
from engine.graphs import DecodeGraphs, cuda_recorder
from engine.load import build_engine
from tests.gpu.plan import EndToEnd, Heads
from tests.gpu.timer import Timer
from tests.helpers import RandomCheckpoint, Recorder, byte_tokenizer, greedy, random_prompt

STEP_TOKENS = 8192


class DrawnOnDevice(RandomCheckpoint):
    """Weights drawn where they will be, which is faster; but those of attention, which are rotated on the CPU."""

    def __init__(self, config: ModelConfig, device: torch.device):
        super().__init__(config)
        self._device = device

    def tensor(self, name: str) -> Tensor:
        if "norm" in name:
            return super().tensor(name)
        shape = self._shapes[".".join(name.split(".")[-2:])]
        values = torch.randn(shape, device=self._device) * (1 / shape[1]) ** 0.5
        return values.cpu() if "self_attn" in name else values


class TimedGraphs:
    """Stands for what records a decode step, and keeps the last replay to time it."""

    def __init__(self, device: torch.device):
        self._is_cuda = device.type == "cuda"
        self.last: Callable[[], object] = lambda: None

    def record(self, function: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
        if self._is_cuda:
            replay, result = cuda_recorder()(function)
        else:
            result = function()

            def replay() -> None:
                result.copy_(function())

        def remembered() -> None:
            self.last = replay
            replay()

        return remembered, result


def model_config(plan: EndToEnd, heads: Heads, num_layers: int) -> ModelConfig:
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=plan.model.vocab_size,
        hidden_size=plan.model.hidden_size,
        intermediate_size=plan.model.intermediate_size,
        num_layers=num_layers,
        num_heads=heads.num_heads,
        num_kv_heads=heads.num_kv_heads,
        head_dim=heads.head_dim,
        rms_norm_eps=1e-5,
        max_position=8192,
        rope=DefaultRope(theta=500000.0),
        tie_embeddings=False,
        qkv_bias=False,
        qk_norm=False,
        output_bias=False,
        mlp_bias=False,
        eos_token_ids=frozenset({0}),
    )


class EndToEndRun:
    """One format, one model; `batches` one after another."""

    def __init__(self, plan: EndToEnd, heads: Heads, name: str, num_layers: int, device: torch.device, timer: Timer):
        self._plan = plan
        self._name = name
        self._num_layers = num_layers
        self._timer = timer
        self._vocab_size = plan.model.vocab_size
        most = max(plan.batches)
        num_tokens = plan.prompt_tokens + heads.page_tokens + plan.num_generated + 1
        config = EngineConfig(
            model="random",
            kv_format=name,
            dtype=plan.dtype,
            device=device.type,
            kernels="triton",
            page_tokens=heads.page_tokens,
            max_num_seqs=most,
            max_step_tokens=most + STEP_TOKENS,
            max_model_len=num_tokens,
            kv_memory=None if device.type == "cuda" else 2**26,
        )
        checkpoint = DrawnOnDevice(model_config(plan, heads, num_layers), device)
        self._core: EngineCore = build_engine(config, checkpoint, byte_tokenizer(), lambda done, total: None).core
        runner = self._core.runner
        self._timed = TimedGraphs(device)
        self._graphs = DecodeGraphs(runner.model, runner.backend, self._timed.record)  # type: ignore[arg-type]

    def measure(self, batch: int) -> dict[str, Any]:
        """Seconds: `step` wall time, what the caller of a step waits; `graph` what its kernels take with the gaps
        between them, `kernels` without; `plain_step` wall time without graphs."""
        core, plan = self._core, self._plan
        core.runner.replay = self._graphs
        prefill = self._start(batch)
        for _ in range(plan.num_warm_up):
            core.step()
        steps = [self._step() for _ in range(plan.num_steps)]
        graph = self._timer.replay_seconds(self._timed.last)
        kernels = self._timer.kernel_seconds(self._timed.last)
        core.runner.replay = None
        plain = [self._step() for _ in range(plan.num_plain_steps)]
        for index in range(batch):
            core.cancel(str(index))
        mean, step = sum(steps) / len(steps), median(steps)
        return {
            "format": self._name,
            "layers": self._num_layers,
            "batch": batch,
            "prompt_tokens": plan.prompt_tokens,
            "prefill_tokens_per_second": batch * plan.prompt_tokens / prefill,
            "tokens_per_second": batch / mean,
            "step": step,
            "mean_step": mean,
            "graph": graph,
            "kernels": kernels,
            "plain_step": median(plain),
            "gaps_in_graph": None if kernels is None else 1 - kernels / graph,
            "not_kernels": None if kernels is None else 1 - kernels / step,
        }

    def _start(self, batch: int) -> float:
        """Until each sequence has its first token: the seconds that this takes. Prompts differ in length, so that
        pages fill up one by one."""
        plan, core = self._plan, self._core
        recorders = [Recorder() for _ in range(batch)]
        page = core.runner.backend.pool.layout.page_tokens  # type: ignore[attr-defined]
        for index, recorder in enumerate(recorders):
            length = plan.prompt_tokens + index * page // batch
            prompt = random_prompt(1000 * batch + index, length, self._vocab_size)
            core.add([greedy(str(index), prompt, plan.num_generated + 1)], [recorder])
        start = time.perf_counter()
        while not all(recorder.events for recorder in recorders):
            core.step()
        self._timer.synchronize()
        return time.perf_counter() - start

    def _step(self) -> float:
        start = time.perf_counter()
        self._core.step()
        self._timer.synchronize()
        return time.perf_counter() - start
