"""Host memory against plain dictionaries of bytes, and the counts of records."""

import random
from typing import Any

import pytest
import torch
from torch import Tensor

import engine.kv.host
from engine.errors import StartupError
from engine.kv.host import HostMemory, PageMover
from engine.kv.moves import Move, Poison, Restore, Save, num_host_records, num_page_records
from kernels.backend import PoolTensors
from kernels.format.layout import PageLayout, PageRef, Pool
from kernels.format.named import named_recipe

CPU = torch.device("cpu")
NUM_PAGES, NUM_SLOTS, NUM_RECORDS = 6, 4, 13


def layout(kv_format: str, dtype: str = "float32", *, sink_pages: int = 1) -> PageLayout:
    recipe = named_recipe(kv_format, num_layers=2, has_k_bias=True, page_tokens=32, sink_pages=sink_pages)
    return PageLayout(recipe, num_kv_heads=2, head_dim=16, dtype=dtype)


# a slot of exactly one record, of two and a bit, of four less a bit, of just over one
LAYOUTS = {
    "whole": layout("native"),
    "int8 in fp32": layout("int8"),
    "int4 in fp32": layout("int4"),
    "int8 in bf16": layout("int8", "bfloat16"),
}


def random_bytes(like: Tensor, rng: random.Random) -> Tensor:
    """Any bytes, NaN patterns among them."""
    data = torch.frombuffer(bytearray(rng.randbytes(like.numel())), dtype=torch.uint8)
    data[rng.randrange(like.numel()) :][:64] = 0xFF
    return data


def filled_pool(layout: PageLayout, rng: random.Random) -> PoolTensors:
    pool = PoolTensors.allocate(layout, num_pages=NUM_PAGES, num_slots=NUM_SLOTS, device=CPU)
    for ref in all_refs():
        pool.record(ref).copy_(random_bytes(pool.record(ref), rng))
    return pool


def all_refs() -> list[PageRef]:
    sealed = [PageRef(Pool.SEALED, page) for page in range(1, NUM_PAGES)]
    return sealed + [PageRef(Pool.OPEN, slot) for slot in range(1, NUM_SLOTS)]


def bytes_of(pool: PoolTensors) -> dict[PageRef, bytes]:
    """Read without `record`."""
    rows = {PageRef(Pool.SEALED, index): row for index, row in enumerate(pool.sealed)}
    rows |= {PageRef(Pool.OPEN, index): row.flatten().view(torch.uint8) for index, row in enumerate(pool.open)}
    return {ref: row.numpy().tobytes() for ref, row in rows.items()}


def test_the_layouts_are_what_they_are_meant_to_be() -> None:
    ratios = [item.slot_bytes / item.page_bytes for item in LAYOUTS.values()]
    assert ratios[0] == 1
    assert all(ratio != round(ratio) for ratio in ratios[1:])
    counts = [num_page_records(Pool.OPEN, item) for item in LAYOUTS.values()]
    assert all(count - 1 < ratio <= count for count, ratio in zip(counts, ratios, strict=True))
    assert len(set(counts)) > 2
    assert {num_page_records(Pool.SEALED, item) for item in LAYOUTS.values()} == {1}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("seed", range(4))
def test_random_moves_agree_with_dictionaries(name: str, seed: int) -> None:
    """Lists of moves that reuse records and pages at once. A restore may take any page of the saved pool."""
    rng = random.Random(seed)
    layout = LAYOUTS[name]
    pool = filled_pool(layout, rng)
    mover = PageMover(pool, HostMemory(NUM_RECORDS, layout.page_bytes, CPU))
    pages = bytes_of(pool)
    saved: dict[tuple[int, ...], tuple[Pool, bytes]] = {}
    kinds = set()
    for _ in range(30):
        moves: list[Move] = []
        for _ in range(rng.randrange(12)):
            page = rng.choice(all_refs())
            kept = [records for records, (pool_of, _) in saved.items() if pool_of is page.pool]
            match rng.choice(["save", "save", "restore", "restore", "poison"]):
                case "save":
                    count = num_page_records(page.pool, layout)
                    records = tuple(rng.sample(range(1, NUM_RECORDS + 1), count))
                    saved = {key: value for key, value in saved.items() if not {*key} & {*records}}
                    saved[records] = page.pool, pages[page]
                    moves.append(Save(page, records))
                case "restore" if kept:
                    records = rng.choice(kept)
                    pages[page] = saved[records][1]
                    moves.append(Restore(records, page))
                case "poison":
                    pages[page] = b"\xff" * len(pages[page])
                    moves.append(Poison(page))
        mover.run(moves)
        kinds |= {type(move) for move in moves}
        assert bytes_of(pool) == pages
    assert kinds == {Save, Restore, Poison}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_record_may_be_restored_and_overwritten_in_one_list(name: str) -> None:
    """The order decides: page 1 goes out and back to page 2 before page 3 takes its records."""
    layout = LAYOUTS[name]
    pool = filled_pool(layout, random.Random(0))
    before = bytes_of(pool)
    mover = PageMover(pool, HostMemory(NUM_RECORDS, layout.page_bytes, CPU))
    records = tuple(range(1, 1 + num_page_records(Pool.OPEN, layout)))[::-1]
    first, second, third = (PageRef(Pool.OPEN, slot) for slot in (1, 2, 3))
    mover.run([Save(first, records), Poison(first), Restore(records, second), Save(third, records), Poison(third)])
    mover.run([Restore(records, first)])
    after = bytes_of(pool)
    assert after[second] == before[first]
    assert after[first] == before[third]
    assert set(after[third]) == {0xFF}


