"""Bytes of records, slots and pools against numbers worked out by hand."""

import pytest
import torch

from engine.errors import StartupError
from engine.kv.sizing import fit_pool, max_full_sequences, num_slots, smallest_pool
from kernels.backend import PoolTensors
from kernels.format.layout import ALIGNMENT, Field
from kernels.format.named import RECIPE_NAMES
from tests.kernels.builders import make_layout

LLAMA3_8B = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128}

# per layer at 3 kv heads, P = D = 64: codes of K and V, then fp16 scales and zeros of 3 · 64 rows, then 64 norms
HAND = {
    "native": 30 * (2 * 3 * 64 * 64 * 2),
    "int8": 30 * (2 * 3 * 64 * 64 + 4 * 3 * 64 * 2),
    "int4": 30 * (2 * 3 * 64 * 32 + 4 * 3 * 64 * 2 + 64 * 2),
    "kivi4": 30 * (2 * 3 * 64 * 32 + 4 * 3 * 64 * 2),
    "kivi2": 30 * (2 * 3 * 64 * 16 + 4 * 3 * 64 * 2),
    "fp8_e5m2": 30 * (2 * 3 * 64 * 64 + 2 * 3 * 64 * 2),
    "fp8_e4m3": 30 * (2 * 3 * 64 * 64 + 2 * 3 * 64 * 2),
}


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_record_has_the_bytes_counted_by_hand(recipe: str):
    layout = make_layout(recipe)
    assert layout.page_bytes == HAND[recipe]
    assert layout.slot_bytes == 1_474_560
    assert layout.code_bytes + layout.parameter_bytes == layout.page_bytes
    assert layout.bytes_per_token * 64 == layout.page_bytes


def test_bits_per_element_are_those_of_the_design():
    elements = 30 * 2 * 3 * 64 * 64
    bits = {recipe: make_layout(recipe).page_bytes * 8 / elements for recipe in RECIPE_NAMES}
    assert make_layout("int4").page_bytes == 418_560
    assert make_layout("native").page_bytes == 1_474_560
    assert bits == {
        "native": 16,
        "int8": 8.5,
        "int4": pytest.approx(4.54, abs=0.005),
        "kivi4": 4.5,
        "kivi2": 2.5,
        "fp8_e5m2": 8.25,
        "fp8_e4m3": 8.25,
    }


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("head_dim, num_kv_heads, page_tokens", [(16, 1, 32), (80, 3, 32), (96, 1, 64), (128, 8, 128)])
def test_fields_are_aligned_and_cover_the_record_without_overlap(
    recipe: str, head_dim: int, num_kv_heads: int, page_tokens: int
):
    layout = make_layout(
        recipe, num_layers=3, head_dim=head_dim, num_kv_heads=num_kv_heads, page_tokens=page_tokens, dtype="float16"
    )
    fields: list[Field] = []
    for layer in layout.layers:
        fields += layer.fields
    fields.sort(key=lambda field: field.offset)
    end = 0
    for field in fields:
        assert field.offset % ALIGNMENT == 0
        assert 0 <= field.offset - end < ALIGNMENT  # nothing but padding between two fields
        assert field.num_bytes > 0
        end = field.offset + field.num_bytes
    assert 0 <= layout.page_bytes - end < ALIGNMENT
    assert layout.page_bytes % ALIGNMENT == 0


def test_codes_that_do_not_fill_bytes_are_refused():
    with pytest.raises(ValueError, match="15 codes of 4 bits"):
        make_layout("int4", head_dim=15)


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_allocated_bytes_are_those_of_the_layout(recipe: str, dtype: str):
    layout = make_layout(recipe, num_layers=2, dtype=dtype)
    pool = PoolTensors.allocate(layout, num_pages=5, num_slots=3, device=torch.device("cpu"))
    expected = 5 * layout.page_bytes + 3 * layout.slot_bytes
    assert pool.sealed.nbytes + pool.open.nbytes == expected == pool.num_bytes
    assert not pool.sealed.any() and not pool.open.any()


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
@pytest.mark.parametrize("shape", [{}, LLAMA3_8B], ids=["smollm2", "llama3-8b"])
@pytest.mark.parametrize("max_num_seqs, max_model_len", [(1, 1), (1, 64), (4, 65), (32, 8192), (300, 32768)])
def test_smallest_memory_works_and_one_byte_less_is_refused(
    recipe: str, shape: dict[str, int], max_num_seqs: int, max_model_len: int
):
    layout = make_layout(recipe, **shape)
    with pytest.raises(StartupError) as refused:
        fit_pool(layout, 1, max_num_seqs, max_model_len)
    message = str(refused.value)
    assert "\n" not in message
    smallest = int(message.split("the smallest that works is ")[1].split()[0])
    size = fit_pool(layout, smallest, max_num_seqs, max_model_len)
    assert size == smallest_pool(layout, max_num_seqs, max_model_len)
    assert size.num_bytes == smallest == size.num_pages * layout.page_bytes + size.num_slots * layout.slot_bytes
    sealed = max(0, (max_model_len - 1) // 64 - layout.recipe.sink_pages)  # full pages once the last token is known
    assert size.num_pages == 1 + 1 + sealed  # and the null page, and one to seal into
    with pytest.raises(StartupError, match=str(smallest)):
        fit_pool(layout, smallest - 1, max_num_seqs, max_model_len)


def test_fit_leaves_less_than_a_page_unused():
    layout, memory = make_layout("int4"), 2**30
    size = fit_pool(layout, memory, 32, 8192)
    assert 0 <= memory - size.num_bytes < layout.page_bytes


def test_slots_hold_open_and_sink_pages_of_every_sequence():
    assert num_slots(32, 1) == 1 + 32 * 2 + 8
    assert num_slots(100, 2) == 1 + 300 + 30
    assert num_slots(1, 0) == 1 + 1 + 8


@pytest.mark.parametrize("gigabytes", [4, 8, 24, 80])
@pytest.mark.parametrize("shape, length, at_least", [({}, 8192, 3.1), (LLAMA3_8B, 32768, 3.5)], ids=["8k", "32k"])
def test_int4_holds_the_promised_multiple_of_native(
    shape: dict[str, int], length: int, at_least: float, gigabytes: int
):
    memory = gigabytes * 10**9
    native, int4 = make_layout("native", **shape), make_layout("int4", **shape)
    # where native holds none there is nothing to compare
    num_native, num_int4 = (max_full_sequences(layout, memory, length) for layout in (native, int4))
    assert num_int4 > 0
    if gigabytes > 4:
        assert num_native > 0
    assert num_int4 >= at_least * num_native
    for layout, count in ((native, num_native), (int4, num_int4)):
        fits = [smallest_pool(layout, n, length, num_full=n).num_bytes <= memory for n in (count, count + 1)]
        assert fits[1] is False and (count == 0 or fits[0])
