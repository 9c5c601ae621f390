"""Percentiles against numpy, and the numbers of a level against arithmetic."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.bench.load import ClosedLoop, Level
from server.bench.recording import Recording, RequestFailed, TokenUsage, Unit
from server.bench.summary import percentile, summarize, unit_of


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentiles_are_numpys(values: list[float], percent: float) -> None:
    assert percentile(values, percent) == pytest.approx(np.percentile(values, percent), rel=1e-12, abs=1e-9)


def test_of_nothing_there_is_none() -> None:
    assert percentile([], 50) is None


def recording(sent: float, *times: float, usage: TokenUsage | None, planned: int | None = None) -> Recording:
    found = Recording(planned)
    found.send(sent)
    for time in times:
        found.add(time, None)
    found.last = times[-1] if times else sent
    found.usage = usage
    return found


def test_a_level() -> None:
    done = [
        recording(0, 1, 2, 4, usage=TokenUsage(10, 3, 4)),
        recording(0, 3, 5, usage=TokenUsage(20, 2, 8)),
    ]
    failed = recording(4, 5, usage=None)
    failed.failure = RequestFailed("HTTP 429", "later")
    abandoned = recording(4, 6, 10, usage=None, planned=15)
    abandoned.is_abandoned = True
    unanswered = recording(5, usage=None, planned=15)
    unanswered.is_abandoned = True
    level = Level(ClosedLoop(2), 9, [*done, failed, abandoned, unanswered], seconds=20, client_seconds=5)
    assert unit_of([level]) is Unit.TOKEN
    summary = summarize(level, Unit.TOKEN)
    assert (summary.num_done, summary.num_failed, summary.num_abandoned) == (2, 1, 2)
    assert (summary.failures, summary.first_failure) == ({"HTTP 429": 1}, "HTTP 429: later")
    assert summary.seconds == 10
    assert summary.time_to_first_token.p50 == 2000
    assert summary.interval.p50 == 2000  # of 1, 2 and 2 s
    assert summary.end_to_end.p50 == 4500
    # three, two, and two of the abandoned one; prompts of 10, 20 and 15
    assert summary.output_tokens_per_second == pytest.approx(7 / 10)
    assert summary.total_tokens_per_second == pytest.approx((7 + 45) / 10)
    assert (summary.mean_prompt_tokens, summary.mean_output_tokens, summary.cached_share) == (15, 2.5, 12 / 30)
    assert summary.client_share == 0.25


def test_without_usage_chunks_are_counted_and_said_to_be() -> None:
    summary = summarize(Level(ClosedLoop(1), 1, [recording(0, 1, 2, usage=None)]), Unit.CHUNK)
    assert summary.output_tokens_per_second == 1
    assert not summary.is_output_counted
    assert (summary.total_tokens_per_second, summary.mean_prompt_tokens, summary.cached_share) == (None, None, None)


def test_text_that_was_held_back_ends_no_interval() -> None:
    found = Recording(None)
    for time, num_tokens in ((1.0, 1), (2.0, 0), (4.0, 2)):
        found.add(time, num_tokens)
    assert found.intervals(Unit.TOKEN) == [1.5, 1.5]
    assert found.intervals(Unit.CHUNK) == [1, 2]


@given(st.floats(0.1, 10), st.lists(st.tuples(st.floats(0, 10), st.integers(0, 5)), min_size=1, max_size=20))
def test_intervals_add_up_to_the_time_between_first_and_last_token(
    first: float, chunks: list[tuple[float, int]]
) -> None:
    found = Recording(None)
    now = first
    found.add(now, 1)
    last = now
    for wait, num_tokens in chunks:
        now += wait
        found.add(now, num_tokens)
        last = now if num_tokens else last
    intervals = found.intervals(Unit.TOKEN)
    assert len(intervals) == sum(num_tokens for _, num_tokens in chunks)
    assert sum(intervals) == pytest.approx(last - first)
