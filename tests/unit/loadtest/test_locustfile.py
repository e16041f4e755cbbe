"""Locust itself, headless, against a server whose pace is known."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]
SERVER = Path(__file__).with_name("chat_server.py")


@contextmanager
def serving(mode: str) -> Iterator[str]:
    server = subprocess.Popen([sys.executable, str(SERVER), mode], stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        yield f"http://127.0.0.1:{int(server.stdout.readline())}"
    finally:
        server.kill()
        server.wait()


def load(host: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--only-summary"]
    command += ["--host", host, "--spawn-rate", "10", "--run-time", "2s", "--stop-timeout", "5", *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCUST_")}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90)


def row(run: subprocess.CompletedProcess[str], tier: str) -> list[str]:
    """The cells of a tier's row in the final table, which is the last thing printed."""
    table = run.stdout[run.stdout.rindex("tier  streams") :]
    return re.split(r"\s{2,}", re.search(rf"^ *({tier} .*)$", table, re.MULTILINE)[1])


def test_a_steady_server_keeps_its_promises() -> None:
    with serving("steady") as host:
        run = load(
            host, "--users", "4", "--promised-rate", "priority=0.1,default=1e9", "--promised-ttft", "priority=60"
        )
    assert run.returncode == 0, run.stdout + run.stderr
    _, streams, refused, failed, cut, *_, kept, accepted = row(run, "priority")
    assert int(streams) >= 1
    assert (refused, failed, cut, kept, accepted) == ("0", "0", "0", "100 %", "75 %")
    rate = float(row(run, "priority")[8])
    # A busy machine may stretch a stream, or deliver its pieces together: only what holds everywhere is tested.
    assert rate > 0
    first_token = float(row(run, "priority")[5].removesuffix(" ms"))
    assert first_token >= 50
    assert row(run, "default")[-2] == "0 %"
    assert row(run, "flex")[-2] == "-"
    assert re.search(r"^TTFT +priority ", run.stdout + run.stderr, re.MULTILINE)
    assert re.search(r"^tokens/s +priority ", run.stdout + run.stderr, re.MULTILINE)


def test_a_full_server_is_no_failure() -> None:
    with serving("full") as host:
        run = load(host, "--users", "2", "--tier", "priority=1,flex=1")
    assert run.returncode == 0, run.stdout + run.stderr
    _, streams, refused, failed, *_ = row(run, "flex")
    assert (streams, failed) == ("0", "0")
    assert 1 <= int(refused) <= 11, "it waits the 0.2 s that Retry-After asks for"
    assert "default" not in run.stdout[run.stdout.rindex("tier  streams") :]


def test_broken_streams_fail_the_run() -> None:
    with serving("breaks") as host:
        run = load(host, "--users", "1", "--tier", "priority=1")
    assert run.returncode == 1
    _, streams, _, failed, *_ = row(run, "priority")
    assert streams == "0" and int(failed) >= 1


def test_no_server_fails_the_run() -> None:
    run = load("http://127.0.0.1:9", "--users", "1", "--tier", "priority=1")
    assert run.returncode == 1
    assert "names no model" in run.stdout + run.stderr
