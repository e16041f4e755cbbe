"""Generating over HTTP: both endpoints, streamed and whole, and what they count."""

from __future__ import annotations

from typing import Any

import httpx2
import openai
import pytest
from serving import CONTEXT, MODEL, app_of, chat, completion, events_of, listening
from tiny_llama_source import BURST, TinyLlamaSource

ENDPOINTS = [("/v1/chat/completions", chat), ("/v1/completions", completion)]


def text_of(events: list[Any]) -> str:
    """The text of all events of either endpoint's stream."""
    text = ""
    for event in events[:-1]:
        for choice in event["choices"]:
            text += choice["text"] if "text" in choice else choice["delta"].get("content", "")
    return text


@pytest.mark.parametrize(("path", "body"), ENDPOINTS)
@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1.0, "seed": 5}])
async def test_stream_and_whole_say_the_same(
    client: httpx2.AsyncClient, path: str, body: Any, sampling: dict[str, Any]
) -> None:
    whole = (await client.post(path, json=body(**sampling))).json()
    streamed = await client.post(path, json=body(**sampling, stream=True, stream_options={"include_usage": True}))
    assert streamed.headers["content-type"].startswith("text/event-stream")
    events = events_of(streamed.text)
    assert events[-1] == "[DONE]"
    choice = whole["choices"][0]
    assert text_of(events) == (choice["message"]["content"] if "message" in choice else choice["text"]) != ""
    assert events[-3]["choices"][0]["finish_reason"] == choice["finish_reason"] == "length"
    assert events[-2]["choices"] == [] and events[-2]["usage"] == whole["usage"]
    assert all(event["usage"] is None for event in events[:-2])
    assert {event["id"] for event in events[:-1]} == {streamed.headers["x-request-id"]}
    assert whole["id"] != events[0]["id"]


async def test_usage_adds_up(client: httpx2.AsyncClient, tokenizer: Any) -> None:
    body = completion(max_tokens=12, temperature=0)
    usage = (await client.post("/v1/completions", json=body)).json()["usage"]
    assert usage["prompt_tokens"] == len(tokenizer(body["prompt"])["input_ids"])
    assert usage["completion_tokens"] == 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 12
    assert usage["completion_tokens_details"] == {
        "accepted_prediction_tokens": 8,  # four bursts, each of two accepted drafts and one refused
        "rejected_prediction_tokens": 4,
        "reasoning_tokens": 0,
        "audio_tokens": 0,
    }


async def test_shape_of_a_chat_stream(client: httpx2.AsyncClient) -> None:
    events = events_of((await client.post("/v1/chat/completions", json=chat(stream=True, temperature=0))).text)
    assert events[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all(event["object"] == "chat.completion.chunk" for event in events[:-1])
    assert all("usage" not in event for event in events[:-1])
    assert all(event["service_tier"] == "default" for event in events[:-1])
    assert events[0]["id"].startswith("chatcmpl-")
    assert len(events) <= 1 + 12 // BURST + 1  # tokens that came together went out together


async def test_prompts_reach_the_source_as_ids(
    client: httpx2.AsyncClient, source: TinyLlamaSource, tokenizer: Any
) -> None:
    parts = [{"type": "text", "text": "Hi"}, {"type": "text", "text": "there"}]
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": parts}]
    await client.post("/v1/chat/completions", json=chat(messages=messages, max_tokens=1))
    expected = "<|im_start|>system\nBe short.<|im_end|>\n<|im_start|>user\nHi\nthere<|im_end|>\n"
    assert tokenizer.decode(source.requests[-1].prompt) == expected + "<|im_start|>assistant\n"
    await client.post("/v1/completions", json=completion(prompt=[5, 6, 7], max_tokens=1))
    assert source.requests[-1].prompt == (5, 6, 7)


async def test_parameters_reach_the_source(client: httpx2.AsyncClient, source: TinyLlamaSource) -> None:
    fields = {"top_p": 0.5, "top_k": 7, "seed": 3, "stop": "zzz", "ignore_eos": True, "temperature": 0.25}
    reply = await client.post(
        "/v1/completions", json=completion(**fields, service_tier="flex", speculation=False, user="someone")
    )
    assert reply.json()["service_tier"] == "flex"
    request = source.requests[-1]
    assert (request.tier, request.speculation, request.request_id) == ("flex", False, reply.json()["id"])
    params = request.params
    assert (params.top_p, params.top_k, params.seed, params.stop) == (0.5, 7, 3, ("zzz",))
    assert (params.ignore_eos, params.temperature, params.max_tokens) == (True, 0.25, 12)


async def test_default_lengths(client: httpx2.AsyncClient, source: TinyLlamaSource) -> None:
    await client.post("/v1/completions", json={"model": MODEL, "prompt": "a"})
    assert source.requests[-1].params.max_tokens == 16
    whole = await client.post("/v1/chat/completions", json=chat(max_tokens=None, temperature=0))
    request = source.requests[-1]
    assert request.params.max_tokens == CONTEXT - len(request.prompt)
    assert whole.json()["usage"]["total_tokens"] <= CONTEXT
    await client.post("/v1/chat/completions", json=chat(max_tokens=None, max_completion_tokens=2))
    assert source.requests[-1].params.max_tokens == 2


async def test_stop_text_is_cut_and_never_shown(client: httpx2.AsyncClient) -> None:
    free = completion(temperature=1.0, seed=11, max_tokens=24)
    text = (await client.post("/v1/completions", json=free)).json()["choices"][0]["text"]
    stop = text[len(text) // 2 : len(text) // 2 + 6]
    whole = (await client.post("/v1/completions", json=free | {"stop": [stop]})).json()["choices"][0]
    assert whole["finish_reason"] == "stop"
    assert whole["text"] == text[: text.index(stop)]
    events = events_of((await client.post("/v1/completions", json=free | {"stop": stop, "stream": True})).text)
    assert text_of(events) == whole["text"]


async def test_official_client(tokenizer: Any, source: TinyLlamaSource) -> None:
    async with (
        listening(app_of(tokenizer, source)) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none needed", max_retries=0) as client,
    ):
        assert [model.id async for model in await client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).owned_by == "dspark-serve"
        asked: dict[str, Any] = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Hi"}],
            "max_completion_tokens": 9,
            "temperature": 0,
            "service_tier": "priority",
            "extra_body": {"speculation": True},
        }
        whole = await client.chat.completions.create(**asked)
        stream = await client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})
        text, usage = "", None
        async for event in stream:
            usage = event.usage or usage
            text += "".join(choice.delta.content or "" for choice in event.choices)
        assert text == whole.choices[0].message.content
        assert usage == whole.usage and usage.completion_tokens_details.accepted_prediction_tokens == 6
        assert whole.service_tier == "priority"
        plain = await client.completions.create(model=MODEL, prompt="Hi", max_tokens=4, temperature=0)
        pieces = await client.completions.create(model=MODEL, prompt="Hi", max_tokens=4, temperature=0, stream=True)
        assert "".join([event.choices[0].text async for event in pieces]) == plain.choices[0].text
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(**asked, logprobs=True)
        assert refused.value.param == "logprobs"
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="other", prompt="Hi")
        assert missing.value.code == "model_not_found"
