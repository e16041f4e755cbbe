"""Settings, keys, health and metrics."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families
from pydantic import ValidationError
from serving import CONTEXT, MODEL, app_of, chat, completion
from tiny_llama_source import TinyLlamaSource

from deployments.api_keys import generate_key, key_digest
from deployments.errors import SettingsError, UnavailableError
from deployments.gateway_settings import GatewaySettings, is_loopback
from deployments.openai_app import build_app
from scheduler.tiers import DEFAULT_TIERS

CHAT = "/v1/chat/completions"


def test_keys_are_random_and_stored_as_digests() -> None:
    first, second = generate_key(), generate_key()
    assert first != second and len(first) > 40
    assert len(key_digest(first)) == 64 and first not in key_digest(first)


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", True),
        ("127.8.8.8", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
        ("10.0.0.1", False),
        ("example.org", False),
        ("", False),
    ],
)
def test_only_loopback_needs_no_keys(host: str, expected: bool) -> None:
    assert is_loopback(host) is expected
    if expected:
        GatewaySettings(host=host, model_name=MODEL, max_context=CONTEXT)
    else:
        with pytest.raises(SettingsError, match="keys") as refused:
            GatewaySettings(host=host, model_name=MODEL, max_context=CONTEXT)
        assert refused.value.field == "keys"
    keys = {key_digest(generate_key()): ("default",)}
    assert GatewaySettings(host=host, model_name=MODEL, max_context=CONTEXT, keys=keys).keys == keys


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("keys", {"sk-in-clear": ("default",)}),
        ("keys", {"0" * 64: ()}),
        ("keys", {"0" * 64: ("gold",)}),
        ("tiers", ()),
        ("tiers", (*DEFAULT_TIERS, DEFAULT_TIERS[0])),
    ],
)
def test_settings_that_must_not_start(field: str, value: Any) -> None:
    with pytest.raises(SettingsError) as refused:
        GatewaySettings(**{"model_name": MODEL, "max_context": CONTEXT, field: value})
    assert refused.value.field == field and "sk-in-clear" not in str(refused.value)


def test_settings_refuse_what_they_do_not_know() -> None:
    with pytest.raises(ValidationError):
        GatewaySettings(model_name=MODEL, max_context=CONTEXT, max_contexts=5)


async def test_keys_at_the_door(tokenizer: Any, source: TinyLlamaSource) -> None:
    every, default = generate_key(), generate_key()
    keys = {key_digest(every): ("priority", "default", "flex"), key_digest(default): ("default",)}
    app = app_of(tokenizer, source, host="0.0.0.0", keys=keys)
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://gateway") as client:

        async def ask(authorization: str | None, **fields: Any) -> httpx2.Response:
            headers = {} if authorization is None else {"authorization": authorization}
            return await client.post(CHAT, json=chat(**fields), headers=headers)

        wrong = ["Bearer", "Bearer ", f"Basic {every}", f"Bearer {every}x", f"Bearer {key_digest(every)}"]
        for header in (None, "", every, *wrong):
            reply = await ask(header)
            assert reply.status_code == 401, header
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert reply.headers["www-authenticate"] == "Bearer"
        for path in ("/v1/models", f"/v1/models/{MODEL}", "/metrics"):
            assert (await client.get(path)).status_code == 401
            headers = {"authorization": f"Bearer {default}"}
            assert (await client.get(path, headers=headers)).status_code == 200
        assert (await client.get("/health")).status_code == 200
        not_json = await client.post(CHAT, content=b"{")
        assert not_json.status_code == 401  # nothing is read for a stranger
        assert not source.requests
        assert (await ask(f"Bearer {default}")).status_code == 200
        assert (await ask(f"bearer {every}", service_tier="priority")).status_code == 200
        forbidden = await ask(f"Bearer {default}", service_tier="priority")
        error = forbidden.json()["error"]
        assert forbidden.status_code == 403 and error["param"] == "service_tier"
        assert "priority" in error["message"]


async def test_health_asks_what_is_behind(tokenizer: Any, source: TinyLlamaSource) -> None:
    async def nothing_there() -> None:
        raise UnavailableError("no verifier is ready")

    app = build_app(
        tokenizer=tokenizer,
        source=source,
        settings=GatewaySettings(model_name=MODEL, max_context=CONTEXT),
        registry=CollectorRegistry(),
        health=nothing_there,
    )
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(app), base_url="http://gateway") as client:
        assert (await client.get("/health")).status_code == 503
    transport = httpx2.ASGITransport(app_of(tokenizer, source))
    async with httpx2.AsyncClient(transport=transport, base_url="http://gateway") as client:
        assert (await client.get("/health")).json() == {"status": "ok"}


async def test_metrics_count_what_happened(client: httpx2.AsyncClient) -> None:
    usages = []
    for stream in (False, True):
        body = completion(temperature=0, stream=stream, service_tier="flex")
        reply = await client.post("/v1/completions", json=body)
        if not stream:
            usages.append(reply.json()["usage"])
    await client.post("/v1/completions", json=completion(echo=True))
    exposition = await client.get("/metrics")
    assert exposition.headers["content-type"].startswith("text/plain")
    values = {
        (sample.name, sample.labels.get("service_tier")): sample.value
        for family in text_string_to_metric_families(exposition.text)
        for sample in family.samples
        if "le" not in sample.labels
    }
    details = usages[0]["completion_tokens_details"]
    accepted, rejected = details["accepted_prediction_tokens"], details["rejected_prediction_tokens"]
    expected = {
        "vllm:num_requests_running": 0,
        "vllm:num_requests_waiting": 0,
        "vllm:prompt_tokens_total": 2 * usages[0]["prompt_tokens"],
        "vllm:generation_tokens_total": 2 * usages[0]["completion_tokens"],
        "vllm:request_success_total": 2,
        "vllm:time_to_first_token_seconds_count": 2,
        "vllm:e2e_request_latency_seconds_count": 2,
        "vllm:request_time_per_output_token_seconds_count": 2,
        "vllm:inter_token_latency_seconds_count": 2 * (usages[0]["completion_tokens"] - 3),
        "vllm:spec_decode_num_accepted_tokens_total": 2 * accepted,
        "vllm:spec_decode_num_draft_tokens_total": 2 * (accepted + rejected),
    }
    assert {name: values[name, "flex"] for name in expected} == expected
    assert values["vllm:num_requests_running", "priority"] == 0
    assert values["dspark:requests_refused_total", None] == 1
