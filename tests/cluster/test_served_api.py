"""The whole system over HTTP: streams come from a verifier and a drafter in two processes."""

from __future__ import annotations

import threading
import time
import urllib.request

import pytest
from openai import BadRequestError, OpenAI
from running_app import RunningApp

GREEDY = {"temperature": 0.0, "max_tokens": 40}
QUESTION = [{"role": "user", "content": "List the first ten even numbers."}]


@pytest.fixture
def client(running_app: RunningApp) -> OpenAI:
    return OpenAI(base_url=f"{running_app.url}/v1", api_key="not-needed", max_retries=0)


def text_of(client: OpenAI, model: str, **extra: object) -> str:
    reply = client.chat.completions.create(model=model, messages=QUESTION, **{**GREEDY, **extra})
    return reply.choices[0].message.content or ""


def test_streamed_and_whole_answers_agree_and_are_drafted(running_app: RunningApp, client: OpenAI) -> None:
    before = running_app.verifier_state()
    whole = client.chat.completions.create(model=running_app.model, messages=QUESTION, **GREEDY)
    parts, usage = [], None
    stream = client.chat.completions.create(
        model=running_app.model,
        messages=QUESTION,
        stream=True,
        stream_options={"include_usage": True},
        **GREEDY,
    )
    for chunk in stream:
        parts += [choice.delta.content or "" for choice in chunk.choices]
        usage = chunk.usage or usage
    assert "".join(parts) == whole.choices[0].message.content
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens > 0
    after = running_app.verifier_state()
    assert after["drafter"] is not None
    assert after["rounds"] > before["rounds"], "no block was drafted and resolved"
    details = whole.usage.completion_tokens_details
    assert details is not None
    assert (details.accepted_prediction_tokens or 0) + (details.rejected_prediction_tokens or 0) > 0


def test_speculation_changes_no_token(running_app: RunningApp, client: OpenAI) -> None:
    drafted = text_of(client, running_app.model)
    plain = text_of(client, running_app.model, extra_body={"speculation": False})
    assert drafted == plain


def test_a_seed_gives_the_same_text_whatever_else_is_served(running_app: RunningApp, client: OpenAI) -> None:
    def seeded() -> str:
        return text_of(client, running_app.model, temperature=1.0, seed=11)

    alone = seeded()
    others = [
        threading.Thread(target=text_of, args=(client, running_app.model), kwargs={"temperature": 1.0})
        for _ in range(4)
    ]
    for thread in others:
        thread.start()
    crowded = seeded()
    for thread in others:
        thread.join()
    assert alone == crowded


def test_every_tier_is_served_and_an_unknown_one_is_refused_by_name(running_app: RunningApp, client: OpenAI) -> None:
    for tier in ("priority", "default", "flex"):
        assert text_of(client, running_app.model, extra_body={"service_tier": tier}, max_tokens=4)
    with pytest.raises(BadRequestError) as refused:
        text_of(client, running_app.model, extra_body={"service_tier": "gold"})
    assert refused.value.body["param"] == "service_tier"  # type: ignore[index]


def test_a_client_that_goes_away_frees_its_memory(running_app: RunningApp, client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model=running_app.model, messages=QUESTION, stream=True, temperature=1.0, max_tokens=1500, seed=3
    )
    next(iter(stream))
    state = running_app.verifier_state()
    assert state["free_pages"] < state["pages"]
    steps = state["steps"]
    stream.close()
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        state = running_app.verifier_state()
        if state["free_pages"] == state["pages"]:
            break
        time.sleep(0.05)
    assert state["free_pages"] == state["pages"]
    # It would have had more than a thousand steps to go.
    assert state["steps"] - steps < 700


def test_metrics_show_drafting(running_app: RunningApp, client: OpenAI) -> None:
    text_of(client, running_app.model)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        with urllib.request.urlopen(f"{running_app.url}/metrics", timeout=10) as reply:
            text = reply.read().decode()
        values = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if "{" in line}
        if values.get("vllm:spec_decode_num_drafts_total", 0.0) > 0:
            break
        time.sleep(0.5)
    assert values["vllm:spec_decode_num_drafts_total"] > 0
    assert values["dspark:verifiers"] == 1
    assert values["dspark:verifiers_unprofiled"] == 0
    assert values["vllm:generation_tokens_total"] > 0
