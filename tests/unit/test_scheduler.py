"""Random and chosen loads on the scheduler. What must hold in every step is checked by the simulation itself."""

import random

import pytest

from engine.kv.sizing import num_sequence_pages
from engine.plan import StepPlan
from engine.sequence import Sequence
from tests.unit.unshared import UnsharedSimulation


@pytest.mark.parametrize("seed", range(30))
def test_random_loads(seed: int) -> None:
    rng = random.Random(seed)
    page_tokens, sink_pages = rng.choice([4, 8]), rng.randrange(3)
    max_num_seqs = rng.randint(1, 6)
    longest = rng.randint(2, 8 * page_tokens)
    simulation = UnsharedSimulation(
        page_tokens=page_tokens,
        sink_pages=sink_pages,
        max_num_seqs=max_num_seqs,
        max_step_tokens=max_num_seqs + page_tokens + rng.choice([0, 0, rng.randint(1, 6 * page_tokens)]),
        num_pages=num_sequence_pages(longest, page_tokens, sink_pages) + rng.choice([0, 0, 1, rng.randrange(12)]),
    )
    for _ in range(120):
        for _ in range(rng.choice([0, 0, 0, 1, 3])):
            prompt = rng.randint(1, longest - 1)
            output = rng.randint(1, min(longest - prompt, 40 if rng.random() < 0.8 else longest))
            simulation.add_unique(prompt, output, priority=rng.choice([0, 0, 0, 1, -1]))
        if simulation.live and rng.random() < 0.04:
            simulation.cancel(rng.choice(simulation.live))
        if not simulation.scheduler.is_idle:
            simulation.step()
    simulation.run()


def test_random_loads_meet_the_hard_cases() -> None:
    """Preemption of sequences in prefill and of rows planned already, and resumption, do occur above."""
    simulation = UnsharedSimulation(page_tokens=32, sink_pages=1, max_num_seqs=6, max_step_tokens=38, num_pages=6)
    rng = random.Random(1)
    for _ in range(60):
        simulation.add_unique(rng.randint(1, 150), rng.randint(1, 70), priority=rng.randrange(3))
    in_prefill = planned = 0
    while not simulation.scheduler.is_idle:
        before = {s: (s.num_computed_tokens, s.is_decoding) for s in simulation.scheduler.running}
        simulation.step()
        for sequence in set(before) - set(simulation.scheduler.running) - set(simulation.finished):
            computed, is_decoding = before[sequence]
            in_prefill += computed > 0 and not is_decoding
            planned += is_decoding
    assert simulation.scheduler.num_preemptions > 10 and in_prefill > 0 and planned > 0
    assert len(simulation.finished) == 60


def shape(plan: StepPlan) -> tuple[list[int], list[tuple[int, int, bool]]]:
    """Positions of decode rows, and (start, length, is_last) of chunks."""
    return [d.row.position for d in plan.decode], [(c.chunk.start, c.chunk.length, c.is_last) for c in plan.chunks]


def alone(
    prompt: int, max_tokens: int, *, page_tokens: int = 32, sink_pages: int = 1, budget: int
) -> UnsharedSimulation:
    simulation = UnsharedSimulation(
        page_tokens=page_tokens,
        sink_pages=sink_pages,
        max_num_seqs=4,
        max_step_tokens=budget,
        num_pages=num_sequence_pages(prompt + max_tokens, page_tokens, sink_pages),
    )
    simulation.add_unique(prompt, max_tokens)
    return simulation


