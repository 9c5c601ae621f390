"""Statistics of K and V against hand formulas, axis errors and sinks against attention written out query by query."""

import math

import pytest
import torch
from torch import Tensor

from engine.study.axis_error import VARIANTS, Axis, AxisError, Variant, store_and_read, study_attention
from engine.study.capture import LayerTensors
from engine.study.distribution import ChannelStats, Distribution, Kind, kurtosis, rotate_head, top_energy
from engine.study.sinks import ResidualPeaks, find_sinks
from kernels.rope import turn

NUM_TOKENS = 64 * 4 + 13
KV_HEADS, GROUP, D = 2, 2, 6


def layer_tensors(offset: float = 12.0) -> LayerTensors:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(NUM_TOKENS, KV_HEADS * GROUP, D, generator=generator)
    k, v = (torch.randn(NUM_TOKENS, KV_HEADS, D, generator=generator) for _ in range(2))
    k[:, 1, 3] += offset
    angles = torch.outer(torch.arange(NUM_TOKENS), torch.tensor([1.0, 0.1, 0.01])).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    return LayerTensors(3, q, k, turn(k, cos, sin), v, torch.zeros_like(q), cos, sin)


def test_kurtosis_is_the_hand_formula() -> None:
    numbers = [0.5, -1.0, 4.0, 0.25, 0.0]
    mean = sum(numbers) / 5
    fourth, second = (sum((number - mean) ** power for number in numbers) / 5 for power in (4, 2))
    assert float(kurtosis(torch.tensor(numbers))) == pytest.approx(fourth / second**2, rel=1e-12)
    assert float(kurtosis(torch.tensor([-1.0, 1.0, 1.0, -1.0]))) == 1
    assert math.isnan(float(kurtosis(torch.full((9,), 0.3))))


def test_channels() -> None:
    x = torch.randn(200, 3, 8, generator=torch.Generator().manual_seed(1))
    x[:, 2, 5] *= 9
    x[7, 0, 0] = 100.0  # one large number makes no outlier channel
    stats = ChannelStats.of(x)
    assert stats.is_outlier.nonzero().tolist() == [[2, 5]]
    column = x[:, 2, 5].tolist()
    mean = sum(column) / 200
    assert float(stats.mean[2, 5]) == pytest.approx(sum(map(abs, column)) / 200)
    assert float(stats.largest[2, 5]) == max(map(abs, column))
    assert float(stats.deviation[2, 5]) == pytest.approx(math.sqrt(sum((c - mean) ** 2 for c in column) / 200))
    assert float(stats.kurtosis[0, 0]) > 100 > float(stats.kurtosis[2, 5])


def test_numbers_that_are_all_zero_have_no_outliers() -> None:
    stats = ChannelStats.of(torch.zeros(5, 1, 4))
    assert not stats.is_outlier.any() and top_energy(torch.zeros(5, 1, 4)) == 0


def test_top_energy() -> None:
    x = torch.ones(10, 2, 100)
    x[:, 0, 3], x[:, 1, 99] = 20.0, -10.0
    assert top_energy(x) == pytest.approx((400 + 100) / (400 + 100 + 198))


def test_rotation_spreads_a_channel_and_keeps_energy() -> None:
    x = torch.zeros(3, 1, 8)
    x[:, 0, 2] = 4.0
    assert torch.allclose(rotate_head(x).abs(), torch.full((3, 1, 8), 4 / math.sqrt(8)))
    assert torch.allclose(rotate_head(rotate_head(x)), x, atol=1e-6)


def quantized(block: list[float], bits: int) -> list[float]:
    """Asymmetric, with zero and scale in fp16."""
    low, high = min(block), max(block)
    zero, scale = (float(torch.tensor(number).half()) for number in (low, (high - low) / (2**bits - 1)))
    return [zero + scale * min(max(round((number - zero) / scale), 0), 2**bits - 1) for number in block]


@pytest.mark.parametrize("axis", list(Axis))
@pytest.mark.parametrize("bits", [4, 2])
def test_store_and_read(axis: Axis, bits: int) -> None:
    x = layer_tensors().k
    stored = store_and_read(x, axis.store(bits))
    assert torch.equal(stored[:64], x[:64]) and torch.equal(stored[256:], x[256:])
    expected = x.clone()
    for head in range(KV_HEADS):
        if axis is Axis.TOKEN:
            for token in range(64, 256):
                expected[token, head] = torch.tensor(quantized(x[token, head].tolist(), bits))
        else:
            for page in (1, 2, 3):
                for channel in range(D):
                    rows = slice(page * 64, page * 64 + 64)
                    expected[rows, head, channel] = torch.tensor(quantized(x[rows, head, channel].tolist(), bits))
    assert torch.allclose(stored, expected, atol=1e-5)


