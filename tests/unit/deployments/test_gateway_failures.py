"""Clients that leave, sources that fail, queues that are full."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import httpx2
import openai
import pytest
from serving import CONTEXT, MODEL, app_of, chat, events_of, listening, until
from tiny_llama_source import TinyLlamaSource

from deployments.errors import OverloadedError, UnavailableError
from engine.request import GenerationRequest, RequestError, TokenChunk
from scheduler.tiers import DEFAULT_TIERS

CHAT = "/v1/chat/completions"


class BrokenSource:
    """The tiny source, which after some chunks raises an error, or ends in a given chunk, or just ends."""

    def __init__(self, inner: TinyLlamaSource, after: int, error: Exception | TokenChunk | None) -> None:
        self.inner, self.after, self.error = inner, after, error

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        seen = 0
        async for chunk in self.inner.stream(request):
            if seen == self.after:
                break
            seen += 1
            yield chunk
        if isinstance(self.error, Exception):
            raise self.error
        if self.error is not None:
            yield self.error


def broken_client(
    tokenizer: Any, source: TinyLlamaSource, after: int, error: Exception | TokenChunk | None
) -> httpx2.AsyncClient:
    app = app_of(tokenizer, BrokenSource(source, after, error))
    return httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://gateway")


FAILURES = [
    (OverloadedError(2.4), 429, "rate_limit_error"),
    (UnavailableError("no verifier"), 503, "service_unavailable_error"),
    (RequestError("top_k must be small", "top_k"), 400, "invalid_request_error"),
    (ValueError("a secret path"), 500, "server_error"),
    (TokenChunk("", finish_reason="error", error="the engine failed"), 500, "server_error"),
    (TokenChunk("", finish_reason="abort"), 503, "service_unavailable_error"),
    (None, 500, "server_error"),
]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("error", "status", "kind"), FAILURES)
async def test_failure_before_the_first_token(
    tokenizer: Any, source: TinyLlamaSource, error: Any, status: int, kind: str, stream: bool
) -> None:
    async with broken_client(tokenizer, source, 0, error) as client:
        reply = await client.post(CHAT, json=chat(stream=stream))
    assert reply.status_code == status and reply.json()["error"]["type"] == kind
    assert "secret" not in reply.text
    if status == 429:
        assert reply.headers["retry-after"] == "3"
    if status == 400:
        assert reply.json()["error"]["param"] == "top_k"


@pytest.mark.parametrize(("error", "status", "kind"), FAILURES)
async def test_failure_in_a_stream_is_its_last_event(
    tokenizer: Any, source: TinyLlamaSource, error: Any, status: int, kind: str
) -> None:
    async with broken_client(tokenizer, source, 2, error) as client:
        reply = await client.post(CHAT, json=chat(stream=True))
        whole = await client.post(CHAT, json=chat())
    events = events_of(reply.text)
    assert reply.status_code == 200
    assert events[-1]["error"]["type"] == kind and "secret" not in reply.text
    assert all("choices" in event for event in events[:-1]) and len(events) >= 2
    assert whole.status_code == status


async def test_official_client_sees_the_failure(tokenizer: Any, source: TinyLlamaSource) -> None:
    app = app_of(tokenizer, BrokenSource(source, 1, UnavailableError("the verifier went away")))
    async with (
        listening(app) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        stream = await client.chat.completions.create(
            model=MODEL, messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        with pytest.raises(openai.APIError, match="the verifier went away"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("spec_version", ["2.3", "2.4"])
@pytest.mark.parametrize("when", ["waiting", "running"])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_is_cancelled(tokenizer: Any, stream: bool, when: str, spec_version: str) -> None:
    source = TinyLlamaSource(tokenizer, step_seconds=0.05, first_step_seconds=30.0 if when == "waiting" else 0.0)
    app = app_of(tokenizer, source)

    async def with_spec_version(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope["asgi"]["spec_version"] = spec_version
        await app(scope, receive, send)

    async with listening(with_spec_version) as url, httpx2.AsyncClient(base_url=url) as client:
        body = chat(stream=stream, max_tokens=CONTEXT - 40, ignore_eos=True)
        asking = asyncio.create_task(client.post(CHAT, json=body))
        await until(lambda: source.open == 1 and (when == "waiting" or source.steps > 6))
        assert not source.cancelled
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: source.cancelled, seconds=2.0)
        assert source.open == 0 and source.cancelled == [source.requests[0].request_id]
        steps = source.steps
        metrics = (await client.get("/metrics")).text
        assert f'finished_reason="abort",model_name="{MODEL}",service_tier="default"}} 1.0' in metrics
        for gauge in ("running", "waiting"):
            name = f'vllm:num_requests_{gauge}{{model_name="{MODEL}",service_tier="default"}}'
            assert f"{name} 0.0" in metrics
        await asyncio.sleep(0.15)
        assert source.steps == steps


async def test_full_queue_of_a_tier(tokenizer: Any) -> None:
    tiers = tuple(tier.model_copy(update={"max_queued": 2}) for tier in DEFAULT_TIERS)
    source = TinyLlamaSource(tokenizer, first_step_seconds=0.5)
    app = app_of(tokenizer, source, tiers=tiers)
    async with httpx2.AsyncClient(
        transport=httpx2.ASGITransport(app), base_url="http://gateway", timeout=30.0
    ) as client:
        waiting = [asyncio.create_task(client.post(CHAT, json=chat())) for _ in range(2)]
        await until(lambda: source.open == 2)
        metrics = (await client.get("/metrics")).text
        assert f'waiting{{model_name="{MODEL}",service_tier="default"}} 2.0' in metrics
        refused = await client.post(CHAT, json=chat())
        assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
        assert "default" in refused.json()["error"]["message"]
        other = asyncio.create_task(client.post(CHAT, json=chat(service_tier="flex")))
        assert {reply.status_code for reply in await asyncio.gather(*waiting, other)} == {200}
        assert (await client.post(CHAT, json=chat())).status_code == 200


async def test_generation_goes_on_while_a_long_prompt_is_tokenized(tokenizer: Any, source: TinyLlamaSource) -> None:
    app = app_of(tokenizer, source)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://gateway") as client:
        long = asyncio.create_task(client.post("/v1/completions", json={"model": MODEL, "prompt": "a b " * 200_000}))
        await asyncio.sleep(0.1)  # the prompt is in the tokenizer's thread now
        assert (await client.get("/health")).status_code == 200
        assert not long.done()
        assert (await long).json()["error"]["code"] == "context_length_exceeded"
