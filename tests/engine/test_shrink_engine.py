"""Shrink hooks on the tiny model: against a plain model that reads only what the hook left, and against themselves
under other schedules."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from engine.config import ModelConfig
from engine.core import EngineCore
from engine.kv.shrink import HeavyHitters, Shrink, SnapKV, Streaming
from engine.request import Failed, Request
from tests.engine.shrunk_model import ShrunkModel
from tests.engine.watch import Watch, memory_for
from tests.helpers import (
    TINY,
    TINY_QWEN2,
    RandomCheckpoint,
    Recorder,
    greedy,
    pool_of,
    random_prompt,
    tiny_core,
)

P = 32
PROMPT = random_prompt(11, 7 * P + 9)
NEW = P + 25  # two pages are filled
STREAMING = Streaming(recent=2)
HEAVY = HeavyHitters(heavy=2, recent=1, window=20)
SNAP = SnapKV(keep=2, window=40, kernel=3)
OPTIONS: dict[str, object] = {"batch_invariant": True, "max_step_tokens": 512}


def shrunk(id: str, shrink: Shrink | None, prompt: Sequence[int] = PROMPT, new: int = NEW) -> Request:
    return replace(greedy(id, prompt, new), shrink=shrink)


class Shrunk(Watch):
    """A watch over requests that drop pages: `most` full and open pages that each held between steps."""

    def __init__(self, core: EngineCore):
        super().__init__(core)
        self.most: dict[str, int] = {}
        self.num_dropped: dict[str, int] = {}

    def step(self) -> None:
        self.core.step()
        self.core.scheduler.check()
        for sequence in self.core.scheduler.running:
            id = sequence.request.id
            self.most[id] = max(self.most.get(id, 0), len(sequence.pages))
            self.num_dropped[id] = sequence.num_dropped_pages


def distance(model: ModelConfig, prompt: Sequence[int], tokens: Sequence[int], shrink: Shrink | None) -> float:
    """How far, in logits, a token is at most from being the one that the plain model would say there."""
    plain = ShrunkModel(model, RandomCheckpoint(model).tensor, len(prompt), P, 1, shrink)
    for token in prompt:
        logits = plain.feed(token)
    worst = 0.0
    for token in tokens:
        worst = max(worst, float(logits.max() - logits[token]))
        logits = plain.feed(token)
    return worst


@pytest.mark.parametrize(("model", "batch_invariant"), [(TINY, False), (TINY_QWEN2, True)], ids=["llama", "qwen2"])
@pytest.mark.parametrize("shrink", [None, STREAMING, HEAVY, SNAP], ids=str)
def test_tokens_are_those_of_a_plain_model(shrink: Shrink | None, model: ModelConfig, batch_invariant: bool) -> None:
    """Prompt in chunks of three pages, then decode over the ends of pages."""
    core = tiny_core(model, batch_invariant=batch_invariant, max_step_tokens=3 * P + 8, host_memory=2**20)
    (tokens,) = Shrunk(core).tell(shrunk("r", shrink))
    assert distance(model, PROMPT, tokens, shrink) < 1e-4
    other = Streaming(recent=3) if shrink == STREAMING else STREAMING
    assert distance(model, PROMPT, tokens, other) > 0.1  # which pages are read shows in the tokens


@pytest.mark.parametrize("shrink", [STREAMING, HEAVY, SNAP], ids=str)
@pytest.mark.parametrize("length", [P - 1, P, 4 * P + 1, 6 * P])
def test_edges_of_pages(shrink: Shrink, length: int) -> None:
    prompt = random_prompt(length, length)
    (tokens,) = Shrunk(tiny_core(host_memory=2**20)).tell(shrunk("r", shrink, prompt, P + 1))
    assert distance(TINY, prompt, tokens, shrink) < 1e-4


@pytest.mark.parametrize("shrink", [SnapKV(keep=1, window=1), HeavyHitters(heavy=1, recent=1, window=1)], ids=str)
def test_a_last_token_that_is_all_that_is_computed_is_observed(shrink: Shrink) -> None:
    """Its pages were found in the tree, so that it is a decode row."""
    prompt = random_prompt(13, 6 * P + 1)
    core = tiny_core(host_memory=2**20)
    miss, hit = (Shrunk(core).tell(shrunk(id, shrink, prompt, 8)) for id in ("miss", "hit"))
    assert core.scheduler.pools.cache.stats.num_hit_tokens == 6 * P
    assert hit == miss and distance(TINY, prompt, hit[0], shrink) < 1e-4


@pytest.mark.parametrize("shrink", [STREAMING, HEAVY, SNAP], ids=str)
def test_a_hit_equals_a_miss(shrink: Shrink) -> None:
    """What is found ends before the first page that was computed with something dropped, and before the window."""
    core = tiny_core(kv_format="int4", host_memory=2**20, **OPTIONS)
    watch = Shrunk(core)
    watch.run(shrunk("miss", shrink, new=20))
    watch.run(shrunk("hit", shrink, new=20))
    watch.run(shrunk("whole", None, new=20))
    assert watch.tokens("hit") == watch.tokens("miss") != watch.tokens("whole")
    whole = {STREAMING: 1 + 2 + 1, HEAVY: (len(PROMPT) - 20) // P, SNAP: (len(PROMPT) - 40) // P}[shrink]
    assert watch.usage("hit").num_cached_tokens == whole * P
    # the pages before the first drop are also good for requests without a hook
    assert watch.usage("whole").num_cached_tokens == (4 if shrink is STREAMING else 7) * P


def test_streaming_chunked_equals_whole_equals_batched_equals_preempted() -> None:
    options = OPTIONS | {"kv_format": "int4"}
    hook, lengths = STREAMING, (P + 3, P + 20, 2 * P)
    batch = [shrunk(f"r{i}", hook, random_prompt(40 + i, n), 2 * P) for i, n in enumerate(lengths)]
    batch.append(shrunk("long", hook, random_prompt(39, 7 * P + 1), 9))
    alone = [Shrunk(tiny_core(**options)).tell(request)[0] for request in batch]
    assert Shrunk(tiny_core(**options | {"max_step_tokens": 8 + P})).tell(*batch) == alone
    assert Shrunk(tiny_core(**options | {"max_step_tokens": 2048})).tell(*batch) == alone
    layout = pool_of(tiny_core(**options)).layout
    memory = memory_for(layout, 6 - layout.recipe.sink_pages)
    tight = tiny_core(**options, max_model_len=4 * P, kv_memory=memory)
    assert Shrunk(tight).tell(*batch) == alone
    assert tight.scheduler.num_preemptions > 0


@pytest.mark.parametrize("shrink", [HeavyHitters(heavy=3, recent=1, window=20), SnapKV(keep=1, window=20)], ids=str)
def test_swapped_equals_not_swapped(shrink: Shrink) -> None:
    """Their pages cannot be computed again, so that who gives way takes them to host memory and back."""
    options = OPTIONS | {"kv_format": "int4", "host_memory": 2**20}
    lengths = (2 * P, 5 * P, 3 * P + 30)
    batch = [shrunk(f"r{i}", shrink, random_prompt(60 + i, n), P + 15) for i, n in enumerate(lengths)]
    alone = [Shrunk(tiny_core(**options)).tell(request)[0] for request in batch]
    layout = pool_of(tiny_core(**options)).layout
    memory = memory_for(layout, 9 - layout.recipe.sink_pages)
    tight = tiny_core(**options, max_model_len=8 * P, kv_memory=memory)
    assert Shrunk(tight).tell(*batch) == alone
    stats = tight.scheduler.pools.cache.stats
    assert stats.num_swaps > 0 and stats.num_restored_pages > 0 and stats.num_dropped_pages > 0
    assert tight.scheduler.pools.cache.host.allocator.num_held == 0


def test_a_streaming_request_goes_on_without_end_in_few_pages() -> None:
    """40 pages' worth of tokens, past what the model was made for, in a pool for six pages."""
    core = tiny_core(max_model_len=5 * P, kv_memory=memory_for(pool_of(tiny_core()).layout, 6))
    watch = Shrunk(core)
    prompt, new = random_prompt(70, P + 5), 40 * P
    assert len(prompt) + new > TINY.max_position
    watch.run(shrunk("r", STREAMING, prompt, new))
    tokens = watch.tokens("r")
    assert len(tokens) == new and len(set(tokens)) > 100
    assert watch.most["r"] == 1 + 2 + 1  # the sink page, two recent ones and the open one
    # the last token is not computed; 1 + 2 pages are left of those that were filled
    assert watch.num_dropped["r"] == (len(prompt) + new - 2) // P - 3
    assert distance(TINY, prompt, tokens, STREAMING) < 1e-4


