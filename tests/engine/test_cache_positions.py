"""Positions in the cache: where no layer stores them, what a shrink hook leaves is numbered anew (StreamingLLM).
Against a plain model that numbers what is left, and against itself under other schedules."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from engine.config import ModelConfig
from engine.core import EngineCore
from engine.errors import StartupError
from engine.kv.shrink import HeavyHitters, Shrink, SnapKV, Streaming
from engine.request import Request
from kernels.format.recipe import Recipe
from tests.engine.recipes import BEFORE_ROPE, FLOAT8, INT4, INT4_BEFORE_ROPE, as_float8, recipe
from tests.engine.shrunk_model import ShrunkModel
from tests.engine.watch import Watch, memory_for
from tests.helpers import (
    TINY,
    TINY_QWEN2,
    RandomCheckpoint,
    greedy,
    pool_of,
    random_prompt,
    tiny_core,
    tiny_engine,
)

P = 32
PROMPT = random_prompt(21, 6 * P + 9)
NEW = P + 25
STREAMING = Streaming(recent=2)
HEAVY = HeavyHitters(heavy=2, recent=1, window=20)
SNAP = SnapKV(keep=2, window=40, kernel=3)
INVARIANT: dict[str, object] = {"batch_invariant": True, "max_step_tokens": 512}


def shrunk(id: str, prompt: Sequence[int] = PROMPT, new: int = NEW, shrink: Shrink | None = STREAMING) -> Request:
    return replace(greedy(id, prompt, new), shrink=shrink)


class Streamed(Watch):
    """Notes the largest position that the model was given."""

    def __init__(self, core: EngineCore):
        super().__init__(core)
        self.largest = 0
        forward = core.runner.model.forward

        def watched(ids: torch.Tensor, positions: torch.Tensor, *rest: object) -> torch.Tensor:
            self.largest = max(self.largest, int(positions.max()))
            return forward(ids, positions, *rest)  # type: ignore[arg-type]

        core.runner.model.forward = watched  # type: ignore[method-assign]

    def step(self) -> None:
        self.core.step()
        self.core.scheduler.check()


def distance(model: ModelConfig, prompt: Sequence[int], tokens: Sequence[int], plain: ShrunkModel) -> float:
    """How far, in logits, a token is at most from being the one that the plain model would say there."""
    for token in prompt:
        logits = plain.feed(token)
    worst = 0.0
    for token in tokens:
        worst = max(worst, float(logits.max() - logits[token]))
        logits = plain.feed(token)
    return worst


def plain(model: ModelConfig, prompt: Sequence[int], shrink: Shrink, **rule: object) -> ShrunkModel:
    return ShrunkModel(model, RandomCheckpoint(model).tensor, len(prompt), P, 1, shrink, **rule)  # type: ignore[arg-type]


@pytest.mark.parametrize(("model", "batch_invariant"), [(TINY, False), (TINY_QWEN2, True)], ids=["llama", "qwen2"])
@pytest.mark.parametrize("shrink", [STREAMING, HEAVY, SNAP], ids=str)
def test_tokens_are_those_of_a_plain_model(shrink: Shrink, model: ModelConfig, batch_invariant: bool) -> None:
    """Prompt in chunks of three pages, then decode over the ends of pages."""
    options = {"batch_invariant": batch_invariant, "max_step_tokens": 3 * P + 8, "host_memory": 2**20}
    (tokens,) = Streamed(tiny_core(model, recipe(BEFORE_ROPE), **options)).tell(shrunk("r", shrink=shrink))
    assert distance(model, PROMPT, tokens, plain(model, PROMPT, shrink, before_rope=True)) < 1e-4
    assert distance(model, PROMPT, tokens, plain(model, PROMPT, shrink)) > 0.1  # positions in the text


def test_sealed_pages_are_turned_at_their_places() -> None:
    layer = replace(FLOAT8, before_rope=True)
    (tokens,) = Streamed(tiny_core(TINY, recipe(layer), max_step_tokens=3 * P + 8)).tell(shrunk("r"))
    sealed = plain(TINY, PROMPT, STREAMING, before_rope=True, seal=as_float8)
    assert distance(TINY, PROMPT, tokens, sealed) < 1e-4
    assert distance(TINY, PROMPT, tokens, plain(TINY, PROMPT, STREAMING, before_rope=True)) > 1e-2


@pytest.mark.parametrize("chosen", [recipe(BEFORE_ROPE), recipe(INT4_BEFORE_ROPE)], ids=["raw", "int4"])
def test_chunked_equals_whole_equals_batched_equals_preempted_equals_hit(chosen: Recipe) -> None:
    lengths = (P + 3, P + 20, 2 * P)
    batch = [shrunk(f"r{i}", random_prompt(40 + i, n), 2 * P) for i, n in enumerate(lengths)]
    batch.append(shrunk("long", random_prompt(39, 7 * P + 1), 9))

    def core(**options: object) -> EngineCore:
        return tiny_core(TINY, chosen, **INVARIANT | options)

    alone = [Streamed(core()).tell(request)[0] for request in batch]
    assert Streamed(core(max_step_tokens=8 + P)).tell(*batch) == alone
    cached = core(max_step_tokens=2048)
    assert Streamed(cached).tell(*batch) == alone
    assert Streamed(cached).tell(*(replace(request, id=f"again {request.id}") for request in batch)) == alone
    assert cached.scheduler.pools.cache.stats.num_hit_tokens > 0
    tight = core(max_model_len=4 * P, kv_memory=memory_for(pool_of(core()).layout, 5))
    assert Streamed(tight).tell(*batch) == alone
    assert tight.scheduler.num_preemptions > 0


def test_prefill_equals_decode() -> None:
    """What was generated, given as a prompt, is continued as before, and its pages hold the same."""
    core = tiny_core(TINY, recipe(INT4_BEFORE_ROPE), **INVARIANT)
    prompt = random_prompt(50, P + 7)
    (tokens,) = Streamed(core).tell(shrunk("decoded", prompt, 6 * P))
    for cut in (P, 4 * P - 7, 5 * P):
        (rest,) = Streamed(core).tell(
            replace(shrunk("prefilled", [*prompt, *tokens[:cut]], 6 * P - cut), salt=str(cut))
        )
        assert rest == tokens[cut:]


def test_no_position_is_larger_than_the_cache() -> None:
    """40 pages' worth of tokens, past what the model was made for, in a pool for six pages."""
    chosen = recipe(BEFORE_ROPE)
    layout = pool_of(tiny_core(TINY, chosen)).layout
    core = tiny_core(TINY, chosen, max_model_len=5 * P, kv_memory=memory_for(layout, 6))
    watch = Streamed(core)
    prompt, new = random_prompt(70, 4 * P + 5), 40 * P
    assert len(prompt) + new > TINY.max_position
    watch.run(shrunk("r", prompt, new))
    assert watch.largest == (1 + 2 + 1) * P - 1  # the sink page, two recent ones and the open one
    assert distance(TINY, prompt, watch.tokens("r"), plain(TINY, prompt, STREAMING, before_rope=True)) < 1e-4


