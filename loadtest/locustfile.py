"""Users that stream chat completions, one class per tier, each always with one request in flight.

    locust -f loadtest/locustfile.py --headless --users 12 --run-time 1m --stop-timeout 30 --only-summary

It talks HTTP only. `OPENAI_API_KEY` is sent if it is set. Beside locust's own numbers it reports, per tier,
the time to the first token and tokens per second of each stream (rows "TTFT" in milliseconds and "tokens/s"),
and prints a table with the share of requests that kept their tier's promise. The exit status is 1 if a request
failed or none finished. One process only: the table is not gathered from distributed workers.
"""

from __future__ import annotations

import argparse
import logging
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import gevent
from locust import FastHttpUser, constant, events, task
from locust.env import Environment
from locust.exception import StopUser

from loadtest.options import add_options, promises_of
from loadtest.prompts import PROMPTS
from loadtest.stream import StreamError, StreamTimes, read_stream
from loadtest.summary import Attempt, summarise, table

CHAT = "/v1/chat/completions"
LONGEST_PAUSE_S = 10.0
PAUSE_AFTER_FAILURE_S = 1.0
logger = logging.getLogger("loadtest")


class ChatUser(FastHttpUser):
    """Streams one chat completion after another. Its class says which tier it asks for."""

    abstract = True
    tier = ""
    host = "http://127.0.0.1:8000"
    wait_time = constant(0)
    network_timeout = 120.0

    def on_start(self) -> None:
        options = self.environment.parsed_options
        key = os.environ.get("OPENAI_API_KEY")
        # A compressed body would arrive in blocks, and the times of its tokens with it.
        self.headers = {"Accept-Encoding": "identity"} | ({"Authorization": f"Bearer {key}"} if key else {})
        attempts: list[Attempt] = self.environment.attempts
        self.random = random.Random(f"{options.prompt_seed} {self.tier} {next(self.environment.user_numbers)}")
        self.attempts = attempts
        self.model = options.model or self._first_model()

    def _first_model(self) -> str:
        with self.client.get("/v1/models", headers=self.headers, catch_response=True) as response:
            try:
                response.raise_for_status()
                return str(response.json()["data"][0]["id"])
            except Exception as error:
                response.failure(error)
                logger.error("%s/v1/models names no model: %s", self.host, error)
        raise StopUser

    @task
    def stream_a_completion(self) -> None:
        options = self.environment.parsed_options
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": self.random.choice(PROMPTS)}],
            "max_tokens": options.max_tokens,
            "temperature": options.temperature,
            "service_tier": self.tier,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        attempt, pause = Attempt(self.tier, "cut"), 0.0
        try:
            attempt, pause = self._attempt(body)
        finally:  # also when the end of the test kills this greenlet
            self.attempts.append(attempt)
        if pause:
            gevent.sleep(pause)

    def _attempt(self, body: dict[str, Any]) -> tuple[Attempt, float]:
        """Send one request. Returns what became of it and how many seconds to wait before the next."""
        start = time.perf_counter()
        with self.client.post(
            CHAT, json=body, headers=self.headers, stream=True, catch_response=True, name=f"chat {self.tier}"
        ) as response:
            if response.status_code == 429:
                response.success()  # an answer that a full server may give; the table counts it
                return Attempt(self.tier, "refused"), _retry_after(response.headers)
            try:
                response.raise_for_status()
                if response.status_code != 200:
                    raise StreamError(f"status {response.status_code}: {(response.text or '')[:200]}")
                times = read_stream(_lines(response.stream), time.perf_counter, start)
            except Exception as error:
                response.failure(error)
                return Attempt(self.tier, "failed"), PAUSE_AFTER_FAILURE_S
            finally:
                if response.stream is not None:
                    response.stream.release()
            response.request_meta["response_time"] = 1000 * (time.perf_counter() - start)
            response.success()
        self._report(times)
        return Attempt(self.tier, "finished", times), 0.0

    def _report(self, times: StreamTimes) -> None:
        if times.first_token_seconds is not None:
            self._entry("TTFT", 1000 * times.first_token_seconds)
        if times.rate is not None:
            self._entry("tokens/s", times.rate)

    def _entry(self, kind: str, value: float) -> None:
        self.environment.events.request.fire(
            request_type=kind,
            name=self.tier,
            response_time=value,
            response_length=0,
            exception=None,
            context={},
        )


class PriorityUser(ChatUser):
    tier = "priority"


class DefaultUser(ChatUser):
    tier = "default"


class FlexUser(ChatUser):
    tier = "flex"


def _lines(stream: Any) -> Iterator[bytes]:
    """Lines of the body, each as soon as its end has arrived."""
    while line := stream.readline(b"\n"):
        yield line


def _retry_after(headers: Any) -> float:
    try:
        seconds = float(headers.get("retry-after"))
    except (TypeError, ValueError):
        seconds = PAUSE_AFTER_FAILURE_S
    return min(max(seconds, 0.1), LONGEST_PAUSE_S)


@events.init_command_line_parser.add_listener
def _options(parser: Any) -> None:
    add_options(parser)


@events.init.add_listener
def _prepare(environment: Environment, **_: Any) -> None:
    environment.promises = promises_of(environment.parsed_options or argparse.Namespace())
    environment.attempts = []
    environment.user_numbers = iter(range(10**9))
    weights = {promise.tier: promise.weight for promise in environment.promises}
    for user in environment.user_classes:
        user.weight = weights[user.tier]
    environment.user_classes = [user for user in environment.user_classes if user.weight]
    # "quit" comes after locust has printed its own statistics, so that the table is what one reads last.
    environment.events.quit.add_listener(lambda **_: print(f"\n{_table(environment)}", flush=True))


@events.test_start.add_listener
def _begin(environment: Environment, **_: Any) -> None:
    environment.began = time.perf_counter()


@events.quitting.add_listener
def _finish(environment: Environment, **_: Any) -> None:
    environment.ended = time.perf_counter()
    finished = any(attempt.outcome == "finished" for attempt in environment.attempts)
    environment.process_exit_code = 1 if environment.stats.total.num_failures or not finished else 0


def _table(environment: Environment) -> str:
    present = {user.tier for user in environment.user_classes}
    promises = [promise for promise in environment.promises if promise.tier in present]
    seconds = environment.ended - getattr(environment, "began", environment.ended)
    return table([summarise(promise, environment.attempts) for promise in promises], seconds)
