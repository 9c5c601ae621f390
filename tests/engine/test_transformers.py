"""The demo model's greedy text in fp32 is that of transformers (data made by tests/peers/regenerate.py)."""

import json
import os

import pytest

from engine.config import EngineConfig
from engine.load import load_engine
from engine.model.demo_checkpoint import DEMO_NAME
from tests.helpers import greedy, run
from tests.peers.regenerate import DATA, NUM_TOKENS, continuations

CLOSE = 1e-3  # two logits this close may change places in another order of sums


def test_greedy_text_is_that_of_transformers() -> None:
    expected = json.loads((DATA / "expected.json").read_text())["continuations"]
    assert len(expected) == 16
    config = EngineConfig(model=DEMO_NAME, dtype="float32", device="cpu", kv_format="native", max_model_len=256)
    engine = load_engine(config, lambda done, total: None)
    batch = [greedy(f"r{i}", case["prompt"], NUM_TOKENS) for i, case in enumerate(expected)]
    for case, recorder in zip(expected, run(engine.core, batch), strict=True):
        pairs = zip(case["tokens"], recorder.token_ids, strict=True)
        different = next((place for place, (theirs, ours) in enumerate(pairs) if theirs != ours), None)
        assert different is None or case["gaps"][different] < CLOSE, f"token {different} differs at a clear choice"


@pytest.mark.peers
def test_stored_continuations_are_what_transformers_makes() -> None:
    stored = json.loads((DATA / "expected.json").read_text())
    made = continuations(os.environ["QUIRE_TRANSFORMERS_PYTHON"])
    if stored["versions"] != made["versions"]:
        pytest.fail(f"the stored data is by {stored['versions']}, this is {made['versions']}: regenerate it")
    assert [case["tokens"] for case in made["continuations"]] == [case["tokens"] for case in stored["continuations"]]
