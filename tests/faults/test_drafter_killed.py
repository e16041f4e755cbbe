"""`kill -9` of the drafter under load: no stream breaks, no token differs, speculation comes back."""

from __future__ import annotations

import os
import signal
import threading
import time

from openai import OpenAI
from running_app import RunningApp

ENGINE = {"verify_length": 2}  # always drafted: what is tested is not whether drafting pays
STREAMS, TOKENS, BACK_WITHIN_S = 6, 160, 15.0


def test_streams_survive_their_drafter(running_app: RunningApp) -> None:
    client = OpenAI(base_url=f"{running_app.url}/v1", api_key="not-needed", max_retries=0)
    prompts = [f"Write a short story about a {animal}." for animal in ("fox", "bear", "crow", "hare", "toad", "pike")]

    def run(answers: list[str], number: int, speculation: bool) -> None:
        stream = client.chat.completions.create(
            model=running_app.model,
            messages=[{"role": "user", "content": prompts[number]}],
            stream=True,
            temperature=0.0,
            max_tokens=TOKENS,
            extra_body={"speculation": speculation, "ignore_eos": True},
        )
        parts = []
        for chunk in stream:
            parts += [choice.delta.content or "" for choice in chunk.choices]
            started.set()
        answers[number] = "".join(parts)

    def run_all(speculation: bool) -> tuple[list[str], list[threading.Thread]]:
        answers = [""] * STREAMS
        threads = [threading.Thread(target=run, args=(answers, i, speculation)) for i in range(STREAMS)]
        for thread in threads:
            thread.start()
        return answers, threads

    started = threading.Event()
    expected, threads = run_all(speculation=False)
    for thread in threads:
        thread.join()

    started.clear()
    answers, threads = run_all(speculation=True)
    assert started.wait(60)
    killed = running_app.drafter_pid()
    before = running_app.verifier_state()
    os.kill(killed, signal.SIGKILL)
    died = time.monotonic()
    for thread in threads:
        thread.join()
    assert answers == expected

    # A little load keeps rounds coming; a block resolved with another drafter ends the wait.
    while True:
        client.chat.completions.create(
            model=running_app.model,
            messages=[{"role": "user", "content": "Count to twenty."}],
            temperature=0.0,
            max_tokens=24,
        )
        state = running_app.verifier_state()
        if state["drafter"] not in (None, before["drafter"]) and state["rounds"] > before["rounds"]:
            break
        assert time.monotonic() - died < BACK_WITHIN_S, f"no speculation {BACK_WITHIN_S} s after the kill: {state}"
    assert running_app.drafter_pid() != killed
