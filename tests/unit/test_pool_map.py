"""The pool map against the sequences, the memory and the tree that it describes; and its bounds."""

import random
from collections import Counter
from contextlib import suppress

import pytest

from engine.errors import RequestError
from engine.kv.cache import CacheOptions, PageCache
from engine.kv.cells import MAX_CELLS, cells, pages_per_cell
from engine.kv.map import MAX_NODES, MAX_ROWS, MAX_RUNS, Pages, PoolMap, RunState, pool_map
from engine.kv.pages import PagePools
from engine.kv.prefix import Node
from engine.kv.reclaim import PageUse
from engine.kv.report import PageSizes
from engine.kv.rules import PageRules
from engine.kv.sizing import PoolSize
from kernels.format.layout import PageRef, Pool
from tests.unit.simulation import Clock, Geometry, Simulation

SIZES = PageSizes(page_bytes=10, slot_bytes=70)
GEOMETRIES = {
    "tight": Geometry(num_pages=14),
    "host": Geometry(num_pages=14, num_records=40),
    "no sinks": Geometry(sink_pages=0, num_pages=16),
    "window": Geometry(num_pages=16, window_pages=2, sink_pages=2, spare_slots=0, max_step_tokens=50),
}
Chain = tuple[tuple[int, ...], int, int, str, int, int]


def expected_cells(simulation: Simulation, pool: Pool) -> str:
    """From what the sequences list, what the tree reaches, and how full the memory of a slot is."""
    sequences = simulation.scheduler.running
    held = Counter(page for sequence in sequences for page in (*sequence.pages, *sequence.window))
    listed = {page for sequence in sequences for page in sequence.pages}
    known = {node.page for _, node in simulation.cache.tree.nodes()}
    expected = ""
    for id in range(1, simulation.cache.allocator(pool).num_total + 1):
        page = PageRef(pool, id)
        if not held[page]:
            expected += "0" if page in known else "."
        elif pool is Pool.SEALED:
            expected += str(min(9, held[page]))
        elif len(simulation.memory[page]) < simulation.geometry.page_tokens:
            expected += "o"
        else:
            expected += "s" if page in listed else "w"
    return expected


def expected_chains(simulation: Simulation) -> list[Chain]:
    """(all tokens up to the end of its first page, pages, holders, state, hits, pages behind) of each run."""
    sequences = simulation.scheduler.running
    held = Counter(page for sequence in sequences for page in sequence.pages)

    def kind(node: Node) -> tuple[str, int]:
        state = "pool" if node.page else "host" if node.records else "computing"
        return state, held[node.page] if node.page else 0

    def chains(node: Node, before: tuple[int, ...]) -> list[Chain]:
        found = []
        for child in node.children.values():
            path = [child]
            while len(path[-1].children) == 1 and kind(next(iter(path[-1].children.values()))) == kind(child):
                path += path[-1].children.values()
            tokens = before + child.tokens
            state, num_holders = kind(child)
            found.append((tokens, len(path), num_holders, state, child.num_hits, len(path[-1].children)))
            found += chains(path[-1], before + tuple(token for one in path for token in one.tokens))
        return found

    return sorted(chain for _, root in simulation.cache.tree.roots() for chain in chains(root, ()))


def told_chains(told: PoolMap, simulation: Simulation) -> list[Chain]:
    """The same from the runs. All tokens of a run are found by the place of its first page."""
    nodes = {place(node): node for _, root in simulation.cache.tree.roots() for node in root.subtree() if node.tokens}
    by_id = {run.id: run for run in told.runs}
    assert len(by_id) == len(told.runs)
    found = []
    for run in told.runs:
        node = nodes.get(run.id)
        tokens = run.tokens
        if run.parent is not None:
            assert run.parent in by_id and by_id[run.parent].root == run.root
        if node is not None:  # one in a pool or in host memory
            tokens = tuple(token for one in reversed(above(node)) for token in one.tokens)
            assert run.idle == pytest.approx(simulation.clock.now - node.last_use)
        found.append((tokens, run.num_pages, run.num_holders, run.state.value, run.num_hits, run.num_children))
    return sorted(found)


def above(node: Node) -> list[Node]:
    return [node, *above(node.parent)] if node.parent is not None else []


def place(node: Node) -> str:
    if node.page is not None:
        return f"{node.page.pool.value}-{node.page.id - 1}"
    return f"host-{node.records[0]}" if node.records else ""


