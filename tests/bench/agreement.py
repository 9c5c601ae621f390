"""How often batching changes a greedy text where `--batch-invariant` is not given."""

import json
from pathlib import Path

from engine.core import EngineCore
from engine.request import Request
from tests.bench.speed import demo_core
from tests.helpers import greedy, run

PROMPTS = Path(__file__).parent.parent / "data" / "greedy" / "expected.json"
NUM_TOKENS = 64


def share_of_equal_texts(recipe: str) -> float:
    """Of the stored prompts: those that give the same tokens alone and all together, in the default dtype."""
    core = demo_core(recipe, max_num_seqs=32)
    prompts = [case["prompt"] for case in json.loads(PROMPTS.read_text())["continuations"]]
    requests = [greedy(str(index), prompt, NUM_TOKENS) for index, prompt in enumerate(prompts)]
    together = _tokens(core, requests)
    alone = [_tokens(core, [request])[0] for request in requests]
    return sum(a == b for a, b in zip(alone, together, strict=True)) / len(requests)


def _tokens(core: EngineCore, requests: list[Request]) -> list[tuple[int, ...]]:
    return [recorder.token_ids for recorder in run(core, requests)]
