"""The equalities of the sealed-page rule, bit for bit under `--batch-invariant`, for recipes of every kind.

Each compares tokens and the bytes of the sealed pages that a request filled.
"""

import pytest

from engine.config import ModelConfig
from engine.core import EngineCore
from engine.kv.sizing import num_sequence_pages, num_slots
from engine.request import Request
from tests.helpers import (
    COVERING_RECIPES,
    TINY,
    TINY_QWEN2,
    TINY_QWEN3,
    Recorder,
    greedy,
    pool_of,
    random_prompt,
    tiny_core,
)

LENGTHS = (1, 32, 33, 95, 150)
MAX_TOKENS = 36


def requests(count: int = len(LENGTHS)) -> list[Request]:
    return [greedy(f"r{i}", random_prompt(i, LENGTHS[i]), MAX_TOKENS) for i in range(count)]


def run_recording_pages(core: EngineCore, batch: list[Request]) -> tuple[list[Recorder], dict[str, list[bytes]]]:
    """Run `batch`; also the bytes of each request's sealed pages, by page, as they were when it ended."""
    recorders = [Recorder() for _ in batch]
    pages: dict[str, list[bytes]] = {}
    for request, recorder in zip(batch, recorders, strict=True):
        core.add([request], [recorder])
    while not core.is_idle:
        core.step()
        core.scheduler.check()
        for sequence in core.scheduler.running:
            sealed = sequence.pages[core.scheduler.pools.rules.sink_pages :]
            full = (
                sequence.num_computed_tokens // core.scheduler.pools.page_tokens - core.scheduler.pools.rules.sink_pages
            )
            pages[sequence.request.id] = [
                pool_of(core).sealed[page.id].numpy().tobytes() for page in sealed[: max(0, full)]
            ]
    return recorders, pages


CASES = [
    *((recipe, TINY, "auto") for recipe in COVERING_RECIPES),
    *(("int4", model, "auto") for model in (TINY_QWEN2, TINY_QWEN3)),
    *((recipe, TINY, "torch") for recipe in ("native", "int4")),  # rows in padded tiles
]


@pytest.mark.parametrize(("recipe", "model", "kernels"), CASES, ids=lambda value: getattr(value, "architecture", value))
def test_alone_equals_batched_equals_chunked_equals_preempted(recipe: str, model: ModelConfig, kernels: str) -> None:
    options = {"kv_format": recipe, "batch_invariant": True, "kernels": kernels}
    batch = requests()
    alone_tokens, alone_pages = [], {}
    for request in batch:
        recorders, pages = run_recording_pages(tiny_core(model, max_step_tokens=1024, **options), [request])
        alone_tokens.append(recorders[0].token_ids)
        alone_pages |= pages
    assert all(len(tokens) == MAX_TOKENS for tokens in alone_tokens)
    assert len({token for tokens in alone_tokens for token in tokens}) > 50  # a constant output would prove nothing

    together = tiny_core(model, max_step_tokens=1024, **options)
    chunked = tiny_core(model, max_step_tokens=40, **options)
    tight = tiny_core(model, max_model_len=192, **options | {"kv_memory": tight_memory(recipe, model)})
    for core in (together, chunked, tight):
        recorders, pages = run_recording_pages(core, batch)
        assert [recorder.token_ids for recorder in recorders] == alone_tokens
        assert pages == alone_pages
    assert together.scheduler.num_preemptions == 0
    assert tight.scheduler.num_preemptions > 0


def tight_memory(recipe: str, model: ModelConfig) -> int:
    """Room for the slots and a page more than one sequence of 192 tokens needs: less than the batch fills."""
    layout = pool_of(tiny_core(model, kv_format=recipe)).layout
    slots = num_slots(8, layout.recipe.sink_pages)
    pages = 2 + num_sequence_pages(192, layout.page_tokens, layout.recipe.sink_pages)
    return slots * layout.slot_bytes + pages * layout.page_bytes
