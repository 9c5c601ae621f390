"""A recipe made for a model from a text: codebooks, the search under a budget, the sink rule. `quire calibrate`."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.errors import StartupError
from engine.model.balance import balance, probe_tokens
from engine.model.checkpoint import Checkpoint
from engine.study.budget import choose
from engine.study.candidates import Candidates
from engine.study.codebooks import Histogram, fit
from engine.study.dense import DenseModel, WindowTrace
from engine.study.forms import Form, Geometry, Option, join
from engine.study.sealed import WindowPages
from engine.study.sensitivity import Damage, Sensitivity
from engine.study.sink_rule import SinkFinding, find_sink_rule
from engine.study.sinks import ResidualPeaks
from engine.study.windows import Tokens
from kernels.format.codec import Integer
from kernels.format.recipe import LayerRecipe, MarkedTokens, Recipe
from kernels.rope import turn

Listen = Callable[[str, int], None]
"""Called with what is being done and the number of units done since the last call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked for. `budget`: bits per element, None for the same form in every layer. `marked_tokens`: rows a
    page for tokens that the sink rule marks, None for what the text suggests."""

    name: str
    candidates: Candidates
    budget: float | None
    page_tokens: int
    sink_pages: int
    window_pages: int
    marked_tokens: int | None
    search_windows: int


@dataclass(frozen=True, slots=True)
class Row:
    """An option for K or V of a layer: its size, what it does, QAQ's bits, and whether it was taken."""

    layer: int
    option: Option
    bits_per_element: float
    damage: Damage
    qaq_bits: float
    is_chosen: bool


@dataclass(frozen=True, slots=True)
class Calibration:
    """`nll`: mean negative log-likelihood of the text's tokens, nats. `sinks`: None where the model has none."""

    recipe: Recipe
    bits_per_element: float
    rows: tuple[Row, ...]
    sinks: SinkFinding | None
    nll: float