def check(simulation: Simulation) -> PoolMap:
    scheduler = simulation.scheduler
    told, snapshot = scheduler.map(SIZES), scheduler.snapshot(SIZES)
    assert cells(told.sealed) == expected_cells(simulation, Pool.SEALED)
    assert cells(told.open) == expected_cells(simulation, Pool.OPEN)
    for tier, line in zip(snapshot.tiers, (cells(told.sealed), cells(told.open)), strict=False):
        assert [line.count("."), line.count("0")] == [tier.pages["free"], tier.pages["cached"]]
    filled = [chain for chain in expected_chains(simulation) if chain[3] != "computing"]
    assert [chain for chain in told_chains(told, simulation) if chain[3] != "computing"] == filled
    computing = sorted((chain[1], chain[5]) for chain in expected_chains(simulation) if chain[3] == "computing")
    runs = [run for run in told.runs if run.state is RunState.COMPUTING]
    assert sorted((run.num_pages, run.num_children) for run in runs) == computing
    assert told.num_nodes == snapshot.num_cached_nodes == sum(chain[1] for chain in filled)
    assert not any(run.is_cut for run in told.runs)
    assert told.num_running == len(told.rows) == len(scheduler.running)
    for row, sequence in zip(told.rows, scheduler.running, strict=True):
        assert (row.request_id, row.num_prompt_tokens) == (sequence.request.id, len(sequence.request.prompt))
        assert row.num_prompt_tokens + row.num_generated_tokens == len(sequence.tokens)
        assert Counter(row.pages) == Counter((*sequence.pages, *sequence.window))
        assert row.is_decoding == (sequence.num_computed_tokens == len(sequence.tokens) - 1 > 0)
    used = [len(c) - c.count(".") for c in (cells(told.sealed), cells(told.open))]
    assert told.num_bytes == used[0] * SIZES.page_bytes + used[1] * SIZES.slot_bytes
    assert told.num_open_bytes == used[1] * SIZES.slot_bytes
    contents = [len(simulation.memory[PageRef(pool, id + 1)]) for pool, pages in ((Pool.SEALED, told.sealed),
                (Pool.OPEN, told.open)) for id, cell in enumerate(cells(pages)) if cell != "."]  # fmt: skip
    assert told.num_tokens == sum(contents)
    return told


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("name", GEOMETRIES)
def test_it_is_what_the_pool_holds(name: str, seed: int) -> None:
    rng, simulation = random.Random(f"{name} {seed}"), Simulation(GEOMETRIES[name])
    stems = [tuple(rng.randrange(2) for _ in range(rng.randint(4, 20))) for _ in range(3)]
    seen: Counter[str] = Counter()
    for _ in range(150):
        if len(simulation.live) < 12 and rng.random() < 0.4:
            prompt = rng.choice(stems) + tuple(rng.randrange(2) for _ in range(rng.randint(1, 9)))
            with suppress(RequestError):
                salt = rng.choice(["", "", "other"])
                simulation.add(prompt, rng.randint(1, 20), n=rng.choice([1, 1, 3]), salt=salt)
        if simulation.live and rng.random() < 0.06:
            simulation.cancel(rng.choice(simulation.live))
        if simulation.live:
            simulation.step()
        told = check(simulation)
        seen.update(cells(told.sealed) + cells(told.open))
        seen.update(run.state.value for run in told.runs)
    wanted = {".", "1", "o", "w" if simulation.geometry.window_pages else "0"}
    wanted |= {"s"} if simulation.geometry.sink_pages else set()
    wanted |= {"host"} if simulation.geometry.num_records else set()
    assert wanted <= set(seen), seen


@pytest.mark.parametrize("count", [0, 1, MAX_CELLS, MAX_CELLS + 1, 3 * MAX_CELLS - 1])
def test_a_large_pool_shows_the_most_of_each_group(count: int) -> None:
    rng = random.Random(count)
    holders = rng.choices([0, 0, 0, 1, 2, 300], k=count)
    kept = [rng.random() < 0.3 for _ in range(count)]
    pages = Pages(holders, kept, {})
    size, told = pages_per_cell(pages), cells(pages)
    assert len(told) == -(-count // size) <= MAX_CELLS and (size - 1) * MAX_CELLS < max(1, count)
    for at, cell in enumerate(told):
        group = slice(at * size, (at + 1) * size)
        most = max(holders[group])
        assert cell == (str(min(9, most)) if most else "0" if any(kept[group]) else ".")


def tree_of(num_pages: int) -> tuple[PagePools, PageCache, Clock]:
    clock = Clock()
    cache = PageCache(PoolSize(1 + num_pages, 1, 0), 1, 0, CacheOptions(), clock)
    rules = PageRules(page_tokens=1, sink_pages=0, shrink_sinks=0, num_pages=num_pages, max_chunk_pages=1)
    return PagePools(cache, rules), cache, clock


def add(cache: PageCache, parent: Node, token: int, used: float = 0.0) -> Node:
    node = cache.load(parent, (token,), PageUse(0.0, used, 0, 0, parent.depth + 1))
    assert node is not None
    return node


def test_a_long_chain_is_cut() -> None:
    pools, cache, _ = tree_of(MAX_NODES + 10)
    node = cache.tree.root("")
    for token in range(MAX_NODES + 10):
        node = add(cache, node, token)
    (run,) = pool_map(pools, [], SIZES).runs
    assert (run.is_cut, run.num_pages, run.num_children) == (True, MAX_NODES, 1)


def test_of_many_runs_those_in_use_come_first() -> None:
    pools, cache, _ = tree_of(4 * MAX_RUNS)
    root = cache.tree.root("")
    nodes = [add(cache, root, token, used=token % 7) for token in range(4 * MAX_RUNS)]
    held = nodes[-3 * MAX_RUNS :: 50]
    for node in held:
        cache.hold(node)
    told = pool_map(pools, [], SIZES)
    assert len(told.runs) == MAX_RUNS and told.root_sizes == (4 * MAX_RUNS,) and told.num_nodes == 4 * MAX_RUNS
    assert {run.tokens for run in told.runs[: len(held)]} == {node.tokens for node in held}
    idle = [run.idle for run in told.runs[len(held) :]]
    assert idle == sorted(idle)


def test_salts_are_numbers() -> None:
    pools, cache, _ = tree_of(4)
    for salt in ("secret a", "secret b", "secret b"):
        parent = cache.tree.root(salt)
        if not parent.children:
            add(cache, add(cache, parent, 5), 6)
    told = pool_map(pools, [], SIZES)
    assert sorted(run.root for run in told.runs) == [1, 2] and "secret" not in repr(told)


def test_at_most_so_many_rows() -> None:
    simulation = Simulation(Geometry(num_pages=MAX_ROWS + 50, max_num_seqs=MAX_ROWS + 9, max_step_tokens=4000))
    for _ in range(MAX_ROWS + 9):
        simulation.add_unique(3, 9)
    simulation.step()
    told = simulation.scheduler.map(SIZES)
    assert (len(told.rows), told.num_running) == (MAX_ROWS, MAX_ROWS + 9)