def changed(tensors: LayerTensors, variant: Variant) -> tuple[Tensor, Tensor]:
    """K after RoPE and V of which one is stored."""
    store = variant.axis.store(variant.bits)
    match variant.kind:
        case Kind.K:
            return store_and_read(tensors.k, store), tensors.v
        case Kind.K_BEFORE_ROPE:
            return turn(store_and_read(tensors.k_before_rope, store), tensors.cos, tensors.sin), tensors.v
        case Kind.K_ROTATED:
            return rotate_head(store_and_read(rotate_head(tensors.k), store)), tensors.v
        case Kind.V:
            return tensors.k, store_and_read(tensors.v, store)
    return tensors.k, rotate_head(store_and_read(rotate_head(tensors.v), store))


def attention_row(tensors: LayerTensors, k: Tensor, v: Tensor, query: int, head: int) -> tuple[Tensor, Tensor]:
    """Weights and output of one query, which reads the first page and its own one exactly, float64."""
    mine, own = head // GROUP, query // 64 * 64
    keys, values = ((x[: query + 1, mine].double()).clone() for x in (k, v))
    for exact in (slice(0, 64), slice(own, query + 1)):
        keys[exact], values[exact] = tensors.k[exact, mine].double(), tensors.v[exact, mine].double()
        if exact.start == own:
            keys[own:] = tensors.k[own : query + 1, mine].double()
            values[own:] = tensors.v[own : query + 1, mine].double()
    weights = (keys @ tensors.q[query, head].double() / math.sqrt(D)).softmax(0)
    return weights, weights @ values


def test_attention_errors_are_those_of_each_query_on_its_own() -> None:
    tensors = layer_tensors()
    study = study_attention(tensors)
    places = [(query, head) for query in range(128, NUM_TOKENS) for head in range(KV_HEADS * GROUP)]
    exact = [attention_row(tensors, tensors.k, tensors.v, *place) for place in places]
    sizes = [sum(float(row[part].square().sum()) for row in exact) for part in (0, 1)]
    for variant in VARIANTS:
        k, v = changed(tensors, variant)
        rows = [attention_row(tensors, k, v, *place) for place in places]
        weights, outputs = (
            math.sqrt(
                sum(float((a[part] - b[part]).square().sum()) for a, b in zip(rows, exact, strict=True)) / sizes[part]
            )
            for part in (0, 1)
        )
        before, after = (tensors.k, k) if variant.kind.is_key else (tensors.v, v)
        numbers = float((after - before)[64:256].norm() / before[64:256].norm())
        found = study.errors[variant]
        assert found == AxisError(
            pytest.approx(numbers, rel=1e-4),
            pytest.approx(weights, rel=1e-4) if variant.kind.is_key else None,
            pytest.approx(outputs, rel=1e-4),
        )
    for token in (0, 70, 200):
        readers = [weights for (query, _), (weights, _) in zip(places, exact, strict=True) if query // 64 > token // 64]
        mean = sum(float(weights[token]) for weights in readers) / len(readers)
        assert float(study.received[token]) == pytest.approx(mean, rel=1e-4)
    assert float(study.received[NUM_TOKENS - 1]) == 0


def test_a_large_channel_of_k_wants_a_scale_of_its_own() -> None:
    """A token's step grows with the offset, to 50 / 15 here; a channel's does not, and is about 5 / 15."""
    tensors = layer_tensors(offset=50.0)
    errors = study_attention(tensors).errors
    of_channel, of_token = (errors[Variant(Kind.K_BEFORE_ROPE, axis, 4)] for axis in Axis)
    assert of_channel.numbers < of_token.numbers / 5 and of_channel.outputs < of_token.outputs / 5
    found = Distribution.of(tensors, Kind.K_BEFORE_ROPE)
    assert found.num_outliers == 1 and found.channels.is_outlier[1, 3] and found.layer == 3


def test_sinks_are_the_tokens_with_planted_peaks() -> None:
    generator = torch.Generator().manual_seed(2)
    peaks = []
    for layer in range(5):
        hidden = torch.randn(300, 32, generator=generator)
        if layer in (1, 2, 4):
            hidden[40, 7] = -500.0 - layer
        if layer == 2:
            hidden[299, 9] = 90.0
        peaks.append(ResidualPeaks.of(hidden))
    first, second = find_sinks(peaks)
    typical = sorted(peaks[4].magnitude.tolist())[149]
    assert (first.position, first.layers, first.layer, first.channel) == (40, (1, 2, 4), 1, 7)
    assert (first.magnitude, first.ratio) == (504.0, pytest.approx(504 / typical, rel=1e-5))
    assert (second.position, second.layers, second.channel, second.magnitude) == (299, (2,), 9, 90.0)


def test_no_peaks_no_sinks() -> None:
    assert find_sinks([ResidualPeaks.of(torch.zeros(9, 4)), ResidualPeaks.of(torch.ones(9, 4))]) == ()