class Calibrator:
    """Raises StartupError where the model gives no finite numbers or the budget cannot be met."""

    def __init__(
        self, checkpoint: Checkpoint, windows: Sequence[Tokens], wish: Wish, device: torch.device, listen: Listen
    ):
        """Windows are of one length, whole pages."""
        self._checkpoint = checkpoint
        self._windows = windows
        self._wish = wish
        self._device = device
        self._listen = listen
        config = checkpoint.config
        self._geometry = Geometry(config.num_kv_heads, config.head_dim, wish.page_tokens)
        self._balance: Sequence[Tensor] | None = None

    @property
    def num_units(self) -> int:
        """Layers to go through: read, looked at in each window, fitted, measured."""
        looked_at = len(self._windows) + len(self._search_windows)
        return self._checkpoint.config.num_layers * (2 + looked_at)

    @property
    def _search_windows(self) -> Sequence[Tokens]:
        return self._windows[: self._wish.search_windows]

    def run(self) -> Calibration:
        self._check_budget()
        config = self._checkpoint.config
        self._listen("reading the model", 0)
        model = DenseModel(
            self._checkpoint, config.max_position, self._device, lambda: self._listen("reading the model", 1)
        )
        histograms, peaks, nll = self._look(model)
        tables = []
        for layer in histograms:
            tables.append({form: fit(found, self._wish.candidates.table_bits) for form, found in layer.items()})
            self._listen("fitting codebooks", 1)
        sinks = find_sink_rule(peaks, self._wish.page_tokens, self._wish.sink_pages)
        options = [self._wish.candidates.options(found) for found in tables]
        sensitivities = self._measure(model, options)
        damages = [found.damages() for found in sensitivities]
        chosen = self._choose(damages, sinks)
        recipe = self._recipe(chosen, sinks)
        rows = [
            Row(
                layer,
                option,
                8 * self._geometry.num_bytes(option) / self._geometry.num_elements,
                damage,
                sensitivities[layer].qaq.k if option.form.is_key else sensitivities[layer].qaq.v,
                option in chosen[layer],
            )
            for layer, found in enumerate(damages)
            for option, damage in found.items()
        ]
        bits = self._geometry.layout(*recipe.layers).bits_per_element
        return Calibration(recipe, bits, tuple(rows), sinks, nll)

    def _check_budget(self) -> None:
        """Refuse before anything is computed a budget below the cheapest options."""
        wish = self._wish
        if wish.budget is None:
            return
        cheapest = wish.candidates.cheapest_bits(self._geometry)
        if wish.budget < cheapest:
            raise StartupError(
                f"--budget is {wish.budget:g} bits per element; {wish.name} takes at least {cheapest:.2f}"
            )

    def _look(self, model: DenseModel) -> tuple[list[dict[Form, Histogram]], list[Sequence[ResidualPeaks]], float]:
        """What codebooks are fitted to, of each layer; the residual stream of each window; the text's likelihood."""
        forms = self._wish.candidates.table_forms
        histograms: list[dict[Form, Histogram]] = [
            {form: Histogram() for form in forms} for _ in range(model.config.num_layers)
        ]
        peaks: list[Sequence[ResidualPeaks]] = []
        total = 0.0
        for tokens in self._windows:
            trace = model.trace(tokens)
            first, end = self._wish.sink_pages, len(tokens) // self._wish.page_tokens
            for layer, pages in enumerate(self._pages(model, trace)):
                for form, histogram in histograms[layer].items():
                    grad = trace.layers[layer].k_grad if form.is_key else trace.layers[layer].v_grad
                    numbers, weights = pages.normalised(form, grad, range(first, end))
                    histogram.add(numbers.cpu().numpy(), weights.cpu().numpy())
                self._listen("looking at K and V", 1)
            peaks.append(trace.peaks)
            total += trace.nll
        return histograms, peaks, total / len(self._windows)

    def _measure(self, model: DenseModel, options: Sequence[Sequence[Option]]) -> list[Sensitivity]:
        found = [Sensitivity(self._wish.page_tokens, self._wish.sink_pages) for _ in options]
        for tokens in self._search_windows:
            trace = model.trace(tokens)
            for layer, pages in enumerate(self._pages(model, trace)):
                found[layer].add(trace.layers[layer], pages, options[layer])
                self._listen("measuring", 1)
        return found

    def _pages(self, model: DenseModel, trace: WindowTrace) -> Iterator[WindowPages]:
        for layer, factors in zip(trace.layers, self._factors(model), strict=True):
            yield WindowPages(layer.k, layer.v, self._wish.page_tokens, model.rotary, factors)

    def _factors(self, model: DenseModel) -> Sequence[Tensor]:
        """What balances Q and K of each layer; the engine finds the same when it loads the recipe."""
        if self._balance is None:
            probe = model.trace(probe_tokens(model.config.vocab_size).tolist())
            positions = torch.arange(len(probe.layers[0].k), device=self._device)
            cos, sin = model.rotary.at(positions)
            self._balance = [balance(layer.q, turn(layer.k, cos, sin)) for layer in probe.layers]
        return self._balance

    def _choose(
        self, damages: Sequence[dict[Option, Damage]], sinks: SinkFinding | None
    ) -> list[tuple[Option, Option]]:
        """K's and V's option of each layer."""
        items = [[option for option in found if option.form.is_key is is_key]
                 for found in damages for is_key in (True, False)]  # fmt: skip
        if self._wish.budget is None:
            picks = [0] * len(items)
        else:
            costs = [[self._geometry.num_bytes(option) for option in item] for item in items]
            losses = [[damages[place // 2][option].loss for option in item] for place, item in enumerate(items)]
            budget = self._geometry.page_bytes(self._wish.budget, len(damages)) - self._row_bytes(len(damages), sinks)
            # more than everything costs is no different, and the search takes memory for its whole room
            found = choose(costs, losses, min(budget, sum(max(item) for item in costs)))
            if found is None:
                raise StartupError(
                    f"--budget is {self._wish.budget:g} bits per element, too little for the rows of marked tokens as "
                    "well; raise it or give --marked-tokens 0"
                )
            picks = found
        options = [item[pick] for item, pick in zip(items, picks, strict=True)]
        return list(zip(options[::2], options[1::2], strict=True))

    def _row_bytes(self, num_layers: int, sinks: SinkFinding | None) -> int:
        """What the rows of marked tokens take in a page."""
        plain = [Option(form, Integer(8)) for form in (Form(True), Form(False))]
        layer = join(*plain)
        marked = self._marked([layer] * num_layers, sinks)
        return self._geometry.layout(*marked).page_bytes - self._geometry.layout(layer).page_bytes * num_layers

    def _marked(self, layers: Sequence[LayerRecipe], sinks: SinkFinding | None) -> list[LayerRecipe]:
        num_rows = self._num_rows(sinks)
        if not num_rows or sinks is None:
            return list(layers)
        return [
            replace(layer, outliers=MarkedTokens(num_rows)) if index in sinks.layers else layer
            for index, layer in enumerate(layers)
        ]

    def _num_rows(self, sinks: SinkFinding | None) -> int:
        if sinks is None:
            return 0
        return sinks.num_rows if self._wish.marked_tokens is None else self._wish.marked_tokens

    def _recipe(self, chosen: Sequence[tuple[Option, Option]], sinks: SinkFinding | None) -> Recipe:
        wish = self._wish
        layers = self._marked([join(k, v) for k, v in chosen], sinks)
        rule = sinks.rule if sinks is not None and self._num_rows(sinks) else None
        return Recipe(wish.name, tuple(layers), wish.page_tokens, wish.sink_pages, wish.window_pages, rule)