def test_a_long_prompt_streams_through_a_small_pool() -> None:
    """20 pages of prompt, six pages of memory: in a pool that would refuse it without a hook."""
    layout = pool_of(tiny_core()).layout
    prompt = random_prompt(71, 20 * P + 3)
    core = tiny_core(max_model_len=5 * P, kv_memory=memory_for(layout, 6))
    watch, refused = Shrunk(core), Recorder()
    core.add([shrunk("refused", None, prompt, 5)], [refused])
    assert isinstance(refused.terminal, Failed) and "the pool has 6" in refused.terminal.error.message
    watch.run(shrunk("r", STREAMING, prompt, 5))
    assert distance(TINY, prompt, watch.tokens("r"), STREAMING) < 1e-4
    assert watch.most["r"] <= 6


def test_what_a_fork_dropped_its_siblings_dropped() -> None:
    """Siblings of each hook say what they say alone."""
    core = tiny_core(kv_format="int4", host_memory=2**20, **OPTIONS)
    for shrink in (STREAMING, HEAVY, SNAP):
        fork = [replace(greedy(str(i), PROMPT, P - 8, temperature=1.0, seed=i), shrink=shrink) for i in range(2)]
        watch = Shrunk(core)
        watch.add(*fork)
        watch.run()
        watch.close()
        alone = [Shrunk(core).tell(replace(request, salt=f"{shrink} {request.id}"))[0] for request in fork]
        assert [watch.tokens(str(i)) for i in range(2)] == alone and len(set(alone)) == 2