@pytest.mark.parametrize("sink_pages", [0, 1, 2])
@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        (1, [([], [(0, 1, True)]), ([1], []), ([2], [])]),
        (31, [([], [(0, 31, True)]), ([31], []), ([32], [])]),
        (32, [([], [(0, 32, True)]), ([32], []), ([33], [])]),
        (33, [([], [(0, 33, True)]), ([33], []), ([34], [])]),
        (36, [([], [(0, 36, True)]), ([36], []), ([37], [])]),
        (37, [([], [(0, 32, False)]), ([], [(32, 5, True)]), ([37], []), ([38], [])]),
        (64, [([], [(0, 32, False)]), ([], [(32, 32, True)]), ([64], []), ([65], [])]),
        (65, [([], [(0, 32, False)]), ([], [(32, 33, True)]), ([65], []), ([66], [])]),
        (69, [([], [(0, 32, False)]), ([], [(32, 32, False)]), ([], [(64, 5, True)]), ([69], []), ([70], [])]),
    ],
)
def test_chunks_under_the_smallest_budget(
    sink_pages: int, prompt: int, expected: list[tuple[list[int], list[tuple[int, int, bool]]]]
) -> None:
    simulation = alone(prompt, 3, sink_pages=sink_pages, budget=4 + 32)
    assert [shape(plan) for plan in simulation.run()] == expected


def test_one_token_behind_whole_pages_is_a_decode_row() -> None:
    simulation = UnsharedSimulation(page_tokens=32, sink_pages=1, max_num_seqs=2, max_step_tokens=34, num_pages=9)
    simulation.add_unique(2, 2)
    simulation.add_unique(33, 2)
    assert [shape(plan) for plan in simulation.run()] == [
        ([], [(0, 2, True), (0, 32, False)]),
        ([2, 32], []),
        ([33], []),
    ]


@pytest.mark.parametrize("page_tokens", [32, 64])
@pytest.mark.parametrize("sink_pages", [0, 1, 2])
def test_pages_of_a_growing_sequence(page_tokens: int, sink_pages: int) -> None:
    """After c computed tokens: c // P full pages, of which the first S stay in slots, and a slot for the rest."""
    simulation = alone(5, 4 * page_tokens, page_tokens=page_tokens, sink_pages=sink_pages, budget=4 + page_tokens)
    (sequence,) = simulation.live
    while len(simulation.finished) == 0:
        simulation.step()
        computed = sequence.num_computed_tokens
        if sequence.pages:
            full = computed // page_tokens
            assert simulation.cache.sealed.num_held == max(0, full - sink_pages)
            assert simulation.cache.open.num_held == min(full, sink_pages) + (computed % page_tokens > 0)
    simulation.check_all_available()


@pytest.mark.parametrize("page_tokens", [32, 64])
@pytest.mark.parametrize("sink_pages", [0, 1, 2])
@pytest.mark.parametrize("extra", [0, 1, 31])
def test_the_smallest_pool_serves_full_length_requests(page_tokens: int, sink_pages: int, extra: int) -> None:
    length = 4 * page_tokens + extra
    simulation = UnsharedSimulation(
        page_tokens=page_tokens,
        sink_pages=sink_pages,
        max_num_seqs=3,
        max_step_tokens=3 + page_tokens,
        num_pages=num_sequence_pages(length, page_tokens, sink_pages),
    )
    added = [
        simulation.add_unique(prompt, length - prompt) for prompt in (1, page_tokens, length - 1, 2 * page_tokens + 1)
    ]
    simulation.run()
    assert sorted(simulation.finished, key=lambda s: s.arrival) == added
    assert all(len(sequence.tokens) == length for sequence in added)


def started(*loads: tuple[int, int], num_pages: int, max_tokens: int = 40) -> tuple[UnsharedSimulation, list[Sequence]]:
    """(prompt, priority) each, all admitted and prefilled in one step; P = 32, S = 0."""
    simulation = UnsharedSimulation(
        page_tokens=32, sink_pages=0, max_num_seqs=8, max_step_tokens=512, num_pages=num_pages
    )
    added = [simulation.add_unique(prompt, max_tokens, priority) for prompt, priority in loads]
    simulation.step()
    assert all(sequence in simulation.scheduler.running for sequence in added)
    return simulation, added


