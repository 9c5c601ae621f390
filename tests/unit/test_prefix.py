"""The prefix tree against sets of prefixes, what a request may take from it, and many prefixes in few slots."""

import random

import pytest

from engine.kv.prefix import Node, PrefixTree
from engine.kv.shrink import HeavyHitters, Shrink, SnapKV, Streaming
from engine.kv.stats import Reclaimed
from engine.sequence import Sequence
from kernels.format.layout import PageRef, Pool
from tests.unit.simulation import Geometry, Simulation, random_prompt

SIZE = 3  # tokens in a page
Prefix = tuple[int, ...]


def fill(tree: PrefixTree, salt: str, tokens: Prefix, page: int) -> Node:
    """Put the last page of `tokens` into the tree; those before it are there."""
    path: list[Node] = []
    tree.extend(path, tree.root(salt), tokens, len(tokens) // SIZE - 1)
    node = tree.add(path[-1] if path else tree.root(salt), tokens[-SIZE:])
    node.page, node.owner = PageRef(Pool.SEALED, page), None
    return node


@pytest.mark.parametrize("seed", range(4))
def test_matches_are_those_of_a_set_of_prefixes(seed: int) -> None:
    """Filled and removed at random over two salts; each match is compared with the longest prefix that is there."""
    rng = random.Random(seed)
    tree = PrefixTree(SIZE)
    there: dict[tuple[str, Prefix], int] = {}
    paths: dict[tuple[str, Prefix], list[Node]] = {}  # of requests that look again and again
    for number in range(1, 3000):
        salt = rng.choice(["", "other"])
        tokens = random_prompt(rng, SIZE * rng.randint(1, 4))
        parents = [tokens[:end] for end in range(SIZE, len(tokens), SIZE)]
        if all((salt, parent) in there for parent in parents) and (salt, tokens) not in there:
            fill(tree, salt, tokens, number)
            there[salt, tokens] = number
        elif (salt, tokens) in there and rng.random() < 0.3:
            path: list[Node] = []
            tree.extend(path, tree.root(salt), tokens, len(tokens) // SIZE)
            tree.unlink(path[-1])
            for node in path[-1].subtree():
                node.page = None
            there = {key: page for key, page in there.items() if key[0] != salt or key[1][: len(tokens)] != tokens}
        wanted = random_prompt(rng, rng.randint(0, 14))
        most = rng.randint(0, 4)
        known = paths.setdefault((salt, wanted), [])
        assert tree.extend(known, tree.root(salt), wanted, min(most, len(wanted) // SIZE)) is None
        expected = []
        for end in range(SIZE, min(most * SIZE, len(wanted)) + 1, SIZE):
            if (salt, wanted[:end]) not in there:
                break
            expected.append(there[salt, wanted[:end]])
        assert [node.page.id for node in known if node.page] == expected
        assert [node.depth for node in known] == list(range(len(expected)))
    listed = {(salt, node.page.id) for salt, node in tree.nodes() if node.page}
    assert listed == {(salt, page) for (salt, _), page in there.items()} and len(listed) > 10


def test_tokens_with_equal_hashes_are_told_apart() -> None:
    one, other = (0, 1, 2), (2**61 - 1, 1, 2)
    assert hash(one) == hash(other)  # CPython's integers are hashed modulo that
    tree = PrefixTree(SIZE)
    fill(tree, "", one, 1)
    path: list[Node] = []
    tree.extend(path, tree.root(""), other, 1)
    assert path == []
    fill(tree, "", other, 2)
    tree.extend(path, tree.root(""), other, 1)
    assert [node.page.id for node in path if node.page] == [2]


def test_a_claim_names_who_computes_what_is_not_there() -> None:
    tree, tokens = PrefixTree(SIZE), tuple(range(3 * SIZE))
    fill(tree, "", tokens[:SIZE], 1)
    tree.claim(tree.root(""), tokens, 3, "first")
    path: list[Node] = []
    assert tree.extend(path, tree.root(""), tokens, 3) == "first" and len(path) == 1
    assert tree.extend([], tree.root(""), (*tokens[:SIZE], 9, 9, 9), 2) is None
    tree.disclaim(path[0], tokens, "another")  # has claimed nothing
    assert tree.extend(path, tree.root(""), tokens, 3) == "first"
    fill(tree, "", tokens[: 2 * SIZE], 2)
    tree.disclaim(path[0], tokens, "first")
    assert tree.extend(path, tree.root(""), tokens, 3) is None and len(path) == 2
    assert [node.depth for _, node in tree.nodes()] == [0, 1]


def after(simulation: Simulation, prompt: Prefix, max_tokens: int = 1, **options: object) -> Sequence:
    """Run one request to its end."""
    (sequence,) = simulation.add(prompt, max_tokens, **options)  # type: ignore[arg-type]
    simulation.run()
    return sequence


@pytest.mark.parametrize("sink_pages", [0, 1, 2])
@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 12, 13, 20])
def test_all_whole_pages_match_but_for_that_of_the_last_token(length: int, sink_pages: int) -> None:
    simulation = Simulation(Geometry(sink_pages=sink_pages))
    prompt = random_prompt(random.Random(length), length)
    assert after(simulation, prompt).num_cached_tokens == 0
    again = after(simulation, prompt)
    assert again.num_cached_tokens == (length - 1) // 4 * 4
    assert simulation.num_computed[again] == length - again.num_cached_tokens
    assert after(simulation, (*prompt, 0, 0, 0, 0)).num_cached_tokens == length // 4 * 4


def test_generated_tokens_are_found_too_and_a_partial_page_is_not() -> None:
    simulation = Simulation(Geometry())
    first = after(simulation, (1, 0, 1, 1, 0), max_tokens=9)  # 13 tokens are computed: three pages and one token
    assert after(simulation, (*first.tokens, 1)).num_cached_tokens == 12


def test_a_branch_inside_a_page_shares_the_pages_before_it() -> None:
    simulation = Simulation(Geometry())
    after(simulation, (0,) * 12)
    for place in range(12):
        changed = tuple(int(index == place) for index in range(12)) + (0,)
        assert after(simulation, changed).num_cached_tokens == place // 4 * 4


@pytest.mark.parametrize(
    ("shrink", "most"),
    [
        (Streaming(recent=2), 16),  # a sink page, two recent pages, and the one that reads just those
        (HeavyHitters(heavy=9, recent=9, window=1), 36),
        (HeavyHitters(heavy=9, recent=9, window=5), 32),  # tokens whose attention is observed are computed
        (HeavyHitters(heavy=9, recent=9, window=99), 0),
        (SnapKV(keep=9, window=10, kernel=1), 24),
    ],
)
def test_a_hook_bounds_what_may_be_found(shrink: Shrink, most: int) -> None:
    """37 tokens, all of whose nine whole pages are there."""
    simulation = Simulation(Geometry(num_records=60))
    prompt = random_prompt(random.Random(3), 37)
    after(simulation, prompt)
    assert after(simulation, prompt, shrink=shrink).num_cached_tokens == most
    assert after(simulation, prompt).num_cached_tokens == 36  # nothing in the tree was spoilt


def test_a_cancel_during_prefill_takes_claims_back() -> None:
    """Six pages, one a step: what the first has computed stays, what it claimed is free to compute."""
    simulation = Simulation(Geometry(max_step_tokens=7, max_num_seqs=3))
    prompt = random_prompt(random.Random(5), 25)
    (first,) = simulation.add(prompt, 1)
    simulation.step()
    simulation.step()
    (second,) = simulation.add(prompt, 1)
    simulation.step()
    assert first.num_computed_tokens == 12 and not second.is_running
    simulation.cancel(first)
    simulation.step()
    assert second.is_running and second.num_cached_tokens == 12
    simulation.run()
    assert simulation.num_computed[second] == 13


def test_hundreds_of_prefixes_take_no_slots_from_running_requests() -> None:
    """Every slot holds a cached sink page most of the time; all seats are taken all the same, and nobody gives way."""
    simulation = Simulation(Geometry(num_pages=60, vocab=1000))
    for _ in range(300):
        simulation.add_unique(5, 3)
    slots = simulation.cache.open
    num_steps = 0
    while not simulation.scheduler.is_idle:
        waiting = simulation.scheduler.num_waiting
        simulation.step()
        num_steps += 1
        if waiting >= 4:  # 24 tokens a step, of prompts of 5: four start in a step
            assert slots.num_held >= 4
        if num_steps > 20:
            assert slots.num_cached >= slots.num_total - 2 * 6 - 2
    # a request needs a step for its prompt and two for its tokens, so that two start a step in the long run
    assert num_steps <= 300 * 3 / 6 + 10
    stats = simulation.cache.stats
    assert stats.num_preemptions == 0
    assert stats.reclaimed[Reclaimed.SLOT_NEEDED] == 300 - slots.num_cached


def test_a_prefix_in_use_outlives_hundreds_of_others() -> None:
    """Every fifth request has it; the slots to spare hold more than the prefixes that come in between."""
    simulation = Simulation(Geometry(num_pages=60, vocab=1000))
    shared = tuple(range(100, 109))
    for number in range(400):
        if number % 5 == 0:
            simulation.add((*shared, number), 2)
        else:
            simulation.add_unique(5, 2)
        simulation.step()
    simulation.run()
    hits = [s.num_cached_tokens for s in sorted(simulation.finished, key=lambda s: s.arrival) if s.tokens[0] == 100]
    assert hits == [0] + [8] * 79


def test_long_requests_and_short_ones_share_few_slots() -> None:
    """No slots to spare: long requests run on while the others' sink pages come and go around them."""
    simulation = Simulation(Geometry(num_pages=60, spare_slots=0, vocab=1000))
    long = [simulation.add_unique(9, 60) for _ in range(3)]
    for _ in range(100):
        simulation.add_unique(5, 2)
    done = 0
    while not simulation.scheduler.is_idle:
        simulation.step()
        done += 1
        assert all(sequence.is_running or sequence in simulation.finished for sequence in long)
    assert simulation.scheduler.num_preemptions == 0 and len(simulation.finished) == 103
    assert done <= 60 + 100  # the long ones never waited, the others had three seats
