"""Pages that are shared say what pages of one's own would: found, restored, forked or computed, bit for bit under
`--batch-invariant`."""

from dataclasses import replace
from pathlib import Path

import pytest

from engine.config import ModelConfig
from engine.request import Request
from kernels.format.layout import PageLayout
from tests.engine.watch import Watch, memory_for, run_alone
from tests.helpers import TINY, TINY_QWEN2, greedy, pool_of, random_prompt, tiny_core, tiny_engine

P = 32
PROMPT = random_prompt(17, 3 * P + 11)
MAX_TOKENS = P + 6
CASES = [(recipe, TINY) for recipe in ("native", "int8", "int4", "fp8_e5m2", "kivi4")] + [("int4", TINY_QWEN2)]


class Case:
    """One recipe and model, and what a request says alone, in a pool where nothing is shared."""

    def __init__(self, recipe: str, model: ModelConfig):
        self.model = model
        self.options: dict[str, object] = {"kv_format": recipe, "batch_invariant": True, "max_model_len": 5 * P}
        core = tiny_core(model, **self.options)
        self.layout: PageLayout = pool_of(core).layout
        self.num_pages = 5 - self.layout.recipe.sink_pages  # for one sequence of full length
        self.request = greedy("r", PROMPT, MAX_TOKENS)
        tokens, pages = run_alone(core, [self.request])
        self.tokens, self.pages = tokens["r"], pages["r"]
        self.hits = core

    def again(self, id: str) -> Request:
        return replace(self.request, id=id)

    def expect(self, watch: Watch, id: str) -> None:
        assert watch.tokens(id) == self.tokens
        assert watch.pages[id] == self.pages


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1].architecture}")
def case(request: pytest.FixtureRequest) -> Case:
    return Case(*request.param)


def test_a_case_says_something(case: Case) -> None:
    assert len(case.tokens) == MAX_TOKENS and len(set(case.tokens)) > 12
    assert sorted(case.pages) == list(range((len(PROMPT) + MAX_TOKENS - 1) // P))
    assert len(set(case.pages.values())) == len(case.pages)


def test_a_hit_equals_a_miss(case: Case) -> None:
    """The whole conversation is cached: a longer prompt finds what was generated, too."""
    watch = Watch(case.hits)
    watch.run(case.again("hit"))
    case.expect(watch, "hit")
    assert watch.usage("hit").num_cached_tokens == 3 * P
    assert watch.num_prompt_rows["hit"] == 11
    longer = greedy("longer", [*PROMPT, *case.tokens[:24]], MAX_TOKENS - 24)
    watch.run(longer)
    assert watch.tokens("longer") == case.tokens[24:] and watch.pages["longer"] == case.pages
    assert watch.usage("longer").num_cached_tokens == 4 * P
    watch.close()


def test_preempted_equals_not(case: Case) -> None:
    """The pool holds both when they start, but not the page that each of them fills; the newer gives way."""
    num_pages = 6 - 2 * case.layout.recipe.sink_pages
    core = tiny_core(case.model, **case.options, kv_memory=memory_for(case.layout, num_pages))
    watch = Watch(core)
    watch.run(greedy("first", random_prompt(8, 2 * P + 20), P), case.again("second"))
    assert core.scheduler.num_preemptions > 0
    case.expect(watch, "second")


def test_restored_from_host_equals_computed(case: Case) -> None:
    """Others take its slots and pages in between: all pages of the first request go to host memory and come back."""
    sinks, memory = case.layout.recipe.sink_pages, 200 * case.layout.page_bytes
    pool = {"max_num_seqs": 2, "kv_memory": memory_for(case.layout, case.num_pages, 2), "host_memory": memory}
    core = tiny_core(case.model, **case.options, **pool)
    watch = Watch(core)
    watch.run(case.request)
    # a distinct sink page each pushes out the first one, with all behind it; without sink pages it takes long ones
    others = [(P + 1, 2)] * 14 if sinks else [(4 * P, P)] * 2
    watch.run(*(greedy(f"o{i}", random_prompt(20 + i, length), new) for i, (length, new) in enumerate(others)))
    cache = core.scheduler.pools.cache
    assert all(node.page is None for node in cache.tree.root("").children[tuple(PROMPT[:P])].subtree())
    num_restored, num_host_hits = cache.stats.num_restored_pages, cache.stats.num_host_hit_tokens
    watch.run(case.again("again"))
    case.expect(watch, "again")
    assert watch.usage("again").num_cached_tokens == 3 * P
    assert cache.stats.num_host_hit_tokens - num_host_hits == 3 * P
    assert cache.stats.num_restored_pages - num_restored == 3


def test_restored_from_disk_equals_computed(case: Case, tmp_path: Path) -> None:
    counts = []
    for server in range(2):
        engine = tiny_engine(case.model, **case.options, cache_dir=str(tmp_path))
        watch = Watch(engine.core)
        watch.run(case.again(f"r{server}"))
        case.expect(watch, f"r{server}")
        counts.append((watch.usage(f"r{server}").num_cached_tokens, watch.num_prompt_rows[f"r{server}"]))
        engine.start()
        engine.stop()
    assert counts == [(0, len(PROMPT)), (3 * P, 11)]


def test_a_fork_equals_separate_requests(case: Case) -> None:
    """Siblings sample with seeds of their own, from a prompt that is computed once, and each fills its last page."""
    prompt = PROMPT[: 3 * P - 6]

    def sampled(index: int, id: str, salt: str = "") -> Request:
        return replace(greedy(id, prompt, 14, temperature=1.0, seed=5 + index), salt=salt)

    core = tiny_core(case.model, **case.options)
    alone = Watch(core)
    for index in range(4):
        alone.run(sampled(index, str(index), salt=f"shares with nobody {index}"))
    assert alone.num_prompt_rows.total() == 4 * len(prompt)
    alone.close()
    fork = Watch(core)
    fork.add(*(sampled(index, str(index)) for index in range(4)))
    fork.run()
    tokens = [fork.tokens(str(index)) for index in range(4)]
    assert tokens == [alone.tokens(str(index)) for index in range(4)] and len(set(tokens)) == 4
    assert fork.pages == alone.pages
    assert fork.num_prompt_rows.total() == len(prompt)
    assert [fork.usage(str(index)).num_cached_tokens for index in range(4)] == [0] * 4