def test_siblings_say_what_they_say_alone() -> None:
    core = tiny_core(TINY, recipe(INT4_BEFORE_ROPE), host_memory=2**20, **INVARIANT)
    for shrink in (STREAMING, HEAVY):
        fork = [replace(greedy(str(i), PROMPT, P - 8, temperature=1.0, seed=i), shrink=shrink) for i in range(2)]
        watch = Streamed(core)
        watch.add(*fork)
        watch.run()
        watch.close()
        alone = [Streamed(core).tell(replace(request, salt=f"{shrink} {request.id}"))[0] for request in fork]
        assert [watch.tokens(str(i)) for i in range(2)] == alone and len(set(alone)) == 2


def test_some_layers_before_rope_cannot_drop_pages() -> None:
    mixed = recipe(INT4, INT4_BEFORE_ROPE)
    assert "before RoPE in some layers" in (tiny_engine(TINY, mixed).info.why_none_is_dropped or "")
    assert tiny_engine(TINY, recipe(INT4)).info.why_none_is_dropped is None
    assert tiny_engine(TINY, recipe(INT4_BEFORE_ROPE)).info.why_none_is_dropped is None
    with pytest.raises(StartupError, match=r"^--shrink is streaming; recipe test stores K before RoPE in some.*out$"):
        tiny_engine(TINY, mixed, shrink="streaming")
