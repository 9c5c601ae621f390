"""An inspection as CSV files: channels.csv, layers.csv, sinks.csv. An empty cell: no such number."""

import csv
import json
import math
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path

from engine.study.axis_error import BITS, Axis, Variant
from engine.study.inspection import Inspection
from engine.tokenizer import Tokenizer

Cell = str | int | float | bool | None

CHANNELS = ("layer", "kind", "head", "channel", "mean_abs", "max_abs", "std", "kurtosis", "is_outlier")
LAYERS = ("layer", "kind", "kurtosis", "top_1_percent_energy", "num_outlier_channels")
ERRORS = ("numbers", "weights", "outputs")
SINKS = (
    "position",
    "token_id",
    "text",
    "emergence_layer",
    "layers",
    "channel",
    "magnitude",
    "times_median",
    "k_norm_times_median",
    "v_norm_times_median",
    "attention_received",
)


def save_tables(found: Inspection, tokenizer: Tokenizer, folder: Path) -> None:
    """Raises OSError if a file cannot be written."""
    errors = [f"per_{axis.value}_{bits}bit_{name}_error" for axis in Axis for bits in BITS for name in ERRORS]
    for file, header, rows in (
        ("channels.csv", CHANNELS, _channels(found)),
        ("layers.csv", (*LAYERS, *errors), _layers(found)),
        ("sinks.csv", SINKS, _sinks(found, tokenizer)),
    ):
        with (folder / file).open("w", newline="", encoding="utf-8") as stream:
            writer = csv.writer(stream, lineterminator="\n")
            writer.writerow(header)
            writer.writerows([_cell(cell) for cell in row] for row in rows)


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    return tokenizer.token_bytes(token_id).decode(errors="replace")


def spans(numbers: Iterable[int]) -> str:
    """Ascending numbers, as in `2-8 11`."""
    groups = groupby(enumerate(numbers), key=lambda item: item[1] - item[0])
    runs = [[number for _, number in group] for _, group in groups]
    return " ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _channels(found: Inspection) -> Iterator[tuple[Cell, ...]]:
    for item in found.distributions:
        stats = item.channels
        columns = (stats.mean, stats.largest, stats.deviation, stats.kurtosis, stats.is_outlier)
        for head, rows in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
            for channel, cells in enumerate(zip(*rows, strict=True)):
                yield item.layer, item.kind.value, head, channel, *cells


def _layers(found: Inspection) -> Iterator[tuple[Cell, ...]]:
    for item in found.distributions:
        errors = [found.error(item.layer, Variant(item.kind, axis, bits)) for axis in Axis for bits in BITS]
        cells = [getattr(error, name) for error in errors for name in ERRORS]
        yield item.layer, item.kind.value, item.kurtosis, item.top_energy, item.num_outliers, *cells


def _sinks(found: Inspection, tokenizer: Tokenizer) -> Iterator[tuple[Cell, ...]]:
    for sink in found.sinks:
        token_id = found.tokens[sink.position]
        seen = found.sink_attention(sink)
        attention = (None, None, None) if seen is None else (seen.k_norm, seen.v_norm, seen.received)
        yield (
            sink.position,
            token_id,
            json.dumps(token_text(tokenizer, token_id), ensure_ascii=False)[1:-1],  # a line break stays in its row
            sink.layer,
            spans(sink.layers),
            sink.channel,
            sink.magnitude,
            sink.ratio,
            *attention,
        )


def _cell(value: Cell) -> str:
    match value:
        case None:
            return ""
        case bool():
            return str(value).lower()
        case float():
            return "" if math.isnan(value) else f"{value:.6g}"
    return str(value)
