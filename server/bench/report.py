"""A run as a table and as JSON."""

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from server.bench.config import BenchConfig
from server.bench.recording import Unit
from server.bench.summary import Percentiles, Summary

VERSION = 1
# Above this share of a core the client may be what limits.
BUSY_CLIENT = 0.7


def show(config: BenchConfig, model: str, summaries: Sequence[Summary], console: Console) -> None:
    """Print the run for people."""
    console.print(f"{model} at {config.url}, {config.protocol}: {config.what}; seed {config.seed}\n")
    console.print(_table(config, summaries))
    for note in _notes(summaries):
        console.print(f"- {note}")


def _table(config: BenchConfig, summaries: Sequence[Summary]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    unit = summaries[0].interval_unit.value
    for header in (
        config.loads[0].name,
        "done",
        "failed",
        "aban-\ndoned",
        "first token, ms\np50 / p90 / p99",
        f"between {unit}s, ms\np50 / p90 / p99",
        "end to end, ms\np50 / p99",
        "output\ntokens/s",
        "total\ntokens/s",
        "prompt\ntokens",
        "cached",
    ):
        table.add_column(header, justify="right", vertical="bottom")
    for summary in summaries:
        table.add_row(
            f"{summary.load.amount:g}",
            str(summary.num_done),
            str(summary.num_failed),
            str(summary.num_abandoned),
            _latencies(*_all(summary.time_to_first_token)),
            _latencies(*_all(summary.interval)),
            _latencies(summary.end_to_end.p50, summary.end_to_end.p99),
            _number(summary.output_tokens_per_second),
            _number(summary.total_tokens_per_second),
            _number(summary.mean_prompt_tokens),
            "-" if summary.cached_share is None else f"{summary.cached_share:.0%}",
        )
    return table


def _all(found: Percentiles) -> tuple[float | None, float | None, float | None]:
    return found.p50, found.p90, found.p99


def _latencies(*values: float | None) -> str:
    return " / ".join("-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}" for value in values)


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _notes(summaries: Sequence[Summary]) -> list[str]:
    notes = []
    for summary in summaries:
        label = f"{summary.load.name} {summary.load.amount:g}"
        for reason, times in summary.failures.items():
            notes.append(f"{label}: {times} failed: {reason}")
        if summary.first_failure is not None and summary.first_failure not in summary.failures:
            notes.append(f"{label}: the first to fail: {summary.first_failure}")
        num_unsent = summary.num_requests - summary.num_done - summary.num_failed - summary.num_abandoned
        if num_unsent:
            notes.append(f"{label}: {num_unsent} of {summary.num_requests} requests were not sent")
        if not summary.is_output_counted:
            notes.append(f"{label}: the server sends no usage; chunks were counted as tokens")
        if summary.client_share > BUSY_CLIENT:
            notes.append(f"{label}: this client took {summary.client_share:.0%} of a core and may be what limits")
    if any(summary.interval_unit is Unit.CHUNK for summary in summaries):
        notes.append(
            "intervals are between chunks: the server does not say how many tokens each carries, and in some answers "
            "their number is not that of the tokens"
        )
    return notes


def as_json(config: BenchConfig, model: str, summaries: Sequence[Summary], *, is_complete: bool) -> dict[str, Any]:
    """The run as a JSON object: latencies in milliseconds, shares from 0 to 1, null where nothing was measured."""
    return {
        "version": VERSION,
        "url": config.url,
        "protocol": config.protocol,
        "model": model,
        "input_tokens": None if config.dataset else config.input_tokens,
        "output_tokens": config.output_tokens,
        "prefix_share": config.prefix_share,
        "dataset": config.dataset,
        "ignore_eos": config.client.ignore_eos,
        "seed": config.seed,
        "is_complete": is_complete,
        "levels": [_level(summary) for summary in summaries],
    }


def _level(summary: Summary) -> dict[str, Any]:
    return {
        summary.load.name: summary.load.amount,
        "num_requests": summary.num_requests,
        "num_done": summary.num_done,
        "num_failed": summary.num_failed,
        "num_abandoned": summary.num_abandoned,
        "failures": summary.failures,
        "first_failure": summary.first_failure,
        "seconds": summary.seconds,
        "time_to_first_token_ms": _percentiles(summary.time_to_first_token),
        "interval_ms": _percentiles(summary.interval),
        "interval_unit": summary.interval_unit.value,
        "end_to_end_ms": _percentiles(summary.end_to_end),
        "output_tokens_per_second": summary.output_tokens_per_second,
        "total_tokens_per_second": summary.total_tokens_per_second,
        "is_output_counted": summary.is_output_counted,
        "mean_prompt_tokens": summary.mean_prompt_tokens,
        "mean_output_tokens": summary.mean_output_tokens,
        "cached_share": summary.cached_share,
        "client_share": summary.client_share,
    }


def _percentiles(found: Percentiles) -> dict[str, float | None]:
    return {"p50": found.p50, "p90": found.p90, "p99": found.p99}
