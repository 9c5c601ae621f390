"""Who is admitted next: priority, then the longest match, but nobody is passed over for ever."""

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from engine.kv.prefix import Node
from engine.kv.shrink import HeavyHitters, Shrink
from engine.request import Request, SamplingParams
from engine.sequence import Sequence
from engine.waiting import MAX_CANDIDATES, MAX_PASSED_OVER, WaitingQueue
from tests.unit.simulation import Geometry, Simulation


@dataclass
class Told:
    """Pools that answer as told: pages found, who computes the next page, whether host memory is short."""

    num_matched: dict[Sequence, int] = field(default_factory=dict)
    owners: dict[Sequence, Sequence] = field(default_factory=dict)
    short: set[Sequence] = field(default_factory=set)
    num_looks: int = 0

    def match(self, sequence: Sequence) -> object | None:
        self.num_looks += 1
        sequence.matched = [Node(None, (), 0)] * self.num_matched.get(sequence, 0)
        return self.owners.get(sequence)

    def has_records(self, sequence: Sequence) -> bool:
        return sequence not in self.short


class Line:
    """A queue and who is in it."""

    def __init__(self) -> None:
        self.pools = Told()
        self.queue = WaitingQueue(self.pools)
        self._arrivals = 0

    def add(self, num_matched: int = 0, *, priority: int = 0, shrink: Shrink | None = None) -> Sequence:
        sampling = SamplingParams(max_tokens=1)
        request = Request(id=str(self._arrivals), prompt=(1,), sampling=sampling, priority=priority, shrink=shrink)
        sequence = Sequence(request, self._arrivals)
        self._arrivals += 1
        self.pools.num_matched[sequence] = num_matched
        self.queue.add(sequence)
        return sequence

    def take(self) -> Sequence | None:
        sequence = self.queue.next()
        if sequence is not None:
            self.queue.take(sequence)
        return sequence

    def take_all(self) -> list[Sequence]:
        taken = []
        while (sequence := self.take()) is not None:
            taken.append(sequence)
        return taken


def test_the_longest_match_goes_first_and_the_older_of_equals() -> None:
    line = Line()
    a, b, c, d, e = (line.add(count) for count in (0, 2, 5, 2, 0))
    assert line.take_all() == [c, b, d, a, e]
    assert line.take() is None and line.queue.num_sequences == 0


def test_priority_comes_before_the_match() -> None:
    line = Line()
    a, b, c, d = (line.add(count, priority=priority) for count, priority in ((9, 1), (0, 0), (3, -2), (9, 0)))
    assert line.take_all() == [c, d, b, a]


def test_matches_are_looked_up_anew() -> None:
    line = Line()
    a, b, c = line.add(1), line.add(2), line.add(0)
    line.pools.num_matched |= {b: 0, c: 3}
    assert line.take_all() == [c, a, b]


def test_only_the_first_in_line_are_looked_up() -> None:
    """A long queue costs no more than a short one; who waits for another does not stand in the way."""
    line = Line()
    computing = line.add()
    assert line.take() is computing
    blocked = [line.add(9) for _ in range(3)]
    line.pools.owners |= dict.fromkeys(blocked, computing)
    first, *others = [line.add() for _ in range(2 * MAX_CANDIDATES)]
    line.pools.num_matched |= {others[MAX_CANDIDATES - 2]: 1, others[MAX_CANDIDATES - 1]: 2}
    line.pools.num_looks = 0
    assert line.queue.next() is others[MAX_CANDIDATES - 2]
    assert line.pools.num_looks == 3 + MAX_CANDIDATES


def test_pages_in_host_memory_count_like_matched_ones() -> None:
    line = Line()
    a, b = line.add(2), line.add(0)
    b.swapped = [None] * 3  # type: ignore[list-item]
    assert line.take_all() == [b, a]


@pytest.mark.parametrize("seed", range(3))
def test_nobody_is_passed_over_more_often_than_the_bound(seed: int) -> None:
    """Two come for each one taken, for thousands of steps, with longer and longer matches; some come back."""
    rng, line = random.Random(seed), Line()
    passed: Counter[Sequence] = Counter()
    gone: list[Sequence] = []
    for step in range(4000):
        for _ in range(rng.choice([0, 1, 1, 2])):
            line.add(rng.choice([0, 0, step]), priority=rng.choice([0, 0, 0, 1]))
        if gone and rng.random() < 0.1:  # preempted: it comes back to its old place
            line.queue.add(gone.pop(rng.randrange(len(gone))))
        taken = line.take()
        if taken is None:
            continue
        gone = [*gone[-5:], taken]
        equals = [s for s in line.queue.sequences if s.request.priority == taken.request.priority]
        passed.update(s for s in equals if s.arrival < taken.arrival)
        assert all(s.request.priority >= taken.request.priority for s in line.queue.sequences)
    assert max(passed.values()) == MAX_PASSED_OVER  # it is reached, and kept


def test_who_waits_for_another_is_left_out_and_loses_nothing() -> None:
    line = Line()
    computing = line.add()
    assert line.take() is computing
    waits, other = line.add(9), line.add()
    line.pools.owners[waits] = computing
    assert line.take() is other and line.take() is None
    late = line.add(12)
    line.pools.owners.clear()
    assert line.take_all() == [late, waits]


def test_who_is_more_urgent_than_the_one_that_computes_does_not_wait() -> None:
    line = Line()
    computing = line.add(priority=1)
    assert line.take() is computing
    urgent, equal = line.add(), line.add(priority=1)
    line.pools.owners |= {urgent: computing, equal: computing}
    assert line.take_all() == [urgent]


def test_those_that_need_host_memory_wait_in_turn_and_let_others_pass() -> None:
    line = Line()
    hook = HeavyHitters()
    large, plain, small, swapped = line.add(shrink=hook), line.add(), line.add(5, shrink=hook), line.add(shrink=hook)
    swapped.swapped = [None]  # type: ignore[list-item]
    line.pools.short = {large}
    assert line.take_all() == [swapped, plain]  # `small` could go, but `large` was first
    line.pools.short = set()
    assert line.take_all() == [small, large]


def test_seats_are_counted() -> None:
    line = Line()
    leader, sibling = line.add(), line.add()
    line.queue.remove(sibling)
    leader.siblings = [sibling]
    assert line.queue.num_sequences == 2 and line.queue.sequences == (leader,)


def test_nobody_starves_behind_a_popular_prefix() -> None:
    """One seat, and more requests for a cached prefix than it can serve: the others still get their turn."""
    rng = random.Random(7)
    simulation = Simulation(Geometry(max_num_seqs=1, max_step_tokens=40, num_pages=40, vocab=1000))
    popular = tuple(range(100, 121))
    simulation.add(popular, 1)
    simulation.run()
    passed: Counter[Sequence] = Counter()
    plain: set[Sequence] = set()
    for number in range(3000):
        if len(simulation.live) < 40:
            simulation.add((*popular, number), 1)
            if rng.random() < 0.2:
                plain.add(simulation.add_unique(5, 1))
        waiting = [s for s in simulation.live if not s.is_running]
        plan = simulation.step()
        started = [item.sequence for item in plan.chunks if item.sequence in waiting]
        for sequence in started:
            passed.update(s for s in waiting if s.arrival < sequence.arrival and s not in started)
    simulation.run()
    assert len(plain) > 100 and max(passed.values()) == MAX_PASSED_OVER
    served = [s for s in simulation.finished if s in plain]
    assert len(served) == len(plain)
