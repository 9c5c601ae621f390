"""The figures of `quire inspect`. Each is a PNG of 1200 pixels width."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from engine.study.capture import PAGE_TOKENS
from engine.study.distribution import OUTLIER_RATIO, Kind
from engine.study.inspection import Inspection
from engine.study.sinks import SINK_RATIO

WIDTH = 8.0
DPI = 150
DRAWN = (Kind.K_BEFORE_ROPE, Kind.K, Kind.K_ROTATED, Kind.V)
FULL_COLOUR = 0.999  # the share of numbers that the colour scale spans: a single token must not turn the rest dark
MAX_SURFACE_TOKENS = 128
COLOURS = "viridis"
MAX_NAMED_SINKS = 6


def save_figures(found: Inspection, name: str, folder: Path) -> None:
    """`name`: the model's. Raises OSError if a file cannot be written."""
    for file, figure in (
        ("magnitudes.png", _magnitudes(found, name)),
        ("surfaces.png", _surfaces(found, name)),
        ("channels.png", _channels(found, name)),
        ("sinks.png", _sinks(found, name)),
    ):
        FigureCanvasAgg(figure)
        figure.savefig(folder / file, format="png")


def _figure(height: float) -> Figure:
    return Figure(figsize=(WIDTH, height), dpi=DPI, layout="constrained")


@dataclass(frozen=True, slots=True)
class _Picture:
    """Magnitudes of one head in units of their root mean square `rms`, so that layers can share a scale."""

    relative: Tensor
    rms: float

    @classmethod
    def of(cls, magnitudes: Tensor) -> "_Picture":
        rms = float(magnitudes.square().mean().sqrt())
        return cls(magnitudes / rms if rms else magnitudes, rms)


def _ceiling(pictures: Sequence[Tensor]) -> float:
    """What most of the numbers stay below."""
    numbers = torch.cat([picture.flatten() for picture in pictures])
    return float(numbers.kthvalue(max(1, round(FULL_COLOUR * len(numbers)))).values) or 1.0


def _magnitudes(found: Inspection, name: str) -> Figure:
    """KIVI's figure 2 (arXiv 2402.02750) as heat maps: a column for each kind, a row for each layer."""
    layers = found.layers
    figure = _figure(1.5 + 1.8 * len(layers))
    grid = figure.subplots(len(layers), len(DRAWN), sharex=True, sharey=True, squeeze=False)
    for column, kind in enumerate(DRAWN):
        pictures = [_Picture.of(found.pictures[layer, kind]) for layer in layers]
        scale = Normalize(0, _ceiling([picture.relative for picture in pictures]))
        for row, (layer, picture) in enumerate(zip(layers, pictures, strict=True)):
            axes = grid[row, column]
            num_tokens, head_dim = picture.relative.shape
            axes.imshow(
                picture.relative.T.numpy(),
                aspect="auto",
                origin="lower",
                cmap=COLOURS,
                norm=scale,
                interpolation="antialiased",
                extent=(0, num_tokens, -0.5, head_dim - 0.5),
            )
            if column == 0:
                axes.set_ylabel(f"layer {layer}\nchannel", fontsize=9)
            axes.set_title(f"|{kind.label}|, rms {picture.rms:.2g}", fontsize=9)
            axes.tick_params(labelsize=8)
            axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
        grid[-1, column].set_xlabel("token", fontsize=9)
        bar = figure.colorbar(
            ScalarMappable(scale, COLOURS), ax=grid[:, column], location="bottom", extend="max", aspect=18, pad=0.02
        )
        bar.set_label("multiple of rms", fontsize=8)
        bar.ax.tick_params(labelsize=8)
        bar.ax.xaxis.set_major_locator(MaxNLocator(4))
    figure.suptitle(
        f"{name}, KV head {found.head}: a channel that stands out is a horizontal line, a token a vertical one",
        fontsize=10,
    )
    return figure


def _surfaces(found: Inspection, name: str) -> Figure:
    """The same as surfaces, of the first tokens behind the sink page."""
    kinds = (Kind.K_BEFORE_ROPE, Kind.K, Kind.V)
    figure = _figure(0.5 + 2.35 * len(found.layers))
    figure.get_layout_engine().set(w_pad=0.02, h_pad=0.03, wspace=0, hspace=0)  # type: ignore[union-attr, call-arg]
    grid = figure.subplots(len(found.layers), len(kinds), squeeze=False, subplot_kw={"projection": "3d"})
    tokens = range(PAGE_TOKENS, min(PAGE_TOKENS + MAX_SURFACE_TOKENS, len(found.tokens)))
    for column, kind in enumerate(kinds):
        crops = [_Picture.of(found.pictures[layer, kind][tokens.start : tokens.stop]) for layer in found.layers]
        ceiling = max(float(crop.relative.max()) for crop in crops) or 1.0
        for row, (layer, crop) in enumerate(zip(found.layers, crops, strict=True)):
            _draw_surface(grid[row, column], crop.relative, tokens, ceiling)
            grid[row, column].set_title(f"|{kind.label}| / rms, layer {layer}", fontsize=9, y=0.97)
    figure.suptitle(f"{name}, KV head {found.head}: magnitudes behind the sink page", fontsize=10)
    return figure


