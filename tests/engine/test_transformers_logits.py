"""Logits and rotary frequencies in fp32 are those of transformers (data made by tests/peers/regenerate.py)."""

import json
import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import engine.runner
from engine.config import DynamicRope, EngineConfig, YarnRope
from engine.errors import StartupError
from engine.load import build_engine
from engine.model.checkpoint import Checkpoint, open_checkpoint
from engine.model.describe import describe
from engine.model.rope import inverse_frequencies, make_rotary
from engine.sampler import sample
from tests.helpers import byte_tokenizer, greedy, run
from tests.peers.model_cases import ModelCase, model_cases, rope_cases
from tests.peers.model_logits import EXPECTED, computed

# The last bit of a frequency, 2**-24 or so, times 200 positions is 1.2e-5 of an angle, and cos and sin follow; sums of
# up to 48 products of about 1 carry 48 * 2**-24 = 3e-6 each. Ten such steps in a row of two layers come to 1e-4.
CLOSE = 1e-4
PAGE = 32


@cache
def expected(what: str) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(EXPECTED.read_text())[what]
    return stored


def engine_logits(checkpoint: Checkpoint, tokens: Sequence[int], **options: object) -> dict[int, torch.Tensor]:
    """fp32 logits by position, of three requests that begin with the same tokens and are made to generate the next:
    one decodes over the end of the original context, one has its prompt beyond it, one runs up to the end."""
    seen: dict[int, torch.Tensor] = {}

    def forced(rows: torch.Tensor, params: object, positions: Sequence[int]) -> list[int]:
        seen.update(zip([position - 1 for position in positions], rows.clone(), strict=True))
        drawn = sample(rows, params, positions)  # type: ignore[arg-type]
        return [tokens[place] if place < len(tokens) else drawn[row] for row, place in enumerate(positions)]

    config = EngineConfig(
        model="", kv_format="native", dtype="float32", device="cpu", page_tokens=PAGE, max_num_seqs=8,
        max_step_tokens=40, kv_memory=2**22, max_model_len=len(tokens), **options,
    )  # fmt: skip
    core = build_engine(config, checkpoint, byte_tokenizer(), lambda done, total: None).core
    spans = [(start, stop) for start, stop in ((20, 81), (120, 140), (180, 200)) if start < len(tokens)]
    with patch.object(engine.runner, "sample", forced):
        run(core, [greedy(str(a), tokens[:a], min(b, len(tokens)) - a) for a, b in spans])
    return seen


@pytest.mark.parametrize("name", model_cases())
@pytest.mark.parametrize("batch_invariant", [False, True], ids=["plain", "invariant"])
def test_logits_are_those_of_transformers(name: str, batch_invariant: bool, tmp_path: Path) -> None:
    case = model_cases()[name]
    checkpoint = open_checkpoint(str(case.write(tmp_path / "model")))
    seen = engine_logits(checkpoint, case.tokens, batch_invariant=batch_invariant)
    ours = torch.stack([seen[position] for position in case.positions])
    theirs = torch.tensor(expected("models")[name])
    assert theirs.std() > 0.5  # there is something to be close to
    assert (ours - theirs).abs().max() < CLOSE


@pytest.mark.parametrize("name", [name for name in model_cases() if "yarn" in name or name.endswith("dynamic")])
def test_plain_frequencies_would_show(name: str, tmp_path: Path) -> None:
    """The same weights without scaling give logits far off, or the comparison above would say nothing."""
    case = model_cases()[name]
    scaling = dict.fromkeys(("rope_scaling", "rope_parameters"))
    plain = case.raw | scaling | {"rope_theta": describe(case.raw).rope.theta, "max_position_embeddings": 256}
    checkpoint = open_checkpoint(str(ModelCase(plain).write(tmp_path / "model")))
    seen = engine_logits(checkpoint, case.tokens)
    theirs = torch.tensor(expected("models")[name])
    assert (torch.stack([seen[position] for position in case.positions]) - theirs).abs().max() > 1000 * CLOSE


@pytest.mark.parametrize("name", ["qwen2 yarn", "llama dynamic"])
def test_scaling_bounds_the_context(name: str, tmp_path: Path) -> None:
    """Both files state 64 positions and a factor of 4."""
    checkpoint = open_checkpoint(str(model_cases()[name].write(tmp_path / "model")))

    def served(max_model_len: int | None) -> int:
        config = EngineConfig(model="", device="cpu", max_model_len=max_model_len, kv_memory=2**24)
        return build_engine(config, checkpoint, byte_tokenizer(), lambda done, total: None).info.max_model_len

    assert served(None) == served(256) == 256
    with pytest.raises(StartupError, match="--max-model-len is 257; model was made for at most 256 positions"):
        served(257)


@pytest.mark.parametrize("name", rope_cases())
def test_frequencies_are_those_of_transformers(name: str) -> None:
    """Powers, quotients and the blend round a few times, 2**-24 each; the blend's share, where it is close to 1,
    carries its rounding into a frequency that is `factor` times smaller."""
    case = rope_cases()[name]
    config = describe(case.raw)
    assert isinstance(config.rope, YarnRope | DynamicRope)
    assert config.max_position >= case.length
    theirs = expected("ropes")[name]
    ours = inverse_frequencies(config.rope, config.head_dim, case.length).tolist()
    assert ours == pytest.approx(theirs["frequencies"], rel=(8 + 4 * config.rope.factor) * 2**-24)
    cos, sin = make_rotary(config.rope, config.head_dim, case.length, torch.device("cpu")).at(torch.tensor([1000]))
    assert torch.hypot(cos, sin).flatten().tolist() == pytest.approx([theirs["scale"]] * len(ours), rel=4 * 2**-24)


@pytest.mark.peers
def test_stored_numbers_are_what_transformers_makes() -> None:
    stored = json.loads(EXPECTED.read_text())
    made = computed(os.environ["QUIRE_TRANSFORMERS_PYTHON"])
    if stored["versions"] != made["versions"]:
        pytest.fail(f"the stored data is by {stored['versions']}, this is {made['versions']}: regenerate it")
    for name, logits in made["models"].items():
        assert torch.tensor(logits).sub(torch.tensor(stored["models"][name])).abs().max() < CLOSE
    for name, rope in made["ropes"].items():
        assert rope["frequencies"] == pytest.approx(stored["ropes"][name]["frequencies"], rel=1e-6)
        assert rope["scale"] == pytest.approx(stored["ropes"][name]["scale"], rel=1e-6)
