"""Calibration on tiny models: gradients, normalised numbers, measured damage, the sink rule, the budget."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.config import ModelConfig
from engine.errors import StartupError
from engine.model.rope import inverse_frequencies, make_rotary
from engine.study.calibration import Calibration, Calibrator, Wish
from engine.study.candidates import Candidates, searched, uniform
from engine.study.dense import DenseModel, LayerTrace
from engine.study.forms import Form, Geometry, Option
from engine.study.sealed import WindowPages
from engine.study.sensitivity import QaqBits, Sensitivity
from engine.study.sink_rule import find_sink_rule
from engine.study.sinks import ResidualPeaks
from kernels.format.codec import Centred, Integer, Parameters, Table
from kernels.format.layout import PageLayout
from kernels.format.recipe import LayerRecipe, MarkedTokens
from tests.engine import plain_model
from tests.helpers import TINY, TINY_QWEN2, TINY_QWEN3, RandomCheckpoint, random_prompt

CPU = torch.device("cpu")
P = 32


def dense(model: ModelConfig = TINY) -> DenseModel:
    return DenseModel(RandomCheckpoint(model), model.max_position, CPU, lambda: None)


def log_likelihood(model: ModelConfig, tokens: list[int]) -> float:
    """Mean of the tokens behind the first, from the float64 model."""
    frequencies = inverse_frequencies(model.rope, model.head_dim, model.max_position).tolist()
    logits = plain_model.logits(model, RandomCheckpoint(model).tensor, frequencies, tokens)
    return -F.cross_entropy(logits[:-1], torch.tensor(tokens[1:])).item()


@pytest.mark.parametrize("model", [TINY, TINY_QWEN2, TINY_QWEN3], ids=["llama", "qwen2", "qwen3"])
def test_the_dense_model_is_the_model(model: ModelConfig) -> None:
    tokens = random_prompt(0, 96)
    assert dense(model).trace(tokens).nll == pytest.approx(-log_likelihood(model, tokens), rel=1e-5)


def test_gradients_are_those_of_the_loss() -> None:
    """A small change of V behind v_proj, made through a bias that only this layer has, against the gradient."""
    model = replace(TINY, qkv_bias=True, num_layers=1)
    tokens, step = random_prompt(1, 40), 1e-4

    def loss(channel: int, change: float) -> float:
        checkpoint = RandomCheckpoint(model)

        def weight(name: str) -> Tensor:
            tensor = checkpoint.tensor(name).double()
            if name.endswith("v_proj.bias"):
                tensor[channel] += change
            return tensor

        frequencies = inverse_frequencies(model.rope, model.head_dim, model.max_position).tolist()
        logits = plain_model.logits(model, weight, frequencies, tokens)
        return F.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="sum").item()

    v_grad = dense(model).trace(tokens).layers[0].v_grad
    for channel in (0, 7, 31):
        expected = (loss(channel, step) - loss(channel, -step)) / (2 * step)
        # a bias moves V of all tokens alike
        assert v_grad.flatten(1)[:, channel].sum().item() == pytest.approx(expected, rel=2e-3, abs=1e-4)


def test_weights_without_finite_numbers_are_told() -> None:
    class Broken(RandomCheckpoint):
        def tensor(self, name: str) -> Tensor:
            tensor = super().tensor(name)
            if name == "model.layers.1.mlp.up_proj.weight":
                tensor[3, 4] = math.nan
            return tensor

    model = DenseModel(Broken(TINY), TINY.max_position, CPU, lambda: None)
    with pytest.raises(StartupError, match="not finite"):
        model.trace(random_prompt(0, 64))


def window(count: int = 4 * P, seed: int = 0, heads: int = 2, dim: int = 16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, count, heads, dim, generator=generator)
    return k, v


def pages_of(k: Tensor, v: Tensor) -> WindowPages:
    return WindowPages(k, v, P, make_rotary(TINY.rope, k.shape[2], 1024, CPU), uneven(*k.shape[1:]))


def uneven(heads: int, dim: int) -> Tensor:
    """Factors of balance from 1/2 to 2."""
    return torch.exp2(torch.linspace(-1, 1, heads * dim)).view(heads, dim)


def test_normalised_k_is_kvquants() -> None:
    """Per channel over a page: (x - (max + min) / 2) / ((max - min) / 2), weighed by (gradient times that unit)^2."""
    k, v = window()
    grad = torch.randn(k.shape, generator=torch.Generator().manual_seed(9))
    numbers, weights = pages_of(k, v).normalised(Form(True, before_rope=True), grad, [1, 3])
    for place, page in enumerate((1, 3)):
        tile, change = (x[page * P : (page + 1) * P].transpose(0, 1) for x in (k, grad))  # [heads, P, D]
        low, high = tile.amin(1, keepdim=True), tile.amax(1, keepdim=True)
        unit = (high - low) / 2
        found = numbers[place].reshape(2, P, 16)
        assert torch.allclose(found, (tile - (high + low) / 2) / unit, atol=4e-3)
        assert torch.allclose(weights[place].reshape(2, P, 16), (change * unit) ** 2, rtol=4e-3)


def test_weights_of_rotated_k_count_its_norm() -> None:
    """K after RoPE, balanced, rotated and divided by its norm: an error of one unit is as large as unit times norm."""
    k, v = window()
    grad = torch.randn(k.shape, generator=torch.Generator().manual_seed(9))
    _, weights = pages_of(k, v).normalised(Form(True, is_rotated=True), grad, [2])
    rotation = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        rotation = torch.kron(rotation, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)) / math.sqrt(2)
    frequencies = inverse_frequencies(TINY.rope, 16, 1024).tolist()
    x, g = (plain_model.turn(value.double(), frequencies) for value in (k, grad))
    factors = uneven(2, 16).double()
    x, g = (x * factors) @ rotation, (g / factors) @ rotation
    norm = x.square().sum((1, 2), keepdim=True).sqrt()
    page = slice(2 * P, 3 * P)
    tile = (x / norm)[page]
    unit = (tile.amax(0) - tile.amin(0)) / 2
    expected = (g[page] * unit * norm[page]) ** 2  # [P, heads, D]
    found = weights[0].reshape(2, P, 16).transpose(0, 1).double()
    assert torch.allclose(found, expected, rtol=5e-3, atol=1e-9)


def test_normalised_numbers_are_what_the_codec_codes() -> None:
    """A table with a value at each number loses nothing, in every form."""
    for form in (Form(True, True), Form(True, True, True), Form(False, True), Form(False, group=8)):
        k, v = window(P, heads=1, dim=8)
        numbers, _ = pages_of(k, v).normalised(form, torch.ones_like(k), [0])
        assert numbers.min() >= -1.005 and numbers.max() <= 1.005
        values = torch.unique(numbers.half().double()).tolist()[:256]
        spare = [values[-1] + 1 + n for n in range(256 - len(values))]
        option = Option(form, Table.nearest((*values, *spare)))
        new_k, new_v = pages_of(k, v).read_back(option.layer)
        exact, found = (pages_of(k, v).turned(k), new_k) if form.is_key else (v, new_v)
        assert torch.allclose(found, exact, atol=0.02)


@pytest.mark.parametrize(
    "option",
    [
        Option(Form(True), Integer(2)),
        Option(Form(True, True, True, 32, Parameters.BYTE), Integer(3)),
        Option(Form(False, True), Centred(2)),
    ],
    ids=str,
)
def test_damage_is_what_attention_does(option: Option) -> None:
    """Against attention written out query by query in float64."""
    model, sinks = dense(), 1
    trace = model.trace(random_prompt(3, 5 * P)).layers[1]
    pages = WindowPages(trace.k, trace.v, P, model.rotary, torch.ones(trace.k.shape[1:]))
    sensitivity = Sensitivity(P, sinks)
    sensitivity.add(trace, pages, [option])
    (damage,) = sensitivity.damages().values()
    error, size, loss, count = 0.0, 0.0, 0.0, 0
    for place in range((sinks + 1) * P, 5 * P, 4):
        changed = attend_one(trace, pages, option, place, sinks)
        exact = attend_one(trace, pages, None, place, sinks)
        error += (changed - exact).square().sum().item()
        size += exact.square().sum().item()
        loss += ((changed - exact) * trace.mixed_grad[place]).sum().item() ** 2 / 2
        count += 1
    assert damage.output_error == pytest.approx(error / size, rel=1e-3)
    assert damage.loss == pytest.approx(loss / count, rel=1e-3)


def attend_one(trace: LayerTrace, pages: WindowPages, option: Option | None, place: int, sinks: int) -> Tensor:
    k, v = pages.turned(trace.k).double(), trace.v.double()
    if option is not None:
        stored = slice(sinks * P, place // P * P)
        new_k, new_v = pages.read_back(option.layer)
        if option.form.is_key:
            k[stored] = new_k.double()[stored]
        else:
            v[stored] = new_v.double()[stored]
    group = trace.q.shape[1] // k.shape[1]
    k, v = (x[: place + 1].repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("hd,thd->ht", trace.q[place].double(), k) / math.sqrt(k.shape[2])
    return torch.einsum("ht,thd->hd", logits.softmax(-1), v)


def peaks(magnitudes: list[list[float]], channel: int = 5) -> list[ResidualPeaks]:
    return [ResidualPeaks(torch.tensor(row), torch.full((len(row),), channel)) for row in magnitudes]


def test_a_planted_sink_is_found() -> None:
    ordinary = [1.0 + 0.01 * n for n in range(2 * P)]
    sink = list(ordinary)
    sink[3], sink[P + 7], sink[P + 9] = 300.0, 40.0, 60.0  # the smallest stands far above ordinary ones
    fading = list(ordinary)
    fading[P + 7] = 1.2
    found = find_sink_rule([peaks([ordinary, sink, sink, fading, fading, ordinary])] * 2, P, sink_pages=1)
    assert found is not None
    assert (found.rule.layer, found.rule.channels) == (1, (5,))
    assert ordinary[-1] < found.rule.threshold < 40
    assert found.layers == (2, 3)
    assert (found.num_tokens, found.num_marked, found.num_outside, found.num_rows) == (4 * P, 6, 4, 2)


def test_no_token_stands_out() -> None:
    assert find_sink_rule([peaks([[1.0 + 0.1 * n for n in range(P)]] * 4)], P, sink_pages=1) is None


def calibrate(candidates: Candidates, budget: float | None = None, model: ModelConfig = TINY) -> Calibration:
    wish = Wish(
        name="test",
        candidates=candidates,
        budget=budget,
        page_tokens=P,
        sink_pages=1,
        window_pages=0,
        marked_tokens=None,
        search_windows=1,
    )
    windows = [tuple(random_prompt(seed, 6 * P)) for seed in (0, 1)]
    progress = []
    calibrator = Calibrator(RandomCheckpoint(model), windows, wish, CPU, lambda name, count: progress.append(count))
    calibration = calibrator.run()
    assert sum(progress) == calibrator.num_units
    return calibration


def layout_of(calibration: Calibration, model: ModelConfig = TINY) -> PageLayout:
    return PageLayout(calibration.recipe, num_kv_heads=model.num_kv_heads, head_dim=model.head_dim, dtype="bfloat16")


@pytest.mark.parametrize("budget", [4.2, 5.0, 7.5])
def test_the_budget_holds_in_bytes(budget: float) -> None:
    calibration = calibrate(searched("mixed", head_dim=16), budget)
    layout = layout_of(calibration)
    assert layout.bits_per_element <= budget
    assert calibration.bits_per_element == layout.bits_per_element
    chosen = [row for row in calibration.rows if row.is_chosen]
    assert len(chosen) == 2 * TINY.num_layers
    # what is left buys no better option
    left = int(budget * layout.num_elements / 8) - layout.page_bytes
    geometry = Geometry(TINY.num_kv_heads, TINY.head_dim, P)
    for mine in chosen:
        for other in calibration.rows:
            same = (other.layer, other.option.form.is_key) == (mine.layer, mine.option.form.is_key)
            if same and other.damage.loss < mine.damage.loss:
                assert geometry.num_bytes(other.option) - geometry.num_bytes(mine.option) > left


def test_a_larger_budget_loses_less() -> None:
    def loss(budget: float) -> float:
        rows = calibrate(searched("nuq3", head_dim=16), budget).rows
        return sum(row.damage.loss for row in rows if row.is_chosen)

    assert loss(7.0) < loss(4.5)


def test_a_budget_below_all_options_is_refused() -> None:
    with pytest.raises(StartupError, match=r"--budget is 1.5 bits per element; test takes at least \d"):
        calibrate(searched("mixed", head_dim=16), 1.5)


def test_uniform_recipes() -> None:
    plain = calibrate(uniform("nuq3", has_k_bias=False, head_dim=16)).recipe
    assert all(layer.before_rope and not layer.rotate_k and not layer.rotate_v for layer in plain.layers)
    tables = [store.codec for layer in plain.layers for store in (layer.k, layer.v)]
    assert all(isinstance(table, Table) and table.bits == 3 for table in tables)
    assert len(set(tables)) == 4  # K and V of each layer have their own
    rotated = calibrate(uniform("nuq4_rot", has_k_bias=False, head_dim=16)).recipe.layers[0]
    assert rotated.rotate_k and rotated.norm_k and rotated.rotate_v and not rotated.before_rope
    biased = calibrate(uniform("nuq4_rot", has_k_bias=True, head_dim=16), model=TINY_QWEN2).recipe.layers[0]
    assert not biased.rotate_k and not biased.norm_k and biased.rotate_v


def test_widths_that_fill_no_bytes_are_left_out() -> None:
    with pytest.raises(StartupError, match="--recipe nuq3: 4 codes of 3 bits"):
        uniform("nuq3", has_k_bias=False, head_dim=4)
    assert searched("mixed", head_dim=4).table_bits == (4, 2)


def test_sizes_of_options_add_up() -> None:
    """To the bytes of the layer, with K before RoPE, norms and groups of every kind."""
    geometry = Geometry(2, 16, P)
    for k in (
        Option(Form(True, True), Integer(3)),
        Option(Form(True, group=8, parameters=Parameters.BYTE), Integer(2)),
    ):
        for v in (Option(Form(False), Integer(8)), Option(Form(False, True, group=4), Centred(4))):
            layer = LayerRecipe(
                k.layer.k, v.layer.v, rotate_k=k.layer.rotate_k, norm_k=k.layer.norm_k, rotate_v=v.layer.rotate_v
            )
            assert geometry.num_bytes(k) + geometry.num_bytes(v) == geometry.layout(layer).page_bytes


def test_marked_tokens_are_counted_in_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(hidden: Tensor) -> ResidualPeaks:
        row = torch.ones(len(hidden))
        row[[P + 1, 2 * P + 5, 3 * P + 5]] = 100.0
        return ResidualPeaks(row, torch.zeros(len(hidden), dtype=torch.int64))

    monkeypatch.setattr(ResidualPeaks, "of", staticmethod(planted))
    calibration = calibrate(searched("mixed", head_dim=16), 6.0)
    recipe = calibration.recipe
    assert recipe.sink_rule is not None and recipe.sink_rule.layer == 0
    assert recipe.layers[0].outliers is None and recipe.layers[1].outliers == MarkedTokens(1)
    assert layout_of(calibration).bits_per_element <= 6.0


def test_qaqs_bits_by_hand() -> None:
    """The paper's bounds for each token, with its uniform error: range / (2 sqrt(3) 2^bits) at most."""
    generator = torch.Generator().manual_seed(4)
    count, dim = 12, 8
    q, k, v = torch.randn(3, count, 1, dim, generator=generator)
    zero = torch.zeros(count, 1, dim)
    weights = (q[:, 0] @ k[:, 0].T / math.sqrt(dim)).masked_fill(torch.ones(count, count).triu(1) > 0, -math.inf)
    weights = weights.softmax(-1)
    mixed = weights @ v[:, 0]
    places = torch.arange(count)
    bits = QaqBits()
    trace = LayerTrace(q, k, v, mixed.unsqueeze(1), zero, zero, zero)
    bits.add(trace, k, places, places <= places[:, None])
    # logits are divided by sqrt(D), so Q counts with 1/D of its square; weights may err by 1 % of 1/T
    bound = torch.quantile(q[:, 0].square().sum(-1), 0.9).item() / dim
    k_error = math.sqrt(math.log(count**3 / (count - 1) * (0.01 / count) ** 2 + 1) / bound)
    k_bits, v_bits = [], []
    for token in range(count):
        v_error = 0.1 * mixed.std().item() / (math.sqrt(count) * weights[:, token].max().item())
        for found, x, error in ((k_bits, k[token, 0], k_error), (v_bits, v[token, 0], v_error)):
            found.append(max(0, math.ceil(math.log2((x.max() - x.min()).item() / (2 * math.sqrt(3) * error)))))
    assert bits.k == pytest.approx(sum(k_bits) / count) and bits.v == pytest.approx(sum(v_bits) / count)
