"""With the batch-invariant backend a row's result is the same to the last bit alone and in company, as a decode row and
as a chunk's row, and however the prompt was cut; so are its pages, and the attention mass that they get."""

from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kernels.format.layout import PageRef, Pool
from kernels.torch_backend.invariant import InvariantTorchBackend
from tests.kernels.builders import Pools, make_layout, same_bits
from tests.kernels.steps import StepBuilder

SIZE = 32
LENGTH = 3 * SIZE + 9
GROUP = 3
NUM_OBSERVED = 2 * SIZE + 20  # of the last tokens: the first of them is in the middle of the first page


@dataclass(frozen=True)
class Tokens:
    """K, V and q of the one sequence that is watched, [LENGTH, layers, heads, D]."""

    k: Tensor
    v: Tensor
    q: Tensor


@dataclass(frozen=True)
class Company:
    """Other sequences in a step: positions of decode rows before and after the watched row, and chunks."""

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    chunks: tuple[tuple[int, int], ...] = ()


ALONE = Company()
CROWD = Company(before=(70, 3), after=(0, 200), chunks=((0, 40), (64, 33)))


class Computation:
    """Computes the watched tokens in steps, in pools of its own."""

    def __init__(self, recipe: str, sink_pages: int, dtype: str, seed: int):
        layout = make_layout(recipe, num_layers=2, num_kv_heads=2, page_tokens=SIZE, sink_pages=sink_pages, dtype=dtype)
        self.pools = Pools(layout, num_pages=150, num_slots=120, seed=seed)
        self.backend = InvariantTorchBackend(self.pools.tensors)
        self.pages: tuple[PageRef, ...] = ()
        self.outputs: list[Tensor] = []
        self.mass = [0.0] * (LENGTH // SIZE + 1)

    def decode(self, tokens: Tokens, positions: Iterable[int], company: Company) -> None:
        for position in positions:
            builder = StepBuilder(self.pools)
            for other in company.before:
                builder.add_decode(other, is_observed=True)
            first = len(builder.rows)
            k, v = tokens.k[: position + 1], tokens.v[: position + 1]
            self.pages = builder.continue_decode(self.pages, k, v, position >= LENGTH - NUM_OBSERVED)
            for other in company.after:
                builder.add_decode(other)
            for chunk in company.chunks:
                builder.add_chunk(*chunk, num_observed=3)
            self._run(builder, first, len(company.before), tokens.q[position : position + 1])
            self._seal(position)

    def chunk(self, tokens: Tokens, end: int, company: Company) -> None:
        builder = StepBuilder(self.pools)
        for other in company.before + company.after:
            builder.add_decode(other)
        for chunk in company.chunks[:1]:
            builder.add_chunk(*chunk, num_observed=3)
        first, start = len(builder.rows), len(self.pages) * SIZE
        place = len(company.before + company.after + company.chunks[:1])
        num_observed = max(0, end - max(start, LENGTH - NUM_OBSERVED))
        self.pages = builder.continue_chunk(self.pages, start, tokens.k[:end], tokens.v[:end], num_observed)
        for chunk in company.chunks[1:]:
            builder.add_chunk(*chunk)
        self._run(builder, first, place, tokens.q[start:end])

    def _run(self, builder: StepBuilder, first: int, place: int, queries: Tensor) -> None:
        """Keeps the outputs of the rows from `first` on that `queries` [rows, layers, heads, D] are for, and adds up
        the mass of their pages, which the step lists at `place`."""
        k, v = builder.activations(0)
        q = self.pools.random(len(k), *queries.shape[1:])
        q[first : first + len(queries)] = queries
        tables = self.backend.prepare(builder.step)
        layers = []
        for layer in (0, 1):
            self.backend.append(layer, k[:, layer], v[:, layer], tables)
            layers.append(self.backend.attend(layer, q[:, layer], k[:, layer], v[:, layer], tables))
        self.outputs.append(torch.stack(layers, 1)[first : first + len(queries)])
        for page, mass in enumerate(self.backend.mass(tables)[place]):
            self.mass[page] += mass

    def _seal(self, position: int) -> None:
        """What the engine does after a decode step that filled a page."""
        if (position + 1) % SIZE or position // SIZE < self.pools.layout.recipe.sink_pages:
            return
        target = self.pools.take(Pool.SEALED)
        self.backend.seal([self.pages[-1].id], [target.id])
        self.pages = (*self.pages[:-1], target)

    def contents(self) -> list[Tensor]:
        """What each page holds of the sequence."""
        contents = []
        for index, ref in enumerate(self.pages):
            if ref.pool is Pool.SEALED:
                contents.append(self.pools.tensors.sealed[ref.id])
            else:
                contents.append(self.pools.tensors.open[ref.id][..., : LENGTH - index * SIZE, :])
        return contents


def random_tokens(dtype: str) -> Tokens:
    generator = torch.Generator().manual_seed(7)

    def random(heads: int) -> Tensor:
        return torch.randn(LENGTH, 2, heads, 64, generator=generator).to(getattr(torch, dtype))

    # heads from flat to sharp, so that their shares of one page differ by more bits than a sum holds
    sharpness = 2.0 ** torch.arange(2 * GROUP)[:, None]
    return Tokens(random(2), random(2), random(2 * GROUP) * sharpness.to(getattr(torch, dtype)))


@pytest.mark.parametrize(
    "recipe, sink_pages, dtype",
    [
        ("native", 0, "float32"),
        ("native", 0, "bfloat16"),
        ("int8", 0, "bfloat16"),
        ("int4", 1, "float32"),
        ("int4", 2, "bfloat16"),
        ("fp8_e5m2", 1, "float32"),
        ("fp8_e4m3", 0, "float32"),
        ("kivi4", 1, "float32"),
    ],
)
def test_results_and_pages_do_not_depend_on_company_chunks_or_phase(recipe: str, sink_pages: int, dtype: str):
    tokens = random_tokens(dtype)

    whole = Computation(recipe, sink_pages, dtype, seed=1)
    whole.chunk(tokens, LENGTH, ALONE)
    (expected,) = whole.outputs
    assert torch.isfinite(expected).all()

    chunked = Computation(recipe, sink_pages, dtype, seed=2)
    for end, company in ((SIZE, CROWD), (3 * SIZE, ALONE), (LENGTH, CROWD)):
        chunked.chunk(tokens, end, company)

    decoded = Computation(recipe, sink_pages, dtype, seed=3)
    decoded.chunk(tokens, SIZE, ALONE)
    decoded.decode(tokens, range(SIZE, 2 * SIZE - 2), ALONE)
    decoded.decode(tokens, range(2 * SIZE - 2, 2 * SIZE + 2), CROWD)  # over a page's end
    decoded.decode(tokens, range(2 * SIZE + 2, LENGTH), Company(before=(5,)))

    assert sum(whole.mass) == pytest.approx(2 * 2 * GROUP * NUM_OBSERVED)
    for other in (chunked, decoded):
        assert same_bits(torch.cat(other.outputs), expected)
        assert other.mass == whole.mass
        assert len(other.pages) == len(whole.pages) == 4
        for mine, theirs in zip(whole.contents(), other.contents(), strict=True):
            assert same_bits(mine, theirs)


def test_decode_rows_from_the_first_token_on_equal_a_chunk():
    """Also where the own page is a sink page, and where nothing is sealed yet."""
    tokens = random_tokens("float32")
    whole, decoded = (Computation("int8", 1, "float32", seed) for seed in (1, 2))
    whole.chunk(tokens, LENGTH, ALONE)
    decoded.decode(tokens, range(LENGTH), ALONE)
    assert same_bits(torch.cat(decoded.outputs), torch.cat(whole.outputs))