def test_the_oldest_is_served_though_least_urgent_and_a_planned_row_gives_way() -> None:
    # Both fill a page in the same step and one sealed page is left. The urgent one is planned first and takes it.
    simulation, (old, urgent) = started((31, 9), (31, 0), num_pages=2, max_tokens=3)
    simulation.cache.sealed.reserve(1)
    plan = simulation.step()
    assert [item.sequence for item in plan.decode] == [old]
    assert simulation.scheduler.running == (old,)
    assert simulation.scheduler.num_preemptions == 1 and urgent.num_computed_tokens == 0
    assert len(urgent.tokens) == 32  # what it had generated is kept


def test_victims_go_from_the_least_urgent_newest_on() -> None:
    simulation, (old, urgent, middle, last) = started((32, 1), (31, 0), (63, 1), (32, 1), num_pages=4)
    # 3 of 4 pages are held. `urgent` and `middle` fill one each in this step, and there is one left.
    assert simulation.cache.sealed.num_available == 1
    plan = simulation.step()
    assert [item.sequence for item in plan.decode] == [urgent, old, middle]
    assert simulation.scheduler.running == (urgent, old, middle) and last.pages == []


def test_a_sequence_that_is_itself_the_victim_waits() -> None:
    simulation, (old, new) = started((32, 0), (31, 0), num_pages=2, max_tokens=3)
    simulation.cache.sealed.reserve(1)  # nothing is left for `new`, whose page fills now
    plan = simulation.step()
    assert [item.sequence for item in plan.decode] == [old] and new.pages == []
    simulation.cache.sealed.unreserve(1)
    simulation.run()
    assert [len(s.tokens) - s.num_prompt_tokens for s in (old, new)] == [3, 3]


def test_nothing_is_admitted_in_a_step_that_preempts() -> None:
    simulation, (old, other, large) = started((31, 0), (31, 0), (64, 0), num_pages=3, max_tokens=3)
    small = simulation.add_unique(1, 1, priority=-1)
    simulation.step()
    assert simulation.scheduler.running == (old, other) and large.pages == []
    assert simulation.cache.sealed.num_available == 1  # `small` would have fitted
    simulation.step()
    assert small in simulation.finished
    simulation.run()
    assert len(simulation.finished) == 4


def test_a_large_request_is_not_overtaken() -> None:
    simulation, (first,) = started((32, 0), num_pages=4, max_tokens=2)
    large = simulation.add_unique(127, 1)
    small = simulation.add_unique(1, 1)
    simulation.step()
    simulation.run()
    assert simulation.finished == [first, large, small]


def test_a_more_urgent_request_overtakes() -> None:
    simulation = UnsharedSimulation(page_tokens=32, sink_pages=1, max_num_seqs=1, max_step_tokens=64, num_pages=4)
    order = [simulation.add_unique(8, 2, priority) for priority in (2, 1, 1, 0)]
    simulation.run()
    assert simulation.finished == [order[3], order[1], order[2], order[0]]


def test_cancelling_anywhere_gives_everything_back() -> None:
    simulation = UnsharedSimulation(page_tokens=32, sink_pages=1, max_num_seqs=2, max_step_tokens=34, num_pages=8)
    in_decode, in_prefill, waiting = (simulation.add_unique(length, 50) for length in (5, 200, 10))
    simulation.step()
    simulation.step()
    assert in_decode.is_decoding and 0 < in_prefill.num_computed_tokens < 200 and waiting.pages == []
    assert simulation.cache.sealed.num_available < simulation.cache.sealed.num_total
    for sequence in (waiting, in_prefill, in_decode):
        simulation.cancel(sequence)
    assert simulation.scheduler.is_idle
    simulation.check_all_available()


def test_check_finds_a_leak() -> None:
    simulation, (sequence,) = started((40, 0), num_pages=4)
    page = sequence.pages.pop()
    with pytest.raises(RuntimeError, match="open page . has 1 holders but sequences list it 0 times"):
        simulation.scheduler.check()
    sequence.pages.append(page)
    simulation.scheduler.check()
