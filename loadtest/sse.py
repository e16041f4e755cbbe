"""Server-sent events from lines of bytes, as the WHATWG specification of event streams reads them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator


def data_of_events(lines: Iterable[bytes]) -> Iterator[str]:
    """The `data` of each event, as soon as its closing blank line has been read.

    Comments, other fields and events without data are skipped; several data lines of one event are joined by
    newlines. What the end of the stream cuts off is dropped, as the specification asks.

    Args:
        lines: lines with or without their line end, LF or CR LF.
    """
    data: list[str] = []
    first = True
    for raw in lines:
        line = raw.rstrip(b"\r\n").decode("utf-8", errors="replace")
        if first:
            line = line.removeprefix("\ufeff")
            first = False
        if not line:
            if data:
                yield "\n".join(data)
            data = []
            continue
        field, _, value = line.partition(":")
        if field == "data":
            data.append(value.removeprefix(" "))
