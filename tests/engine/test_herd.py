"""Requests with one prompt compute it once: at the same time, one after the other, or while another is at it."""

from dataclasses import replace

import pytest

from engine.request import Request
from tests.engine.watch import Watch, run_alone
from tests.helpers import greedy, random_prompt, tiny_core

P = 32
OPTIONS: dict[str, object] = {"batch_invariant": True, "max_model_len": 512, "max_num_seqs": 16}


@pytest.mark.parametrize("budget", [16 + P, 1024])
@pytest.mark.parametrize("rest", [1, P - 1, P])
@pytest.mark.parametrize("recipe", ["native", "int4"])
def test_a_prompt_sent_by_16_at_once_is_computed_once_but_for_its_last_page(
    recipe: str, rest: int, budget: int
) -> None:
    prompt = random_prompt(1, 4 * P + rest)
    watch = Watch(tiny_core(kv_format=recipe, max_step_tokens=budget, **OPTIONS))
    ids = [f"r{index}" for index in range(16)]
    watch.run(*(greedy(id, prompt, 3) for id in ids))
    assert watch.num_prompt_rows.total() == 4 * P + 16 * rest
    assert [watch.usage(id).num_cached_tokens for id in ids] == [0] + [4 * P] * 15
    (tokens,) = {watch.tokens(id) for id in ids}
    alone, _ = run_alone(tiny_core(kv_format=recipe, **OPTIONS), [greedy("alone", prompt, 3)])
    assert tokens == alone["alone"]


def test_who_comes_while_the_prefix_is_computed_waits_and_hits() -> None:
    """Budget for one page a step: the second comes after two of five pages and shares only the first four."""
    common = random_prompt(2, 4 * P)
    first, second = (greedy(str(i), common + random_prompt(3 + i, P + 5), 4) for i in range(2))
    alone, pages = run_alone(tiny_core(kv_format="int4", **OPTIONS), [first])
    alone_second, pages_second = run_alone(tiny_core(kv_format="int4", **OPTIONS), [second])
    watch = Watch(tiny_core(kv_format="int4", max_step_tokens=16 + P, **OPTIONS))
    watch.add(first)
    watch.step()
    watch.step()
    watch.add(second)
    watch.step()
    assert watch.core.scheduler.num_waiting == 1 and watch.num_prompt_rows["1"] == 0
    watch.run()
    assert watch.num_prompt_rows == {"0": 5 * P + 5, "1": P + 5}
    assert (watch.usage("0").num_cached_tokens, watch.usage("1").num_cached_tokens) == (0, 4 * P)
    assert {id: watch.tokens(id) for id in "01"} == alone | alone_second
    assert watch.pages == pages | pages_second


@pytest.mark.parametrize("num_steps", [0, 2])
def test_who_waits_for_a_cancelled_one_computes_what_is_left(num_steps: int) -> None:
    """The first has computed `num_steps` pages of four when it goes."""
    prompt = random_prompt(4, 4 * P + 1)
    watch = Watch(tiny_core(kv_format="int4", max_step_tokens=16 + P, **OPTIONS))
    for id in ("first", "second", "third"):
        watch.add(greedy(id, prompt, 2))
    for _ in range(num_steps):
        watch.step()
    watch.core.cancel("first")
    watch.run()
    assert watch.num_prompt_rows == {"first": num_steps * P, "second": (4 - num_steps) * P + 1, "third": 1} or (
        num_steps == 0 and watch.num_prompt_rows == {"second": 4 * P + 1, "third": 1}
    )
    assert watch.usage("second").num_cached_tokens == num_steps * P
    assert watch.tokens("second") == watch.tokens("third")


@pytest.mark.parametrize("priority", [1, 0], ids=["as urgent", "more urgent"])
def test_only_a_more_urgent_one_does_not_wait_for_another(priority: int) -> None:
    """There is budget for both in the second step."""
    prompt = random_prompt(5, 4 * P + 1)
    watch = Watch(tiny_core(kv_format="int4", max_step_tokens=3 * P + 16, **OPTIONS))
    watch.add(replace(greedy("first", prompt, 2), priority=1))
    watch.step()
    watch.add(replace(greedy("second", prompt, 2), priority=priority))
    watch.step()
    assert len(watch.core.scheduler.running) == 2 - priority
    watch.run()
    assert watch.num_prompt_rows == {"first": 4 * P + 1, "second": 1 if priority else P + 1}
    assert watch.tokens("first") == watch.tokens("second")


def test_salts_never_share() -> None:
    prompt = random_prompt(6, 3 * P + 5)

    def salted(id: str, salt: str) -> Request:
        return replace(greedy(id, prompt, 3), salt=salt)

    watch = Watch(tiny_core(kv_format="int4", **OPTIONS))
    salts = ["", "a", "b", "a "]
    watch.run(*(salted(f"first {salt}", salt) for salt in salts))
    assert watch.num_prompt_rows.total() == 4 * len(prompt)
    held = [watch.core.scheduler.pools.cache.tree.root(salt).children for salt in salts]
    pages = [node.page for children in held for child in children.values() for node in child.subtree()]
    assert len(pages) == len(set(pages)) == 4 * 3
    watch.run(*(salted(f"again {salt}", salt) for salt in salts))
    assert watch.num_prompt_rows.total() == 4 * (len(prompt) + 5)
    assert [watch.usage(f"again {salt}").num_cached_tokens for salt in salts] == [3 * P] * 4
    watch.run(salted("new", "c"))
    assert watch.usage("new").num_cached_tokens == 0
    assert len({watch.tokens(id) for id in watch.recorders}) == 1
