"""Server-sent events: what the format allows, and what the end of a stream cuts off."""

from __future__ import annotations

from loadtest.sse import data_of_events


def events(body: bytes) -> list[str]:
    return list(data_of_events(body.splitlines(keepends=True)))


def test_events_are_separated_by_blank_lines() -> None:
    assert events(b"data: one\n\ndata: two\n\n") == ["one", "two"]


def test_both_line_ends_and_an_optional_space() -> None:
    assert events(b"data:one\r\n\r\ndata:  two\n\n") == ["one", " two"]


def test_comments_other_fields_and_empty_events_are_skipped() -> None:
    assert events(b": ping\n\nevent: message\nid: 7\ndata: one\nretry: 10\n\n\n\n") == ["one"]


def test_several_data_lines_are_one_event() -> None:
    assert events(b"data: a\ndata: b\n\n") == ["a\nb"]


def test_an_event_that_is_cut_off_is_dropped() -> None:
    assert events(b"data: one\n\ndata: tw") == ["one"]


def test_a_byte_order_mark_is_skipped_and_text_is_utf8() -> None:
    assert events("\ufeffdata: héllo\n\n".encode()) == ["héllo"]


def test_an_event_comes_before_the_next_line_is_asked_for() -> None:
    asked = []

    def lines():
        for line in (b"data: one\n", b"\n", b"data: two\n", b"\n"):
            asked.append(line)
            yield line

    assert next(data_of_events(lines())) == "one"
    assert len(asked) == 2
