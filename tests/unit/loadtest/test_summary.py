"""Percentiles, kept promises and the table."""

from __future__ import annotations

import pytest

from loadtest.stream import StreamTimes
from loadtest.summary import Attempt, kept_first_token, kept_rate, percentile, summarise, table
from loadtest.tiers import Promise

PROMISE = Promise("priority", rate=10.0, first_token=1.0, weight=1)
BEST_EFFORT = Promise("flex", rate=None, first_token=None, weight=1)


def finished(rate: float, wait: float = 0.5, tier: str = "priority") -> Attempt:
    """A stream of 21 tokens that takes `wait` seconds to start and then `rate` tokens a second."""
    times = StreamTimes(start=0.0, first=wait, last=wait + 20 / rate, tokens=21, accepted=9, rejected=3)
    return Attempt(tier, "finished", times)


def test_percentiles_are_values_that_occurred() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    assert [percentile(values, share) for share in (0.0, 0.05, 0.5, 0.51, 0.95, 1.0)] == [1, 1, 5, 6, 10, 10]
    assert percentile([], 0.5) is None
    with pytest.raises(ValueError, match="share"):
        percentile(values, 95)


def test_a_promise_is_kept_at_its_very_value() -> None:
    assert kept_rate(finished(10.0), PROMISE) is True
    assert kept_rate(finished(9.9), PROMISE) is False
    assert kept_first_token(finished(10.0, wait=1.0), PROMISE) is True
    assert kept_first_token(finished(10.0, wait=1.01), PROMISE) is False


def test_refused_and_failed_requests_break_it_and_cut_ones_do_not_count() -> None:
    for outcome, kept in (("refused", False), ("failed", False), ("cut", None)):
        attempt = Attempt("priority", outcome)
        assert kept_rate(attempt, PROMISE) is kept
        assert kept_first_token(attempt, PROMISE) is kept


def test_where_nothing_is_promised_nothing_is_kept_or_broken() -> None:
    assert kept_rate(finished(1.0), BEST_EFFORT) is None
    assert kept_rate(Attempt("flex", "refused"), BEST_EFFORT) is None


def test_a_row_counts_its_own_tier() -> None:
    attempts = [finished(20.0), finished(8.0), finished(12.0, wait=2.0), finished(1.0, tier="flex")]
    attempts += [Attempt("priority", "refused"), Attempt("priority", "cut"), Attempt("flex", "failed")]
    row = summarise(PROMISE, attempts)
    assert (row.finished, row.refused, row.failed, row.cut, row.tokens) == (3, 1, 0, 1, 63)
    assert row.kept_rate == 2 / 4
    assert row.kept_first_token == 2 / 4
    assert row.acceptance == 0.75
    assert row.rates == pytest.approx((8.0, 12.0, 20.0))
    assert row.first_tokens == (0.5, 0.5, 2.0)


def test_the_table_shows_every_tier_and_the_total() -> None:
    attempts = [finished(20.0), finished(8.0), finished(4.0, tier="flex")]
    lines = table([summarise(PROMISE, attempts), summarise(BEST_EFFORT, attempts)], seconds=6.3).splitlines()
    assert len(lines) == 4
    assert lines[1].split() == [
        *("priority", "2", "0", "0", "0", "500", "ms", "500", "ms", "100", "%"),
        *("8.0", "8.0", "10", "50", "%", "75", "%"),
    ]
    assert lines[2].split()[:5] == ["flex", "1", "0", "0", "0"]
    assert lines[2].split()[-5:] == ["4.0", "-", "-", "75", "%"]
    assert lines[3] == "3 streams, 63 tokens of finished streams in 6 s: 10.0 tokens/s"


def test_a_table_of_nothing_can_be_printed() -> None:
    assert "0 streams" in table([summarise(PROMISE, [])], seconds=0.0)
