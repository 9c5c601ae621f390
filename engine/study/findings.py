"""What an inspection comes to: one line of finding and one of advice for each question."""

from collections import Counter
from dataclasses import dataclass

from engine.study.axis_error import Axis, Variant
from engine.study.capture import PAGE_TOKENS
from engine.study.distribution import OUTLIER_RATIO, Kind
from engine.study.inspection import Inspection
from engine.study.sinks import SINK_RATIO

BITS = 4
CLEAR = 1.05  # errors that differ by less count as equal
MAX_NAMED_SINKS = 8


@dataclass(frozen=True, slots=True)
class Finding:
    question: str
    found: str
    advice: str


def findings(found: Inspection, *, has_k_bias: bool) -> tuple[Finding, ...]:
    """`has_k_bias`: whether the model adds a bias to K, by which the named recipes decide on its rotation."""
    return (
        _axis(found, Kind.K, Axis.CHANNEL),
        _axis(found, Kind.V, Axis.TOKEN),
        _k_rotation(found, has_k_bias),
        _v_rotation(found),
        _outliers(found),
        _sinks(found),
    )


def _axis(found: Inspection, kind: Kind, ours: Axis) -> Finding:
    """`ours`: the axis of the named recipes."""
    other = Axis.TOKEN if ours is Axis.CHANNEL else Axis.CHANNEL
    mine, theirs = (found.mean_output_error(Variant(kind, axis, BITS)) for axis in (ours, other))
    num_best = sum(
        study.errors[Variant(kind, ours, BITS)].outputs <= study.errors[Variant(kind, other, BITS)].outputs
        for study in found.attention
    )
    text = (
        f"output error {mine:.2%} per {ours.value}, {theirs:.2%} per {other.value}; per {ours.value} is no worse in "
        f"{num_best} of {found.num_layers} layers"
    )
    recipes = f"per {ours.value}, as int8 and int4 do"
    if theirs > CLEAR * mine:
        advice = recipes
    elif mine <= CLEAR * theirs:
        advice = f"it hardly matters; {recipes}"
    elif kind is Kind.V:
        advice = f"per {other.value} loses less, but not if V is rotated: see below"
        if found.mean_output_error(Variant(Kind.V_ROTATED, ours, BITS)) > CLEAR * theirs:
            advice = f"unusual: per {other.value} loses less even if V is rotated; give V more bits"
    else:
        advice = f"unusual: per {other.value} loses less; measure formats with quire eval"
    return Finding(f"axis of {kind.label}", text, advice)


def _k_rotation(found: Inspection, has_k_bias: bool) -> Finding:
    plain, rotated = (found.mean_output_error(Variant(kind, Axis.CHANNEL, BITS)) for kind in (Kind.K, Kind.K_ROTATED))
    text = f"K has {'a' if has_k_bias else 'no'} bias; output error {plain:.2%} plain, {rotated:.2%} rotated"
    if rotated > CLEAR * plain:
        advice = "do not rotate K" + ("; int4 does not" if has_k_bias else ": int4 does, so compare it with kivi4")
    elif plain > CLEAR * rotated:
        advice = "rotate K" + ("; quire calibrate can, int4 does not" if has_k_bias else ", as int4 does")
    else:
        advice = "rotating K changes little"
    return Finding("rotation of K", text, advice)


def _v_rotation(found: Inspection) -> Finding:
    plain, rotated = (found.mean_output_error(Variant(kind, Axis.TOKEN, BITS)) for kind in (Kind.V, Kind.V_ROTATED))
    text = f"output error {plain:.2%} plain, {rotated:.2%} rotated"
    if rotated > CLEAR * plain:
        advice = "V loses by rotation here: compare int4 with kivi4"
    else:
        advice = "rotate V, as int4 does" if plain > CLEAR * rotated else "rotating V changes little"
    return Finding("rotation of V", text, advice)


def _outliers(found: Inspection) -> Finding:
    parts, num = [], {}
    for kind in (Kind.K, Kind.V):
        items = [item for item in found.distributions if item.kind is kind]
        num[kind] = sum(item.num_outliers for item in items) / len(items)
        num_channels = items[0].channels.mean.numel()
        energy = sum(item.top_energy for item in items) / len(items)
        parts.append(f"{kind.label} {num[kind]:.1f} of {num_channels} a layer, top 1 % have {energy:.0%} of the energy")
    text = f"mean magnitude {OUTLIER_RATIO:g} x the median: " + "; ".join(parts)
    if num[Kind.K] < 1 and num[Kind.V] < 1:
        advice = "hardly any: no channel needs a scale of its own"
    elif num[Kind.K] >= num[Kind.V]:
        advice = "a scale for each channel of K keeps them from the others"
    else:
        advice = "V has them too: rotate V, or use groups of 32 channels"
    return Finding("outlier channels", text, advice)


def _sinks(found: Inspection) -> Finding:
    if not found.sinks:
        text = f"no token's residual peak reaches {SINK_RATIO:g} x the median token's"
        return Finding("sinks", text, "none to protect in this text; --sink-pages 1 costs little")
    places = [sink.position for sink in found.sinks]
    shown = ", ".join(str(place) for place in places[:MAX_NAMED_SINKS]) + (
        ", ..." if len(places) > MAX_NAMED_SINKS else ""
    )
    channels = Counter(sink.channel for sink in found.sinks)
    text = (
        f"{len(places)} (tokens {shown}), from behind layer {min(sink.layer for sink in found.sinks)}, in "
        f"{'channel' if len(channels) == 1 else 'channels'} {', '.join(str(channel) for channel in sorted(channels))}"
    )
    outside = sum(place >= PAGE_TOKENS for place in places)
    if outside == 0:
        return Finding("sinks", text, "all in the first page, which --sink-pages 1 keeps in 16 bit")
    return Finding("sinks", text, f"{outside} behind the first page: quire calibrate can mark such tokens")
