"""What the recordings of a level say in numbers."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from server.bench.load import Level, Load
from server.bench.recording import Recording, Unit

MS = 1000.0


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The `percent`-th percentile, linear between the two nearest order statistics; None of nothing.

    With n sorted values it is the one at position (n - 1) * percent / 100, counted from 0: type 7 of Hyndman and Fan,
    Sample Quantiles in Statistical Packages (1996).
    """
    if not values:
        return None
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """In milliseconds; None where nothing was measured."""

    p50: float | None
    p90: float | None
    p99: float | None


def percentiles(seconds: Sequence[float]) -> Percentiles:
    return Percentiles(*(percentile([value * MS for value in seconds], percent) for percent in (50, 90, 99)))


@dataclass(frozen=True, slots=True)
class Summary:
    """A level in numbers. Latencies are of requests that were done; rates are explained in `summarize`.

    `failures` counts requests by reason; `is_output_counted` False: the server sends no usage and chunks were counted
    as tokens; `client_share`: CPU time of this process over the time of the level, 1 is a whole core.
    """

    load: Load
    num_requests: int
    num_done: int
    num_failed: int
    num_abandoned: int
    failures: dict[str, int]
    first_failure: str | None
    seconds: float
    time_to_first_token: Percentiles
    interval: Percentiles
    interval_unit: Unit
    end_to_end: Percentiles
    output_tokens_per_second: float | None
    total_tokens_per_second: float | None
    is_output_counted: bool
    mean_prompt_tokens: float | None
    mean_output_tokens: float | None
    cached_share: float | None
    client_share: float


def unit_of(levels: Sequence[Level]) -> Unit:
    """The finest unit that intervals of all levels can be told in."""
    done = [recording for level in levels for recording in level.recordings if recording.is_done]
    return Unit.TOKEN if all(recording.tokens_per_chunk is not None for recording in done) else Unit.CHUNK


def summarize(level: Level, unit: Unit) -> Summary:
    """Rates are tokens over the time from the first send to the last byte of the level.

    They count requests that were done, and of abandoned ones what had come until then: their output, and their prompt
    where output had begun. What failed counts for nothing.
    """
    recordings = level.recordings
    done = [recording for recording in recordings if recording.is_done]
    failed = [recording.failure for recording in recordings if recording.failure]
    counted = [recording for recording in recordings if recording.failure is None and recording.chunk_times]
    output = sum(_num_output_tokens(recording) for recording in counted)
    prompt = _sum([recording.num_prompt_tokens for recording in counted])
    seconds = _seconds(recordings)
    return Summary(
        load=level.load,
        num_requests=level.num_requests,
        num_done=len(done),
        num_failed=len(failed),
        num_abandoned=len(recordings) - len(done) - len(failed),
        failures=dict(Counter(failure.reason for failure in failed).most_common()),
        first_failure=str(failed[0]) if failed else None,
        seconds=seconds,
        time_to_first_token=percentiles([recording.chunk_times[0] - recording.sent for recording in done]),
        interval=percentiles([gap for recording in done for gap in recording.intervals(unit)]),
        interval_unit=unit,
        end_to_end=percentiles([recording.last - recording.sent for recording in done]),
        output_tokens_per_second=output / seconds if seconds and counted else None,
        total_tokens_per_second=(output + prompt) / seconds if seconds and counted and prompt is not None else None,
        is_output_counted=all(recording.num_output_tokens is not None for recording in done),
        mean_prompt_tokens=_mean([recording.num_prompt_tokens for recording in done]),
        mean_output_tokens=_mean([recording.num_output_tokens for recording in done]),
        cached_share=_cached_share(done),
        client_share=level.client_seconds / level.seconds if level.seconds else 0.0,
    )


def _num_output_tokens(recording: Recording) -> int:
    told = recording.num_output_tokens
    return len(recording.chunk_times) if told is None else told


def _seconds(recordings: Sequence[Recording]) -> float:
    if not recordings:
        return 0.0
    return max(recording.last for recording in recordings) - min(recording.sent for recording in recordings)


def _sum(values: Sequence[int | None]) -> int | None:
    """None if any is unknown."""
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None


def _mean(values: Sequence[int | None]) -> float | None:
    total = _sum(values)
    return total / len(values) if values and total is not None else None


def _cached_share(done: Sequence[Recording]) -> float | None:
    """Of all prompt tokens, those that were in a cache; None if the server does not say."""
    cached = _sum([recording.usage.num_cached_tokens if recording.usage else None for recording in done])
    prompt = _sum([recording.num_prompt_tokens for recording in done])
    return cached / prompt if prompt and cached is not None else None