def _draw_surface(axes: Any, heights: Tensor, tokens: range, ceiling: float) -> None:
    y, x = torch.meshgrid(torch.tensor(tokens), torch.arange(heights.shape[1]), indexing="ij")
    axes.plot_surface(
        x.numpy(),
        y.numpy(),
        heights.numpy(),
        cmap="turbo",
        norm=Normalize(0, 0.8 * ceiling),  # the colour of a facet is the mean of its corners
        rcount=len(tokens),
        ccount=heights.shape[1],
        linewidth=0,
        antialiased=False,
    )
    axes.set_zlim(0, ceiling)
    axes.view_init(elev=28, azim=-58)
    axes.set_box_aspect((1, 1, 0.6), zoom=0.94)
    axes.tick_params(labelsize=7, pad=-2)
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.set_major_locator(MaxNLocator(4, integer=axis is not axes.zaxis))
    axes.set_xlabel("channel", fontsize=8, labelpad=-4)
    axes.set_ylabel("token", fontsize=8, labelpad=-4)


def _channels(found: Inspection, name: str) -> Figure:
    """Magnitudes by channel, all heads side by side."""
    kinds = (Kind.K, Kind.V)
    figure = _figure(0.9 + 1.7 * len(found.layers))
    grid = figure.subplots(len(found.layers), len(kinds), sharex=True, squeeze=False)
    for column, kind in enumerate(kinds):
        for row, layer in enumerate(found.layers):
            axes = grid[row, column]
            stats = found.distribution(layer, kind).channels
            num_heads, head_dim = stats.mean.shape
            mean, largest = stats.mean.flatten(), stats.largest.flatten()
            places = torch.arange(len(mean))
            axes.fill_between(places, 0, largest, color="#c6dbef", linewidth=0, label="largest over tokens", step="mid")
            axes.step(places, mean, color="#08519c", linewidth=0.9, label="mean over tokens", where="mid")
            outliers = stats.is_outlier.flatten()
            axes.plot(places[outliers], mean[outliers], "o", color="#d94801", markersize=3.5, label="outlier channel")
            for head in range(1, num_heads):
                axes.axvline(head * head_dim - 0.5, color="grey", linewidth=0.6, linestyle=":")
            count = _plural(int(outliers.sum()), "outlier channel")
            axes.set_title(f"|{kind.label}|, layer {layer}: {count}", fontsize=9)
            axes.set_ylim(0, None)
            axes.set_xlim(-0.5, len(mean) - 0.5)
            axes.tick_params(labelsize=8)
            axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
            if column == 0:
                axes.set_ylabel("magnitude", fontsize=9)
        grid[-1, column].set_xlabel("channel, KV heads side by side", fontsize=9)
    handles, labels = grid[0, 0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=9, frameon=False)
    figure.suptitle(
        f"{name}: magnitudes by channel (outlier: mean at least {OUTLIER_RATIO:g} x the median)", fontsize=10
    )
    return figure


def _sinks(found: Inspection, name: str) -> Figure:
    """Where the peaks of sinks emerge, and what attention makes of them."""
    figure = _figure(9.5)
    peaks, *others = figure.subplots(4, 1, sharex=True, height_ratios=(1.3, 1, 1, 1))
    magnitudes = torch.stack([layer.magnitude for layer in found.peaks])
    typical = magnitudes.median(1).values
    _draw_tokens(found, peaks, magnitudes)
    peaks.plot(typical, color="black", linewidth=1.5, label="median token")
    peaks.plot(SINK_RATIO * typical, color="black", linewidth=1, linestyle="--", label=f"{SINK_RATIO:g} x that")
    peaks.set_yscale("log")
    peaks.set_ylabel("largest |residual|\nbehind the layer", fontsize=9)
    for axes, letter, norms in (
        (others[0], "K", [layer.k for layer in found.norms]),
        (others[1], "V", [layer.v for layer in found.norms]),
    ):
        _draw_tokens(found, axes, torch.stack([norm / norm.median() for norm in norms]))
        axes.set_ylabel(f"norm of {letter} /\nmedian token's", fontsize=9)
        axes.set_ylim(0, None)
    _draw_tokens(found, others[2], torch.stack([layer.received for layer in found.attention]))
    others[2].set_ylabel("attention of\nlater pages", fontsize=9)
    others[2].set_ylim(0, None)
    others[2].set_xlabel("layer", fontsize=9)
    others[2].xaxis.set_major_locator(MaxNLocator(12, integer=True))
    handles, labels = peaks.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, fontsize=9, frameon=False)
    figure.suptitle(f"{name}: {_plural(len(found.sinks), 'sink')} in {len(found.tokens)} tokens", fontsize=10)
    return figure


def _draw_tokens(found: Inspection, axes: Axes, numbers: Tensor) -> None:
    """`numbers` [layers, tokens]: a line over layers for each of the strongest sinks, a band for all other tokens."""
    is_sink = torch.zeros(numbers.shape[1], dtype=torch.bool)
    is_sink[[sink.position for sink in found.sinks]] = True
    layers, rest = range(found.num_layers), numbers[:, ~is_sink]
    if rest.shape[1]:
        axes.fill_between(layers, rest.amin(1), rest.amax(1), color="#dddddd", linewidth=0, label="all other tokens")
    strongest = sorted(found.sinks, key=lambda sink: -sink.ratio)[:MAX_NAMED_SINKS]
    for sink in sorted(strongest, key=lambda sink: sink.position):
        line = numbers[:, sink.position]
        axes.plot(layers, line, marker=".", markersize=4, linewidth=1, label=f"token {sink.position}")
    axes.tick_params(labelsize=8)
    axes.grid(axis="y", alpha=0.3)


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
