"""The model under observation: the tensors it shows, and what is found in planted weights."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from engine.config import ModelConfig
from engine.model.linear import PlainProjection
from engine.model.rope import inverse_frequencies
from engine.study.axis_error import Axis, AxisError, Variant
from engine.study.capture import LayerTensors, capture, load_for_capture
from engine.study.distribution import Kind
from engine.study.findings import findings
from engine.study.inspection import Inspection, inspect_window
from tests.engine.plain_model import logits
from tests.helpers import TINY, TINY_QWEN2, TINY_QWEN3, RandomCheckpoint, random_prompt


class Recorder:
    def __init__(self) -> None:
        self.tensors: list[LayerTensors] = []
        self.hidden: list[Tensor] = []

    def attended(self, tensors: LayerTensors) -> None:
        self.tensors.append(tensors)

    def finished(self, layer: int, hidden: Tensor) -> None:
        assert layer == len(self.hidden) == len(self.tensors) - 1
        self.hidden.append(hidden)


def run(config: ModelConfig, tokens: list[int]) -> tuple[Recorder, Tensor]:
    """What the observer got, and the logits."""
    model = load_for_capture(
        RandomCheckpoint(config),
        max_model_len=1024,
        dtype=torch.float32,
        device=torch.device("cpu"),
        make_projection=PlainProjection,
        progress=lambda done, total: None,
    )
    recorder = Recorder()
    hidden = capture(model, tokens, recorder)
    assert hidden is recorder.hidden[-1]
    return recorder, model.logits(hidden)


@pytest.mark.parametrize("config", [TINY, TINY_QWEN2, TINY_QWEN3], ids=lambda config: config.architecture)
def test_the_model_under_observation_is_the_model(config: ModelConfig) -> None:
    tokens = random_prompt(1, 90)
    recorder, found = run(config, tokens)
    frequencies = inverse_frequencies(config.rope, config.head_dim, 1024).tolist()
    expected = logits(config, RandomCheckpoint(config).tensor, frequencies, tokens)
    assert float((found.double() - expected).abs().max()) < 1e-3 * float(expected.abs().max())
    for item in recorder.tensors:
        pairs = [torch.complex(*x.double().chunk(2, -1)) for x in (item.k_before_rope, item.k)]
        angles = torch.outer(torch.arange(90.0), torch.tensor(frequencies)).double().unsqueeze(1)
        assert torch.allclose(pairs[0] * torch.polar(torch.ones_like(angles), angles), pairs[1], atol=1e-3)
        assert item.v.shape == (90, 2, 16) and item.q.shape == item.output.shape == (90, 6, 16)
        assert torch.allclose(item.output[0], item.v[0].repeat_interleave(3, 0), atol=1e-5)


def inspection(**errors: float) -> Inspection:
    """Of the tiny model, with output errors replaced: `k_channel=0.1` is that of K per channel at 4 bits."""
    model = load_for_capture(
        RandomCheckpoint(TINY),
        max_model_len=1024,
        dtype=torch.float32,
        device=torch.device("cpu"),
        make_projection=PlainProjection,
        progress=lambda done, total: None,
    )
    found = inspect_window(model, random_prompt(2, 200), layers=(1,), head=0, advance=lambda: None)
    changes = {
        Variant(kind, axis, 4): AxisError(0.0, None, errors[name])
        for kind in Kind
        for axis in Axis
        if (name := f"{kind.value}_{axis.value}") in errors
    }
    return replace(
        found, attention=tuple(replace(study, errors={**study.errors, **changes}) for study in found.attention)
    )


@pytest.mark.parametrize(
    ("errors", "has_k_bias", "question", "says"),
    [
        ({"k_channel": 0.01, "k_token": 0.03}, False, "axis of K", "per channel, as int8 and int4 do"),
        ({"k_channel": 0.03, "k_token": 0.01}, False, "axis of K", "unusual: per token"),
        ({"v_channel": 0.03, "v_token": 0.01}, False, "axis of V", "per token, as int8 and int4 do"),
        ({"v_channel": 0.02, "v_token": 0.02}, False, "axis of V", "hardly matters"),
        ({"v_channel": 0.01, "v_token": 0.02, "v_rotated_token": 0.01}, False, "axis of V", "not if V is rotated"),
        ({"v_channel": 0.01, "v_token": 0.02, "v_rotated_token": 0.02}, False, "axis of V", "even if V is rotated"),
        ({"k_channel": 0.02, "k_rotated_channel": 0.01}, False, "rotation of K", "rotate K, as int4 does"),
        ({"k_channel": 0.02, "k_rotated_channel": 0.01}, True, "rotation of K", "int4 does not"),
        ({"k_channel": 0.01, "k_rotated_channel": 0.5}, True, "rotation of K", "do not rotate K; int4 does not"),
        ({"k_channel": 0.01, "k_rotated_channel": 0.5}, False, "rotation of K", "compare it with kivi4"),
        ({"v_token": 0.01, "v_rotated_token": 0.5}, False, "rotation of V", "loses by rotation"),
    ],
)
def test_advice_follows_the_errors(errors: dict[str, float], has_k_bias: bool, question: str, says: str) -> None:
    (found,) = (item for item in findings(inspection(**errors), has_k_bias=has_k_bias) if item.question == question)
    assert says in found.advice
