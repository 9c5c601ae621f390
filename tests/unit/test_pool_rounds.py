"""Thousands of random rounds over the pure-Python part: submit, fork, step, cancel, preempt, reclaim, swap, restore."""

import random
from contextlib import suppress

import pytest

from engine.errors import RequestError
from engine.kv.shrink import HeavyHitters, Shrink, SnapKV, Streaming
from engine.kv.stats import Reclaimed
from tests.unit.simulation import Geometry, Simulation

SHRINKS: list[Shrink | None] = [
    Streaming(recent=1),
    Streaming(recent=3),
    HeavyHitters(heavy=2, recent=1, window=3),
    HeavyHitters(heavy=1, recent=2, window=6),
    SnapKV(keep=2, window=5, kernel=3),
]
GEOMETRIES = {
    "tight": Geometry(num_pages=14),
    "wide": Geometry(num_pages=60),
    "host": Geometry(num_pages=14, num_records=40),
    "small host": Geometry(num_pages=16, num_records=26),
    "no sinks": Geometry(sink_pages=0, num_pages=16, num_records=30),
    "two sinks": Geometry(sink_pages=2, shrink_sinks=2, num_pages=14, num_records=45),
    "few slots": Geometry(num_pages=30, spare_slots=0, num_records=30),
    "window": Geometry(num_pages=14, window_pages=1, spare_slots=0),
    "wide window": Geometry(num_pages=40, window_pages=3, sink_pages=0, spare_slots=0),
    "window and sinks": Geometry(num_pages=16, window_pages=2, sink_pages=2, spare_slots=0, max_step_tokens=50),
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", GEOMETRIES)
def test_rounds(name: str, seed: int) -> None:
    rng = random.Random(f"{name} {seed}")
    geometry = GEOMETRIES[name]
    simulation = Simulation(geometry)
    most_tokens = (geometry.num_pages + geometry.sink_pages - 1) * geometry.page_tokens
    shrinks: list[Shrink | None] = [None] * 5 + (SHRINKS if geometry.num_records else SHRINKS[:2])
    if geometry.window_pages:
        shrinks = [None]
    stems = [tuple(rng.randrange(2) for _ in range(rng.randint(4, 20))) for _ in range(4)]
    for _ in range(400):
        if len(simulation.live) < 12 and rng.random() < 0.4:
            prompt = rng.choice(stems) + tuple(rng.randrange(2) for _ in range(rng.randint(1, 9)))
            max_tokens = rng.randint(1, min(24, most_tokens - len(prompt)))
            with suppress(RequestError):  # some need more host memory than there is
                simulation.add(
                    prompt,
                    max_tokens,
                    n=rng.choice([1, 1, 1, 2, 3]),
                    priority=rng.choice([0, 0, 0, 1, -1]),
                    salt=rng.choice(["", "", "other"]),
                    shrink=rng.choice(shrinks),
                )
        if rng.random() < 0.02:
            simulation.flush()
        if simulation.live and rng.random() < 0.06:
            simulation.cancel(rng.choice(simulation.live))
        if simulation.live:
            simulation.step()
    simulation.run()
    stats = simulation.cache.stats
    if geometry.num_pages < 20:
        assert stats.num_preemptions > 0
    if geometry.window_pages:  # nothing is cached
        assert stats.num_hit_tokens == 0 and not simulation.cache.nodes
        return
    assert stats.num_hit_tokens > 0 and stats.num_dropped_pages > 0
    if geometry.num_pages < 20:
        assert sum(stats.reclaimed.values()) > 0
    if geometry.num_pages < 20 and geometry.num_records:
        assert stats.num_swaps > 0 and stats.num_host_hit_tokens > 0 and stats.reclaimed[Reclaimed.HOST_NEEDED] > 0
