"""Tables that were made larger, as graphs need them, say what those of the right size say."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels.backend import PoolTensors
from kernels.triton.backend import TritonBackend
from kernels.triton.tables import SPLIT_PAGES, StepTables
from tests.kernels.builders import rotary
from tests.kernels.checks import LAYER, Shape
from tests.kernels.steps import StepBuilder
from tests.kernels.triton.candidates import DEVICE

P = 64
GROUP = 2
FULL = SPLIT_PAGES
# sealed pages before each row's own; those behind another of the same size take over its tables
STEPS = [[0], [FULL], [2 * FULL + 1, 0, 0], [0, FULL + 1, 2 * FULL], [2 * FULL + 1, FULL + 1, 0, 1, FULL - 1]]


class Run:
    """A step's K and V appended to a copy of its pools, and its queries attended to."""

    def __init__(self, builder: StepBuilder, q: Tensor):
        tensors = builder.pools.tensors
        self.tensors = PoolTensors(tensors.layout, tensors.sealed.clone().to(DEVICE), tensors.open.clone().to(DEVICE))
        self.backend = TritonBackend(self.tensors, rotary(tensors.layout.head_dim), num_heads=GROUP)
        k, v = builder.activations(0)
        self._rows = q, k[:, LAYER], v[:, LAYER]

    def attend(self, tables: StepTables) -> Tensor:
        q, k, v = (self._with_nan_below(rows, tables.num_rows - len(rows)).to(DEVICE) for rows in self._rows)
        self.backend.append(LAYER, k, v, tables)
        return self.backend.attend(LAYER, q, k, v, tables)

    @staticmethod
    def _with_nan_below(rows: Tensor, count: int) -> Tensor:
        return torch.cat([rows, torch.full((count, *rows.shape[1:]), torch.nan, dtype=rows.dtype)])


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory that is handed out empty holds NaN, so that what nobody wrote shows."""

    def filled(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def call(*args: Any, **options: Any) -> Tensor:
            tensor = make(*args, **options)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return call

    monkeypatch.setattr(torch, "empty", filled(torch.empty))
    monkeypatch.setattr(Tensor, "new_empty", filled(Tensor.new_empty))


@pytest.mark.parametrize("recipe, sinks, dtype", [("int8", 1, "float16"), ("native", 0, "float32")])
def test_padded_tables_give_the_same_bits(recipe: str, sinks: int, dtype: str, poisoned: None):
    used: dict[tuple[int, int, int], StepTables] = {}
    num_overwritten = 0
    for num_sealed in STEPS:
        builder = StepBuilder(Shape(recipe, P, P, 1, GROUP, sinks, dtype).pools(num_pages=70, num_slots=30))
        for row, pages in enumerate(num_sealed):
            builder.add_decode((sinks + pages) * P + 17 * row % P)
        q = builder.pools.random(len(num_sealed), GROUP, P).float()
        plain, padded = Run(builder, q), Run(builder, q)
        wanted = plain.attend(plain.backend.prepare(builder.step))
        tables = padded.backend.prepare_decode(builder.step)
        earlier = used.setdefault(tables.size, tables)
        num_overwritten += earlier is not tables
        earlier.overwrite(tables)
        found = padded.attend(earlier)
        assert wanted.isfinite().all()
        assert torch.equal(found[: len(wanted)], wanted)
        assert not found[len(wanted) :].any()
        assert torch.equal(padded.tensors.sealed, plain.tensors.sealed)
        # bits, since slots that no row owns hold NaN
        assert torch.equal(padded.tensors.open.view(torch.uint8), plain.tensors.open.view(torch.uint8))
    assert num_overwritten == 2
