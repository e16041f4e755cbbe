"""From single streams to one row per tier: percentiles, promise kept or not, and the table of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from loadtest.stream import StreamTimes
from loadtest.tiers import Promise

Outcome = Literal["finished", "refused", "failed", "cut"]


@dataclass(frozen=True)
class Attempt:
    """One request and what became of it.

    Attributes:
        outcome: "refused" is a 429, which a server at capacity may answer; "cut" is one that was still
            running when the test ended, and counts nowhere.
        times: only of a finished one.
    """

    tier: str
    outcome: Outcome
    times: StreamTimes | None = None


@dataclass(frozen=True)
class TierSummary:
    """One tier's streams. Shares are in 0..1; None where there is nothing to take a share of.

    Attributes:
        first_tokens: seconds to the first token, sorted.
        rates: tokens per second of each stream, sorted.
        kept_rate: share of requests, failed and refused ones included, whose rate was the promised one.
        kept_first_token: the same of the time to the first token.
        tokens: completion tokens of finished streams.
        acceptance: accepted draft tokens of all that were verified or dropped.
    """

    promise: Promise
    finished: int
    refused: int
    failed: int
    cut: int
    tokens: int
    kept_rate: float | None
    kept_first_token: float | None
    acceptance: float | None
    first_tokens: tuple[float, ...] = field(repr=False)
    rates: tuple[float, ...] = field(repr=False)


def percentile(ordered: Sequence[float], share: float) -> float | None:
    """The smallest value that at least `share` (0..1) of all values do not exceed (nearest rank).

    Args:
        ordered: ascending values.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share must be between 0 and 1, not {share}")
    if not ordered:
        return None
    return ordered[max(1, math.ceil(share * len(ordered))) - 1]


def kept_rate(attempt: Attempt, promise: Promise) -> bool | None:
    """Whether the request got its promised rate; None if it cannot be said or nothing was promised.

    A refused or failed request did not get it. An answer of a single token has no rate.
    """
    if promise.rate is None or attempt.outcome == "cut":
        return None
    if attempt.times is None:
        return False
    return None if attempt.times.rate is None else attempt.times.rate >= promise.rate


def kept_first_token(attempt: Attempt, promise: Promise) -> bool | None:
    """Whether the first token came in the promised time; None as for `kept_rate`."""
    if promise.first_token is None or attempt.outcome == "cut":
        return None
    if attempt.times is None:
        return False
    seconds = attempt.times.first_token_seconds
    return None if seconds is None else seconds <= promise.first_token


def summarise(promise: Promise, attempts: Sequence[Attempt]) -> TierSummary:
    """The row of one tier; attempts of other tiers are left out."""
    mine = [attempt for attempt in attempts if attempt.tier == promise.tier]
    times = [attempt.times for attempt in mine if attempt.times is not None]
    counts = {
        outcome: sum(attempt.outcome == outcome for attempt in mine)
        for outcome in ("finished", "refused", "failed", "cut")
    }
    accepted, rejected = sum(t.accepted for t in times), sum(t.rejected for t in times)
    return TierSummary(
        promise=promise,
        **counts,
        tokens=sum(t.tokens for t in times),
        kept_rate=_share([kept_rate(attempt, promise) for attempt in mine]),
        kept_first_token=_share([kept_first_token(attempt, promise) for attempt in mine]),
        acceptance=accepted / (accepted + rejected) if accepted + rejected else None,
        first_tokens=tuple(sorted(t.first_token_seconds for t in times if t.first_token_seconds is not None)),
        rates=tuple(sorted(t.rate for t in times if t.rate is not None)),
    )


def table(summaries: Sequence[TierSummary], seconds: float) -> str:
    """The final table, for people. Tokens/s of a stream start at its first token; "slowest" is the 5th percentile.

    Args:
        seconds: how long the test ran, for the line of totals.
    """
    head = ("tier", "streams", "refused", "failed", "cut", "TTFT p50", "TTFT p95", "TTFT kept", "tok/s p50")
    head += ("slowest", "promised", "rate kept", "drafts acc.")
    rows = [head, *(_cells(summary) for summary in summaries)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    tokens = sum(summary.tokens for summary in summaries)
    finished = sum(summary.finished for summary in summaries)
    rate = tokens / seconds if seconds > 0 else 0.0
    lines.append(f"{finished} streams, {tokens} tokens of finished streams in {seconds:.0f} s: {rate:.1f} tokens/s")
    return "\n".join(lines)


def _cells(summary: TierSummary) -> tuple[str, ...]:
    promise = summary.promise
    return (
        promise.tier,
        str(summary.finished),
        str(summary.refused),
        str(summary.failed),
        str(summary.cut),
        _milliseconds(percentile(summary.first_tokens, 0.5)),
        _milliseconds(percentile(summary.first_tokens, 0.95)),
        _percent(summary.kept_first_token),
        _number(percentile(summary.rates, 0.5)),
        _number(percentile(summary.rates, 0.05)),
        "-" if promise.rate is None else f"{promise.rate:g}",
        _percent(summary.kept_rate),
        _percent(summary.acceptance),
    )


def _share(kept: Sequence[bool | None]) -> float | None:
    known = [one for one in kept if one is not None]
    return sum(known) / len(known) if known else None


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.0f} ms"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"
