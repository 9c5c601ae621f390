"""The table of `--kv-format auto`, and the memory at which it steps down, against arithmetic of its own."""

import pytest

from engine.prescription import Prescription, Processor, gpu_processor, prescribe
from kernels.format.layout import PageLayout
from kernels.format.named import named_recipe

K = 1024
PLENTY = 10**15
LAYERS, KV_HEADS, HEAD_DIM = 4, 2, 64


def layout_of(name: str) -> PageLayout:
    recipe = named_recipe(name, num_layers=LAYERS, has_k_bias=False, page_tokens=64, sink_pages=1)
    return PageLayout(recipe, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype="bfloat16")


def choose(processor: Processor, length: int, memory: int = PLENTY, num_seqs: int = 4) -> Prescription:
    return prescribe(processor, layout_of, memory=memory, max_num_seqs=num_seqs, max_model_len=length)


def native_bytes(num_seqs: int, num_full: int, length: int) -> int:
    """Without sink pages: a null slot, one slot a sequence and 8 to spare (up to 80 sequences); a null page and
    the pages of the tokens."""
    page = LAYERS * 2 * KV_HEADS * 64 * HEAD_DIM * 2
    return (1 + num_seqs + 8 + 1 + num_full * -(-length // 64)) * page


@pytest.mark.parametrize(
    ("processor", "length", "recipe"),
    [
        (Processor.HOPPER, 1, "fp8_e5m2"),
        (Processor.HOPPER, 32 * K, "fp8_e5m2"),
        (Processor.HOPPER, 32 * K + 1, "fp8_e4m3"),
        (Processor.HOPPER, 256 * K - 1, "fp8_e4m3"),
        (Processor.HOPPER, 256 * K, "int4"),
        (Processor.AMPERE, 8 * K, "int8"),
        (Processor.AMPERE, 256 * K - 1, "int8"),
        (Processor.AMPERE, 256 * K, "int4"),
        (Processor.ADA, 8 * K, "fp8_e5m2"),
        (Processor.ADA, 256 * K - 1, "fp8_e5m2"),
        (Processor.ADA, 1024 * K, "int4"),
        (Processor.CPU, 8 * K, "native"),
        (Processor.CPU, 1024 * K, "native"),
    ],
)
def test_the_table(processor: Processor, length: int, recipe: str) -> None:
    choice = choose(processor, length)
    assert (choice.recipe, choice.num_full) == (recipe, 4)
    assert processor.value in choice.reason or "any GPU" in choice.reason
    assert f"4 requests of {length} tokens" in choice.reason and "\n" not in choice.reason


@pytest.mark.parametrize(
    ("capability", "processor"),
    [
        ((7, 0), Processor.AMPERE),
        ((7, 5), Processor.AMPERE),
        ((8, 0), Processor.AMPERE),
        ((8, 6), Processor.AMPERE),
        ((8, 9), Processor.ADA),
        ((9, 0), Processor.HOPPER),
        ((10, 0), Processor.HOPPER),
        ((12, 0), Processor.HOPPER),
    ],
)
def test_compute_capabilities(capability: tuple[int, int], processor: Processor) -> None:
    assert gpu_processor(*capability) is processor


@pytest.mark.parametrize("length", [200, 1000, 8 * K])
@pytest.mark.parametrize("num_seqs", [1, 4, 32])
def test_a_cpu_leaves_native_at_the_first_byte_that_is_missing(length: int, num_seqs: int) -> None:
    enough = native_bytes(num_seqs, num_seqs, length)
    assert choose(Processor.CPU, length, enough, num_seqs).recipe == "native"
    less = choose(Processor.CPU, length, enough - 1, num_seqs)
    assert (less.recipe, less.num_full) == ("int8", num_seqs)


def test_it_goes_down_no_further_than_it_must() -> None:
    """With ever less memory: native, int8, int4, each as long as it holds all; then int4, ever fewer requests."""
    start = native_bytes(4, 4, 8 * K)
    choices = [choose(Processor.CPU, 8 * K, start * percent // 100) for percent in range(100, -1, -1)]
    order = ["native", "int8", "int4"]
    places = [order.index(choice.recipe) for choice in choices]
    assert places == sorted(places) and set(places) == {0, 1, 2}
    for choice in choices:
        assert choice.num_full == 4 or choice.recipe == "int4"
    counts = [choice.num_full for choice in choices]
    assert counts == sorted(counts, reverse=True) and set(counts) == {0, 1, 2, 3, 4}
    stepped = next(choice for choice in choices if choice.recipe == "int8")
    assert stepped.reason == "CPU: native, then int8, then int4; int8 is the first that holds 4 requests of 8192 tokens"
    short = next(choice for choice in choices if choice.num_full == 2)
    assert short.reason.endswith("int4 holds 2 of 4 requests of 8192 tokens, and auto goes no lower")


@pytest.mark.parametrize("processor", list(Processor))
@pytest.mark.parametrize("length", [8 * K, 100 * K, 300 * K])
def test_without_memory_it_takes_the_last_of_the_row(processor: Processor, length: int) -> None:
    last = {Processor.CPU: "int4", Processor.AMPERE: "fp8_e5m2", Processor.ADA: "fp8_e5m2"}
    hopper = "fp8_e5m2" if length == 8 * K else "fp8_e4m3"
    expected = "int4" if length == 300 * K else last.get(processor, hopper)
    choice = choose(processor, length, memory=0)
    assert (choice.recipe, choice.num_full) == (expected, 0)
    assert "holds 0 of 4 requests" in choice.reason


def test_where_slots_weigh_most_native_may_hold_more() -> None:
    """8 requests of two pages: native has a slot each, the others one more each, for the sink page."""
    page = LAYERS * 2 * KV_HEADS * 64 * HEAD_DIM * 2
    memory = native_bytes(8, 3, 128)
    assert memory < (1 + 2 * 8 + 8) * page  # the slots of the others alone
    choice = choose(Processor.CPU, 128, memory, num_seqs=8)
    assert (choice.recipe, choice.num_full) == ("native", 3)


@pytest.mark.parametrize("processor", list(Processor))
@pytest.mark.parametrize("length", [8 * K, 100 * K, 300 * K])
def test_what_it_takes_under_pressure_is_never_larger(processor: Processor, length: int) -> None:
    assert layout_of(choose(processor, length, memory=0).recipe).page_bytes <= (
        layout_of(choose(processor, length).recipe).page_bytes
    )


def test_the_count_is_what_fits_beside_the_slots_of_all() -> None:
    """On a GPU with one recipe in the row: fp8_e5m2, a byte an element, and an fp16 scale a channel and a token."""
    length, num_seqs = 1000, 10
    page = LAYERS * 2 * KV_HEADS * (64 * HEAD_DIM + 2 * 64)
    slot = LAYERS * 2 * KV_HEADS * 64 * HEAD_DIM * 2
    slots = 1 + num_seqs * 2 + 8  # null, open and sink page of each, spare
    pages = 1000 // 64 + 1 - 1  # one of the 16 is a sink page
    for fit in range(num_seqs + 1):
        memory = slots * slot + (1 + fit * pages) * page
        assert choose(Processor.ADA, length, memory, num_seqs).num_full == fit
        if fit:
            assert choose(Processor.ADA, length, memory - 1, num_seqs).num_full == fit - 1
