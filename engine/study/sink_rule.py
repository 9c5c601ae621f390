"""KVSink's rule for a model (arXiv 2508.04257): which channel of the residual stream, behind which layer, tells sinks.

The paper takes the k largest tokens of a prompt; that looks ahead. Here a threshold between sinks and others, found
once on a text, decides for each token alone.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.study.sinks import SINK_RATIO, ResidualPeaks
from kernels.format.recipe import SinkRule

ORDINARY_RATIO = 2.0
KEPT_SHARE = 0.9
MOST_ROWS = 4


@dataclass(frozen=True, slots=True)
class SinkFinding:
    """`layers`: those whose input has marked tokens still apart from others. Of all tokens looked at, `num_marked` are
    marked, `num_outside` of them behind the sink pages; `num_rows` rows a page hold nine tenths of those."""

    rule: SinkRule
    layers: tuple[int, ...]
    num_tokens: int
    num_marked: int
    num_outside: int
    num_rows: int


def find_sink_rule(windows: Sequence[Sequence[ResidualPeaks]], page_tokens: int, sink_pages: int) -> SinkFinding | None:
    """From the peaks behind each layer of each window; None where no token stands out."""
    layers = [
        ResidualPeaks(
            torch.cat([window[layer].magnitude for window in windows]),
            torch.cat([window[layer].channel for window in windows]),
        )
        for layer in range(len(windows[0]))
    ]
    emergence = next((n for n, peaks in enumerate(layers) if (peaks.ratio >= SINK_RATIO).any()), None)
    if emergence is None or emergence == len(layers) - 1:
        return None
    peaks = layers[emergence]
    channels = tuple(sorted(set(peaks.channel[peaks.ratio >= SINK_RATIO].tolist())))
    threshold = _threshold(peaks)
    is_marked = (peaks.magnitude > threshold) & torch.isin(peaks.channel, torch.tensor(channels))
    persistent = [
        n + 1 for n in range(emergence, len(layers) - 1) if layers[n].ratio[is_marked].median() >= ORDINARY_RATIO
    ]
    by_window = is_marked.view(len(windows), -1)
    counts = by_window[:, page_tokens * sink_pages :].unflatten(1, (-1, page_tokens)).sum(-1).flatten()
    return SinkFinding(
        SinkRule(emergence, channels, threshold),
        tuple(persistent),
        num_tokens=len(is_marked),
        num_marked=int(is_marked.sum()),
        num_outside=int(counts.sum()),
        num_rows=_num_rows(counts),
    )


def _threshold(peaks: ResidualPeaks) -> float:
    """The middle, in logarithms, of the widest gap between ordinary tokens and certain sinks."""
    typical = peaks.magnitude.median().item()
    low, high = ORDINARY_RATIO * typical, SINK_RATIO * typical
    between = sorted(value for value in peaks.magnitude.tolist() if low < value < high)
    edges = [low, *between, high]
    ratios = [after / before for before, after in zip(edges, edges[1:], strict=False)]
    place = max(range(len(ratios)), key=ratios.__getitem__)
    return math.sqrt(edges[place] * edges[place + 1])


def _num_rows(counts: Tensor) -> int:
    """The fewest rows a page that keep `KEPT_SHARE` of the marked tokens, `MOST_ROWS` at most."""
    total = int(counts.sum())
    for rows in range(MOST_ROWS):
        if int(counts.clamp(max=rows).sum()) >= KEPT_SHARE * total:
            return rows
    return MOST_ROWS
