"""Records that the Triton kernels write, against the oracle's and the torch backend's, bit for bit."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels.backend import PoolTensors
from kernels.format.codec import Centred, Float8, Integer, Parameters, per_channel, per_token
from kernels.format.layout import ITEM_BYTES, PageLayout
from kernels.format.named import RECIPES
from kernels.format.recipe import LayerRecipe, MarkedTokens, Recipe
from kernels.reference import encode_page, token_norms
from kernels.torch_backend.backend import TorchBackend
from kernels.triton.seal import Sealer
from tests.kernels.builders import (
    NUQ3,
    ODD_RECIPES,
    assert_same_record,
    make_layout,
    rotary,
    same_bits,
    stored_norms,
)
from tests.kernels.test_codec import KINDS, make_pages

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
UNWRITTEN = 0xA5
MARKED = LayerRecipe(
    per_channel(Centred(2), 16, Parameters.BYTE), per_token(NUQ3, None), norm_k=True, outliers=MarkedTokens(17)
)


def has_outliers(recipe: LayerRecipe) -> bool:
    return bool(recipe.k.num_outliers or recipe.v.num_outliers)


# (head_dim, page_tokens, kv_heads, dtype)
SHAPES = [(64, 64, 1, "bfloat16"), (64, 64, 1, "float32"), (64, 128, 1, "float16"), (128, 64, 1, "bfloat16")]
NAMES = [*RECIPES, *(name for name, recipe in ODD_RECIPES.items() if not has_outliers(recipe))]
CASES = [
    *((name, *SHAPES[index % len(SHAPES)]) for index, name in enumerate(NAMES)),
    # heads of several tiles, with blocks of several tiles and tiles of several blocks
    ("int4", 256, 128, 1, "bfloat16"),
    ("kivi4", 256, 64, 3, "float32"),
    ("wrong axes", 128, 128, 2, "float16"),
    ("before rope, rotated", 256, 64, 2, "bfloat16"),
    ("int3", 128, 128, 1, "float32"),
    ("half raw", 256, 128, 1, "float16"),
]
ONE_TILE = 8192


def layout_of(*layers: LayerRecipe, dtype: str = "bfloat16", num_kv_heads: int = 2) -> PageLayout:
    return PageLayout(Recipe("made", layers, 64, 1), num_kv_heads=num_kv_heads, head_dim=64, dtype=dtype)


def ids(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


def marked(layout: PageLayout, marks: Sequence[Sequence[int]]) -> Tensor:
    result = torch.zeros(len(marks), layout.page_tokens, dtype=torch.bool, device=DEVICE)
    for page, places in enumerate(marks):
        result[page, list(places)] = True
    return result


def unwritten(layout: PageLayout, num_pages: int) -> Tensor:
    return torch.full((num_pages, layout.page_bytes), UNWRITTEN, dtype=torch.uint8, device=DEVICE)


def seal_slots(layout: PageLayout, pages: Tensor, marks: Sequence[Sequence[int]] | None = None) -> Tensor:
    """The records of `pages` [n, layers, 2, kv_heads, P, D], sealed at once."""
    sealed, all_pages = unwritten(layout, len(pages)), ids(*range(len(pages)))
    marks = marks or [()] * len(pages)
    Sealer(layout, sealed).seal_slots(pages.to(DEVICE), all_pages, all_pages, marked(layout, marks))
    return sealed


def expected_record(layout: PageLayout, page: Tensor, record: np.ndarray, marks: Sequence[int] = ()) -> np.ndarray:
    """The oracle's, with `UNWRITTEN` between the fields, by the norms of `record`, which must be next to its own: the
    order of their sum is free."""
    k, v = page.float().transpose(0, 1).numpy()
    norms = None
    if layout.recipe.layers[0].norm_k:
        norms = stored_norms(layout, record)
        exact = np.stack([token_norms(keys) for keys in k[: len(norms)]])
        places = norms.view(np.int16).astype(int) - exact.view(np.int16)  # positive fp16 counts up as integers
        assert np.abs(places).max() <= 1
    encoded = encode_page(layout, k, v, norms, marks)
    expected = np.full_like(encoded, UNWRITTEN)
    for field in (field for layer in layout.layers for field in layer.fields):
        place = slice(field.offset, field.offset + field.num_bytes)
        expected[place] = encoded[place]
    return expected


@pytest.mark.parametrize("name, head_dim, page_tokens, num_kv_heads, dtype", CASES)
def test_records_equal_the_oracles_bit_for_bit(
    name: str, head_dim: int, page_tokens: int, num_kv_heads: int, dtype: str
):
    layout = make_layout(
        name, num_layers=1, head_dim=head_dim, page_tokens=page_tokens, num_kv_heads=num_kv_heads, dtype=dtype
    )
    kinds = list(KINDS) if head_dim * page_tokens <= ONE_TILE else ["random", "offset", "ties"]
    pages = make_pages(layout, kinds)
    if dtype == "float16":
        pages.clamp_(-65504, 65504)  # of what is beyond fp16, infinities are left
    records = seal_slots(layout, pages).cpu().numpy()
    for page, record in zip(pages, records, strict=True):
        assert_same_record(layout, record, expected_record(layout, page, record))


@pytest.mark.parametrize("name", ["token8", "q4_0", "nvfp4", "rows"])
def test_records_equal_the_torch_backends(name: str):
    layout = make_layout(name, num_layers=1, num_kv_heads=1)
    pages = make_pages(layout, list(KINDS), seed=1)
    count = len(pages)
    pool = PoolTensors.allocate(layout, num_pages=count, num_slots=count, device=torch.device("cpu"))
    pool.open.copy_(pages)
    pool.sealed.fill_(UNWRITTEN)
    TorchBackend(pool, rotary(layout.head_dim)).seal(list(range(count)), list(range(count)))
    for record, expected in zip(seal_slots(layout, pages).cpu().numpy(), pool.sealed.numpy(), strict=True):
        assert_same_record(layout, record, expected)


def test_float8_rounds_once():
    """Numbers about every middle between two codes; by way of fp16 some would be rounded twice."""
    for codec in (Float8(4, 3), Float8(5, 2)):
        unit = per_channel(codec, None, Parameters.UNIT)
        layout = layout_of(LayerRecipe(unit, unit), dtype="float32", num_kv_heads=1)
        exponents = torch.arange(-18, 9).double()
        middles = (2 ** exponents[:, None] * (1 + (torch.arange(16) + 0.5) / 16)).flatten()
        near = (middles[:, None] * torch.tensor([1 - 2**-23, 1.0, 1 + 2**-23])).flatten()
        page = torch.zeros(1, *layout.slot_shape)
        page.view(-1)[: 2 * len(near)] = torch.cat([near, -near]).float()
        record = seal_slots(layout, page)[0].cpu().numpy()
        assert_same_record(layout, record, expected_record(layout, page[0], record))


def test_float8_keeps_the_sign_of_zero():
    layout = layout_of(RECIPES["fp8_e4m3"](False), num_kv_heads=1)
    page = make_pages(layout, ["ties"])
    page[..., ::2] *= -1
    assert ((page == 0) & page.signbit()).any()
    record = seal_slots(layout, page)[0].cpu().numpy()
    assert_same_record(layout, record, expected_record(layout, page[0], record))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_marked_rows_are_kept_and_do_not_count_in_ranges(dtype: str):
    """Some, a whole block, and more than there is room for."""
    layout = layout_of(MARKED, dtype=dtype)
    pages = make_pages(layout, ["outlier", "offset", "random"])
    marks = [(3, 0, 60), tuple(range(16, 32)), tuple(range(40, 63))]
    records = seal_slots(layout, pages, marks).cpu().numpy()
    for page, places, record in zip(pages, marks, records, strict=True):
        assert_same_record(layout, record, expected_record(layout, page, record, places))


@pytest.mark.parametrize("recipe, dtype", [(MARKED, "bfloat16"), (ODD_RECIPES["rows"], "float32")])
def test_bytes_do_not_depend_on_how_many_pages_are_sealed_at_once_or_where_from(recipe: LayerRecipe, dtype: str):
    layout = layout_of(recipe, recipe, dtype=dtype)
    num_pages, size, heads = 2, layout.page_tokens, layout.num_kv_heads
    pages = make_pages(layout, ["random"] * num_pages, seed=2)
    marks = [(1, 5), ()]
    expected = seal_slots(layout, pages, marks)
    assert same_bits(seal_slots(layout, pages[:1], marks[:1])[0], expected[0])

    # from a chunk, its K and V parts of one fused activation; the pages in another order, NaN in the rows between
    sealed, order, first = unwritten(layout, num_pages), [1, 0], [3, 7 + size]
    sealer = Sealer(layout, sealed)
    table = torch.tensor(
        list(zip(first, order, strict=True)), device=DEVICE
    )  # columns of a table, as callers have them
    for layer in (0, 1):
        fused = torch.full((first[-1] + size, 4 * heads, layout.head_dim), torch.nan, dtype=pages.dtype)
        for row, page in zip(first, order, strict=True):
            fused[row : row + size, 2 * heads :] = pages[page, layer].flatten(0, 1).transpose(0, 1)
        _, k, v = fused.to(DEVICE).split((2 * heads, heads, heads), dim=1)
        # K in an order of its own, as where a kernel made it anew
        k = k.transpose(0, 1).contiguous().transpose(0, 1)
        sealer.seal_rows(layer, k, v, table[:, 0], table[:, 1], marked(layout, [marks[page] for page in order]))
    assert same_bits(sealed, expected)


def test_layers_of_different_recipes():
    names = ["native", "int4", "kivi2", "int4"]
    layout = layout_of(*(RECIPES[name](False) for name in names), num_kv_heads=1)
    pages = make_pages(layout, ["random", "ties"])
    records = seal_slots(layout, pages)
    for layer, name in enumerate(names):
        start, end = layout.layers[layer].span
        alone = seal_slots(layout_of(RECIPES[name](False), num_kv_heads=1), pages[:, [layer]])
        assert same_bits(records[:, start:end], alone)


def test_only_the_named_pages_are_written():
    layout = layout_of(MARKED, RECIPES["fp8_e5m2"](False))
    pages = make_pages(layout, ["random"] * 4, seed=3)
    pages[[0, 2]] = torch.nan
    sealed, before = unwritten(layout, 6), pages.clone()
    Sealer(layout, sealed).seal_slots(pages.to(DEVICE), ids(3, 1), ids(2, 4), marked(layout, [(), ()]))
    assert same_bits(pages, before)
    assert (sealed[[0, 1, 3, 5]] == UNWRITTEN).all()
    for slot, page in ((3, 2), (1, 4)):
        record = sealed[page].cpu().numpy()
        assert_same_record(layout, record, expected_record(layout, pages[slot], record))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="needs a sparse file as memory")
def test_places_beyond_32_bits(tmp_path: Path):
    layout = layout_of(LayerRecipe(per_channel(Integer(4), 16), per_token(Integer(4))), num_kv_heads=1)

    def pool(name: str, dtype: torch.dtype, *shape: int) -> Tensor:
        """Zeros that take no memory, more than 2^31."""
        count = 2**31 // int(np.prod(shape)) + 2
        size = count * int(np.prod(shape))
        (tmp_path / name).touch()
        with open(tmp_path / name, "r+b") as file:
            file.truncate(size * ITEM_BYTES[str(dtype).removeprefix("torch.")])
        return torch.from_file(str(tmp_path / name), shared=True, size=size, dtype=dtype).view(count, *shape)

    sealed, slots = pool("sealed", torch.uint8, layout.page_bytes), pool("open", torch.bfloat16, *layout.slot_shape)
    page = make_pages(layout, ["random"])
    slots[-1] = page[0]
    Sealer(layout, sealed).seal_slots(slots, ids(len(slots) - 1), ids(len(sealed) - 1), marked(layout, [()]))
    k, v = page[0].float().transpose(0, 1).numpy()
    assert_same_record(layout, sealed[-1].numpy(), encode_page(layout, k, v))


def test_channels_that_are_apart_are_refused():
    layout = layout_of(RECIPES["int8"](False))
    k = torch.zeros(64, 2, 128, dtype=torch.bfloat16, device=DEVICE)[:, :, ::2]
    with pytest.raises(ValueError, match="2 numbers apart"):
        Sealer(layout, unwritten(layout, 1)).seal_rows(0, k, k, ids(0), ids(0), marked(layout, [()]))
