"""Bytes of records, slots and pools against numbers worked out by hand."""

import pytest
import torch

from engine.errors import StartupError
from engine.kv.sizing import fit_pool, max_full_sequences, num_slots, smallest_pool
from kernels.backend import PoolTensors
from kernels.format.layout import ALIGNMENT, Field, PageLayout
from kernels.format.named import RECIPE_NAMES, named_recipe
from tests.kernels.builders import make_layout

LLAMA3_8B = {"num_layers": 32, "num_kv_heads": 8, "head_dim": 128}

# bytes of one layer at 3 kv heads, P = D = 64
BIT = 3 * 64 * 64 // 8  # codes of K or of V, for each bit
ROW = 3 * 64 * 2  # an fp16 number for each channel of K, or for each token of V
NORM = 64 * 2
FACTOR = 16  # 3 fp16 numbers, padded
GROUPED_K = 2 * 3 * 2 * 64 + FACTOR  # scales and zeros of a byte each, for 2 groups of tokens and 64 channels
GROUPED_V = 2 * 3 * 64 * 2 + FACTOR  # and for 64 tokens and 2 groups of channels
HAND = {
    "native": 32 * BIT,
    "int8": 16 * BIT + 4 * ROW,
    "int4": 8 * BIT + 2 * 3 * 4 * 64 + 2 * 3 * 64 * 1 + 2 * FACTOR + NORM,  # K in 4 groups, V in one
    "k4v2": 6 * BIT + GROUPED_K + 2 * 3 * 64 * 4 + FACTOR + NORM,
    "int3": 6 * BIT + GROUPED_K + GROUPED_V + NORM,
    "k3v2": 5 * BIT + GROUPED_K + GROUPED_V + NORM,
    "int2": 4 * BIT + GROUPED_K + GROUPED_V + NORM,
    "fp8_e5m2": 16 * BIT + 2 * ROW,
    "fp8_e4m3": 16 * BIT + 2 * ROW,
    "kivi4": 8 * BIT + 4 * ROW,
    "kivi2": 4 * BIT + 4 * ROW,
    "kivi2_32": 4 * BIT + 8 * ROW,
    "token8": 16 * BIT + 4 * ROW,
    "token4": 8 * BIT + 4 * ROW,
    "hf4": 8 * BIT + 4 * ROW,
    "token4_rot": 8 * BIT + 4 * ROW,
    "q8_0": 16 * BIT + 4 * ROW,  # 2 blocks a row, scales only
    "q4_0": 8 * BIT + 4 * ROW,
    "nvfp4": 8 * BIT + 2 * (3 * 64 * 4 + FACTOR),
    "fp8_e5m2_unit": 16 * BIT,
    "fp8_e4m3_unit": 16 * BIT,
}
# where K has a bias: K is not rotated, has no norms, and fp16 parameters
HAND_BIASED = HAND | {
    "int4": 8 * BIT + 2 * ROW + 2 * 3 * 64 * 1 + FACTOR,
    "k4v2": 6 * BIT + 2 * ROW + 2 * 3 * 64 * 4 + FACTOR,
    "int3": 6 * BIT + 4 * ROW + GROUPED_V,
    "k3v2": 5 * BIT + 4 * ROW + GROUPED_V,
    "int2": 4 * BIT + 4 * ROW + GROUPED_V,
}


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_record_has_the_bytes_counted_by_hand(recipe: str):
    layout = make_layout(recipe)
    assert layout.page_bytes == 30 * HAND[recipe]
    assert layout.slot_bytes == 1_474_560
    assert layout.code_bytes + layout.parameter_bytes == layout.page_bytes
    assert layout.bytes_per_token * 64 == layout.page_bytes


@pytest.mark.parametrize("recipe", RECIPE_NAMES)
def test_record_of_a_model_with_a_bias_on_k_has_the_bytes_counted_by_hand(recipe: str):
    made = named_recipe(recipe, num_layers=30, has_k_bias=True, page_tokens=64, sink_pages=1)
    assert PageLayout(made, num_kv_heads=3, head_dim=64, dtype="bfloat16").page_bytes == 30 * HAND_BIASED[recipe]


def test_bits_per_element():
    elements = 30 * 2 * 3 * 64 * 64
    bits = {recipe: round(make_layout(recipe).page_bytes * 8 / elements, 2) for recipe in RECIPE_NAMES}
    assert bits == {
        "native": 16,
        "int8": 8.5,
        "int4": 4.68,
        "k4v2": 3.8,
        "int3": 3.55,
        "k3v2": 3.05,
        "int2": 2.55,
        "fp8_e5m2": 8.25,
        "fp8_e4m3": 8.25,
        "kivi4": 4.5,
        "kivi2": 2.5,
        "kivi2_32": 3,
        "token8": 8.5,
        "token4": 4.5,
        "hf4": 4.5,
        "token4_rot": 4.5,
        "q8_0": 8.5,
        "q4_0": 4.5,
        "nvfp4": 4.51,
        "fp8_e5m2_unit": 8,
        "fp8_e4m3_unit": 8,
    }
    for recipe, expected in bits.items():
        assert make_layout(recipe).bits_per_element == pytest.approx(expected, abs=0.005)


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
