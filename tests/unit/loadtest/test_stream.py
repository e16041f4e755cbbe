"""The times of one stream, from lines and a clock that the test owns."""

from __future__ import annotations

import json
from itertools import count

import pytest

from loadtest.stream import StreamError, StreamTimes, read_stream


def chunk(delta: dict[str, str], **more: object) -> bytes:
    return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta}], **more}).encode()


USAGE = {
    "completion_tokens": 11,
    "completion_tokens_details": {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 2},
}
ROLE = chunk({"role": "assistant", "content": ""})
LAST = b"data: " + json.dumps({"choices": [], "usage": USAGE}).encode()
DONE = b"data: [DONE]"


def read(*events: bytes) -> StreamTimes:
    ticks = count(10.0, 0.5)
    lines = [line for event in events for line in (event, b"")]
    return read_stream(lines, lambda: next(ticks), start=9.0)


def test_times_are_taken_at_text_only() -> None:
    times = read(ROLE, chunk({"content": "a"}), chunk({"content": "b"}), chunk({"content": "c"}), chunk({}), LAST, DONE)
    assert times == StreamTimes(start=9.0, first=10.0, last=11.0, tokens=11, accepted=6, rejected=2)
    assert times.first_token_seconds == 1.0
    assert times.rate == 10.0  # 10 tokens after the first, in 1 s


def test_an_empty_or_single_piece_answer_has_no_rate() -> None:
    empty = read(ROLE, LAST, DONE)
    assert empty.first_token_seconds is None and empty.rate is None
    assert read(chunk({"content": "a"}), LAST, DONE).rate is None


def test_usage_may_lack_the_details() -> None:
    plain = b'data: {"choices": [], "usage": {"completion_tokens": 3, "completion_tokens_details": null}}'
    times = read(chunk({"content": "a"}, usage=None), plain, DONE)
    assert (times.tokens, times.accepted, times.rejected) == (3, 0, 0)


@pytest.mark.parametrize(
    ("events", "message"),
    [
        ((ROLE, LAST), r"without \[DONE\]"),
        ((ROLE, DONE), "no usage"),
        ((ROLE, b"data: {oops"), "not JSON"),
        ((ROLE, b"data: 7"), "no object"),
        ((ROLE, b'data: {"error": {"message": "out of luck"}}'), "out of luck"),
    ],
)
def test_a_broken_stream_is_an_error(events: tuple[bytes, ...], message: str) -> None:
    with pytest.raises(StreamError, match=message):
        read(*events)
