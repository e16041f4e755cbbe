"""Reads one streamed chat completion and takes its times."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from loadtest.sse import data_of_events


class StreamError(RuntimeError):
    """A stream that broke, reported an error, or did not say what it used."""


@dataclass(frozen=True)
class StreamTimes:
    """One complete stream. Times are readings of the caller's clock, in seconds.

    Attributes:
        start: the request was sent.
        first: the first text arrived; None if the answer was empty.
        last: the last text arrived; None if the answer was empty.
        tokens: completion tokens, from `usage`.
        accepted, rejected: draft tokens of either fate, from `usage`; 0 where the server does not say.
    """

    start: float
    first: float | None
    last: float | None
    tokens: int
    accepted: int = 0
    rejected: int = 0

    @property
    def first_token_seconds(self) -> float | None:
        """Seconds from sending the request to the first text."""
        return None if self.first is None else self.first - self.start

    @property
    def rate(self) -> float | None:
        """Tokens per second after the first text; None for an answer too short to have a rate.

        One token is counted as having arrived with the first text, whatever the server packed into it.
        """
        if self.first is None or self.last is None or self.tokens < 2 or self.last <= self.first:
            return None
        return (self.tokens - 1) / (self.last - self.first)


def read_stream(lines: Iterable[bytes], clock: Callable[[], float], start: float) -> StreamTimes:
    """Read a chat completion stream that was asked for with `stream_options.include_usage`.

    Args:
        lines: lines of the body, as they arrive.
        clock: seconds; read once for each piece of text.
        start: reading of the clock when the request was sent.

    Raises:
        StreamError: an error event, an event that is not JSON, an end without `[DONE]`, or no usage.
    """
    first: float | None = None
    last: float | None = None
    usage: dict[str, Any] | None = None
    for data in data_of_events(lines):
        if data == "[DONE]":
            break
        event = _parsed(data)
        if "error" in event:
            raise StreamError(f"the stream reported an error: {_message(event['error'])}")
        usage = event.get("usage") or usage
        if any((choice.get("delta") or {}).get("content") for choice in event.get("choices") or ()):
            last = clock()
            first = last if first is None else first
    else:
        raise StreamError("the stream ended without [DONE]")
    if usage is None or not isinstance(usage.get("completion_tokens"), int):
        raise StreamError("the stream carried no usage.completion_tokens")
    details = usage.get("completion_tokens_details") or {}
    return StreamTimes(
        start=start,
        first=first,
        last=last,
        tokens=usage["completion_tokens"],
        accepted=details.get("accepted_prediction_tokens") or 0,
        rejected=details.get("rejected_prediction_tokens") or 0,
    )


def _parsed(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        raise StreamError(f"the stream carried an event that is not JSON: {data[:80]!r}") from None
    if not isinstance(event, dict):
        raise StreamError(f"the stream carried an event that is no object: {data[:80]!r}")
    return event


def _message(error: object) -> object:
    return error.get("message", error) if isinstance(error, dict) else error
