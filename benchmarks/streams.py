"""Streams of a served system: a number of clients, each with one request in flight at a time."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from benchmarks.runs import Answer
from loadtest.sse import data_of_events
from loadtest.stream import StreamError, read_stream

TIMEOUT_S = 300.0  # without a byte
CHAT = "/v1/chat/completions"


def chat_body(model: str, prompt: str, tokens: int, speculation: bool) -> dict[str, Any]:
    """A greedy streamed request of exactly `tokens` tokens.

    Without `speculation` it is never drafted and no features are kept for it: the path of verify length 0.
    """
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "speculation": speculation,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def run_streams(url: str, bodies: Sequence[Mapping[str, Any]], streams: int) -> list[Answer]:
    """Answers of all `bodies` in their order, `streams` of them in flight at once until they run out.

    Raises:
        StreamError: a request was refused, or a stream broke.
        OSError: no connection, or nothing came for `TIMEOUT_S` seconds.
    """
    clients = min(streams, len(bodies))
    together = threading.Barrier(clients)

    def client(number: int) -> list[Answer]:
        together.wait()
        return [ask(url, body) for body in bodies[number::clients]]

    answers: list[Answer | None] = [None] * len(bodies)
    with ThreadPoolExecutor(clients, "client") as pool:
        for number, some in enumerate(pool.map(client, range(clients))):
            answers[number::clients] = some
    return [answer for answer in answers if answer is not None]


def ask(url: str, body: Mapping[str, Any]) -> Answer:
    """Send one request and read its stream.

    Raises:
        StreamError, OSError: as `run_streams`.
    """
    address = urlsplit(url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=TIMEOUT_S)
    lines: list[bytes] = []
    try:
        start = time.perf_counter()
        connection.request("POST", CHAT, json.dumps(body), {"content-type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise StreamError(f"status {response.status}: {response.read(500).decode(errors='replace')}")
        times = read_stream(_kept(iter(response.readline, b""), lines), time.perf_counter, start)
        end = time.perf_counter()
    finally:
        connection.close()
    return Answer(times, end, text_of(lines))


def text_of(lines: Iterable[bytes]) -> str:
    """The text of a stream that `read_stream` has read without complaint."""
    events = (json.loads(data) for data in data_of_events(lines) if data != "[DONE]")
    return "".join(
        choice.get("delta", {}).get("content") or "" for event in events for choice in event.get("choices", ())
    )


def _kept(lines: Iterator[bytes], kept: list[bytes]) -> Iterator[bytes]:
    """The lines as they come, kept for later: text is put together outside the time that is measured."""
    for line in lines:
        kept.append(line)
        yield line
