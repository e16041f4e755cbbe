"""Everything that is not supported is refused by name, and values that change nothing are accepted."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from serving import CONTEXT, app_of, chat, completion
from tiny_llama_source import TinyLlamaSource

from deployments.openai_parameters import WITHOUT_EFFECT_IN_CHAT, WITHOUT_EFFECT_IN_COMPLETIONS

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"

REFUSED_BY_BOTH: list[tuple[str, Any]] = [
    ("presence_penalty", 0.5),
    ("frequency_penalty", -1),
    ("logit_bias", {"50": 1}),
    ("logprobs", True),
    ("logprobs", 2),
    ("min_p", 0.1),
    ("min_tokens", 3),
    ("repetition_penalty", 1.1),
    ("guided_json", {"type": "object"}),
    ("guided_regex", "a+"),
    ("structured_outputs", {"regex": "a+"}),
    ("response_format", {"type": "json_object"}),
    ("stop_token_ids", [2]),
    ("echo", True),
    ("echo", 0),
    ("best_of", 2),
    ("n", 2),
    ("n", 0),
    ("use_beam_search", True),
    ("prompt_logprobs", 0),
    ("truncate_prompt_tokens", 5),
    ("skip_special_tokens", False),
    ("priority", 3),
    ("not_a_parameter", 1),
    ("Temperature", 0),
    ("temperature", 2.5),
    ("temperature", -0.1),
    ("temperature", "0.5"),
    ("temperature", True),
    ("top_p", 0),
    ("top_p", 1.5),
    ("top_k", -2),
    ("top_k", 2**40),
    ("top_k", 1.5),
    ("max_tokens", 0),
    ("max_tokens", "5"),
    ("seed", 2**64),
    ("seed", 1.5),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["x"] * 17),
    ("stop", 5),
    ("stream", "yes"),
    ("stream", 1),
    ("stream_options", {"include_usage": True}),
    ("speculation", "no"),
    ("service_tier", "scale"),
    ("user", 5),
    ("model", 5),
    ("model", None),
]
REFUSED_BY_CHAT: list[tuple[str, Any]] = [
    ("top_logprobs", 2),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("functions", [{"name": "f"}]),
    ("reasoning_effort", "high"),
    ("modalities", ["text", "audio"]),
    ("store", True),
    ("metadata", {"a": "b"}),
    ("prompt", "Hi"),
    ("messages", None),
    ("messages", []),
    ("messages", "Hi"),
    ("max_completion_tokens", 3),  # and max_tokens is 12
    ("chat_template", "{{ messages }}"),
    ("add_special_tokens", True),
]
REFUSED_BY_COMPLETIONS: list[tuple[str, Any]] = [
    ("suffix", "end"),
    ("logprobs", 0),
    ("messages", []),
    ("max_completion_tokens", 3),
    ("prompt", None),
    ("prompt", ""),
    ("prompt", []),
    ("prompt", ["a", "b"]),
    ("prompt", ["a"]),
    ("prompt", [[1, 2]]),
    ("prompt", [1, True]),
    ("prompt", [1, 2.5]),
    ("prompt", [49152]),
    ("prompt", [-1]),
    ("add_special_tokens", False),
]


@pytest.mark.parametrize(
    ("path", "name", "value"),
    [(CHAT, *case) for case in REFUSED_BY_BOTH + REFUSED_BY_CHAT]
    + [(COMPLETIONS, *case) for case in REFUSED_BY_BOTH + REFUSED_BY_COMPLETIONS],
)
async def test_refused_by_name(
    client: httpx2.AsyncClient, source: TinyLlamaSource, path: str, name: str, value: Any
) -> None:
    body = chat() if path == CHAT else completion()
    reply = await client.post(path, json=body | {name: value})
    assert reply.status_code == 400, reply.text
    error = reply.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["param"].partition("[")[0] == name and name in error["message"]
    assert not source.requests


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": "developer", "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": None}, "messages[0].content"),
        ({"role": "user", "content": 5}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content"),
        ({"role": "user", "content": [{"type": "text", "text": "x", "more": 1}]}, "messages[0].content"),
        ({"role": "user", "content": "x", "name": "Ann"}, "messages[0].name"),
        ({"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}, "messages[0].tool_calls"),
    ],
)
async def test_messages_are_refused_by_place(client: httpx2.AsyncClient, fields: dict[str, Any], param: str) -> None:
    reply = await client.post(CHAT, json=chat(messages=[fields]))
    assert reply.status_code == 400 and reply.json()["error"]["param"] == param


async def test_stream_options_are_refused_by_place(client: httpx2.AsyncClient) -> None:
    for name, value in (("continuous_usage_stats", True), ("unknown", 1), ("echo", False)):
        reply = await client.post(CHAT, json=chat(stream=True, stream_options={name: value}))
        assert reply.status_code == 400
        assert reply.json()["error"]["param"] == f"stream_options.{name}"


@pytest.mark.parametrize(
    ("path", "body", "table"),
    [(CHAT, chat, WITHOUT_EFFECT_IN_CHAT), (COMPLETIONS, completion, WITHOUT_EFFECT_IN_COMPLETIONS)],
)
async def test_values_without_effect_are_accepted(
    client: httpx2.AsyncClient, path: str, body: Any, table: dict[str, tuple[Any, ...]]
) -> None:
    plain = (await client.post(path, json=body(temperature=0))).json()["choices"]
    defaults = {name: values[0] if values else None for name, values in table.items()}
    with_defaults = {"n": 1, "seed": None, "stop": None, "service_tier": "auto", "stream_options": None}
    reply = await client.post(path, json=body(temperature=0, **defaults, **with_defaults))
    assert reply.status_code == 200, reply.text
    assert reply.json()["choices"] == plain
    nulls = dict.fromkeys(table)
    assert (await client.post(path, json=body(temperature=0, **nulls))).json()["choices"] == plain


async def test_an_answer_can_be_sent_back(client: httpx2.AsyncClient) -> None:
    message = (await client.post(CHAT, json=chat(temperature=0))).json()["choices"][0]["message"]
    sent = [{"role": "user", "content": "Hi"}, message | {"tool_calls": [], "audio": None}]
    sent.append({"role": "user", "content": "More"})
    assert (await client.post(CHAT, json=chat(messages=sent))).status_code == 200


@pytest.mark.parametrize(
    ("content", "type_", "status"),
    [
        (b"{", "application/json", 400),
        (b"", "application/json", 400),
        (b"[]", "application/json", 400),
        (b'{"model": "\xff"}', "application/json", 400),
        (b'{"temperature": NaN}', "application/json", 400),
        (b'{"stream": true, "stream": false}', "application/json", 400),
        (b"[" * 100_000, "application/json", 400),
        (b'{"seed": ' + b"9" * 5000 + b"}", "application/json", 400),
        (b'{"model": "tiny-llama", "prompt": "\\ud800"}', "application/json", 400),
        (b'{"model": "tiny-llama", "prompt": "a", "temperature": 1e999}', "application/json", 400),
        (b"{}", "text/plain", 415),
        (b" " * 5000, "application/json", 413),
    ],
)
async def test_bodies_that_cannot_be_read(
    tokenizer: Any, source: TinyLlamaSource, content: bytes, type_: str, status: int
) -> None:
    limit = 200_000 if status == 400 else 4096
    transport = httpx2.ASGITransport(app_of(tokenizer, source, max_body_bytes=limit))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
        reply = await client.post(COMPLETIONS, content=content, headers={"content-type": type_})
    assert reply.status_code == status, reply.text
    assert reply.json()["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("text", [rb"\udc00", b"\xed\xa0\x80"])
async def test_half_a_surrogate_pair_is_no_text(client: httpx2.AsyncClient, text: bytes) -> None:
    content = b'{"model": "tiny-llama", "messages": [{"role": "user", "content": "%s"}]}' % text
    headers = {"content-type": "application/json"}
    reply = await client.post(CHAT, content=content, headers=headers)
    assert reply.status_code == 400 and reply.json()["error"]["code"] == "invalid_json"
    pair = content.replace(text, rb"\ud83d\ude00")
    assert (await client.post(CHAT, content=pair, headers=headers)).status_code == 200


async def test_unknown_model_and_path(client: httpx2.AsyncClient) -> None:
    for reply in (
        await client.post(CHAT, json=chat(model="gpt-x")),
        await client.get("/v1/models/gpt-x"),
    ):
        error = reply.json()["error"]
        assert reply.status_code == 404 and "gpt-x" in error["message"]
        assert (error["code"], error["param"]) == ("model_not_found", "model")
    assert (await client.get("/v1/nothing")).json()["error"]["type"] == "invalid_request_error"
    assert (await client.get(CHAT)).status_code == 405


@pytest.mark.parametrize(("path", "body", "param"), [(CHAT, chat, "messages"), (COMPLETIONS, completion, "prompt")])
async def test_prompt_longer_than_the_context(
    client: httpx2.AsyncClient, tokenizer: Any, path: str, body: Any, param: str
) -> None:
    text = "word " * (CONTEXT + 40)
    value = text if param == "prompt" else [{"role": "user", "content": text}]
    reply = await client.post(path, json=body(**{param: value}))
    error = reply.json()["error"]
    assert reply.status_code == 400
    assert (error["code"], error["param"]) == ("context_length_exceeded", param)
    tokens = (
        len(tokenizer(text)["input_ids"])
        if param == "prompt"
        else len(tokenizer.apply_chat_template(value, add_generation_prompt=True, return_dict=False))
    )
    assert str(CONTEXT) in error["message"] and str(tokens) in error["message"]


async def test_prompt_and_output_longer_than_the_context(client: httpx2.AsyncClient, source: TinyLlamaSource) -> None:
    full = [7] * (CONTEXT - 10)
    reply = await client.post(COMPLETIONS, json=completion(prompt=full, max_tokens=11))
    error = reply.json()["error"]
    assert reply.status_code == 400 and error["code"] == "context_length_exceeded"
    assert error["param"] == "max_tokens"
    for number in (CONTEXT, CONTEXT - 10, 11, CONTEXT + 1):
        assert str(number) in error["message"]
    fits = await client.post(COMPLETIONS, json=completion(prompt=full, max_tokens=10))
    assert fits.status_code == 200
    default = await client.post(COMPLETIONS, json=completion(prompt=full, max_tokens=None))
    assert default.status_code == 200 and source.requests[-1].params.max_tokens == 10
    assert (await client.post(COMPLETIONS, json=completion(prompt=[7] * CONTEXT))).status_code == 400


async def test_tokenizer_without_chat_template(target_path: Any, source: TinyLlamaSource) -> None:
    from transformers import AutoTokenizer

    plain = AutoTokenizer.from_pretrained(target_path)
    plain.chat_template = None
    transport = httpx2.ASGITransport(app_of(plain, source))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
        reply = await client.post(CHAT, json=chat())
        assert reply.status_code == 400 and reply.json()["error"]["param"] == "messages"
        assert (await client.post(COMPLETIONS, json=completion())).status_code == 200


async def test_chat_template_that_refuses(target_path: Any, source: TinyLlamaSource) -> None:
    from transformers import AutoTokenizer

    strict = AutoTokenizer.from_pretrained(target_path)
    strict.chat_template = "{{ raise_exception('roles must alternate') }}"
    transport = httpx2.ASGITransport(app_of(strict, source))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
        error = (await client.post(CHAT, json=chat())).json()["error"]
    assert error["param"] == "messages" and "roles must alternate" in error["message"]
