"""A gateway on an ephemeral loopback port, and clients of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from deployments.gateway_settings import GatewaySettings
from deployments.openai_app import build_app

MODEL = "tiny-llama"
CONTEXT = 256


def app_of(tokenizer: Any, source: Any, **settings: Any) -> FastAPI:
    return build_app(
        tokenizer=tokenizer,
        source=source,
        settings=GatewaySettings(**{"model_name": MODEL, "max_context": CONTEXT} | settings),
        registry=CollectorRegistry(),
    )


@asynccontextmanager
async def listening(app: FastAPI) -> AsyncIterator[str]:
    """Serve `app` with uvicorn; gives its base URL."""
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    try:
        while not server.started:
            assert not serving.done(), serving
            await asyncio.sleep(0.01)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        await serving


async def until(condition: Any, seconds: float = 10.0) -> None:
    """Wait for `condition()` to hold."""
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def events_of(text: str) -> list[Any]:
    """The events of a stream: parsed JSON, or the string "[DONE]"."""
    assert text.endswith("\n\n")
    events = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        assert event.startswith("data: ")
        data = event.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 12} | fields


def completion(**fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 12} | fields