@pytest.mark.parametrize("name", LAYOUTS)
def test_poison_is_nan_in_every_float_format_and_hits_one_page(name: str) -> None:
    layout = LAYOUTS[name]
    pool = filled_pool(layout, random.Random(1))
    before = bytes_of(pool)
    victims = PageRef(Pool.SEALED, 2), PageRef(Pool.OPEN, 3)
    PageMover(pool, None).run([Poison(page) for page in victims])  # needs no host memory
    for page in victims:
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert pool.record(page).view(dtype).isnan().all()
    after = bytes_of(pool)
    assert {page for page in after if after[page] != before[page]} == set(victims)


def test_a_mover_without_host_memory_moves_nothing() -> None:
    mover = PageMover(filled_pool(LAYOUTS["whole"], random.Random(0)), None)
    for move in (Save(PageRef(Pool.SEALED, 1), (1,)), Restore((1,), PageRef(Pool.SEALED, 1))):
        with pytest.raises(RuntimeError, match="there is no host memory"):
            mover.run([move])


@pytest.mark.parametrize("records", [(1,), (1, 2, 3, 4, 5)])
def test_a_slot_in_too_few_or_too_many_records_is_a_bug(records: tuple[int, ...]) -> None:
    layout = LAYOUTS["int8 in fp32"]
    mover = PageMover(filled_pool(layout, random.Random(0)), HostMemory(NUM_RECORDS, layout.page_bytes, CPU))
    slot = PageRef(Pool.OPEN, 1)
    for move in (Save(slot, records), Restore(records, slot)):
        with pytest.raises(ValueError):
            mover.run([move])


def test_pinned_memory_comes_in_blocks_that_are_not_rounded_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a stand-in for CUDA: every record keeps its own bytes across the borders of blocks."""
    plain, shapes = torch.empty, []

    def empty(*shape: int, pin_memory: bool, **options: Any) -> Tensor:
        assert pin_memory
        shapes.append(shape)
        return plain(*shape, **options)

    monkeypatch.setattr(torch, "empty", empty)
    monkeypatch.setattr(engine.kv.host, "BLOCK_BYTES", 1024)
    host = HostMemory(23, 100, torch.device("cuda"))
    monkeypatch.undo()
    assert shapes == [(10, 100), (10, 100), (3, 100)]
    data = torch.arange(2300).remainder(251).to(torch.uint8)
    order = random.Random(0).sample(range(1, 24), 23)
    host.put(order, data)
    for number, record in enumerate(order):
        part = plain(100, dtype=torch.uint8)
        host.get([record], part)
        assert torch.equal(part, data[number * 100 :][:100])


@pytest.mark.parametrize("sink_pages", [0, 1, 3])
def test_the_smallest_memory_holds_one_page_behind_its_sink_pages(sink_pages: int) -> None:
    item = layout("int4", sink_pages=sink_pages)
    slot_records = -(-item.slot_bytes // item.page_bytes)
    least = (sink_pages * slot_records + 1) * item.page_bytes
    assert num_host_records(least, item) == sink_pages * slot_records + 1
    assert num_host_records(least + item.page_bytes - 1, item) == sink_pages * slot_records + 1
    assert num_host_records(least + item.page_bytes, item) == sink_pages * slot_records + 2
    for memory in (0, least - 1):
        with pytest.raises(StartupError) as caught:
            num_host_records(memory, item)
        assert str(caught.value) == (
            f"--host-memory is {memory} bytes, too small for one page and the sink pages before it ({sink_pages}); "
            f"the smallest that works is {least} bytes"
        )


@pytest.mark.parametrize("num_records", [2**40, 2**90])
def test_more_than_the_host_has_is_refused(num_records: int) -> None:
    message = f"--host-memory: {num_records * 1024} bytes are more than the host can give; lower it"
    with pytest.raises(StartupError, match=f"^{message}$"):
        HostMemory(num_records, 1024, CPU)
