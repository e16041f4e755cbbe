"""A server that speaks the streaming side of the OpenAI API at a known pace, for tests of the load test.

    python chat_server.py MODE      prints its port, serves on loopback until it is killed

MODE: "steady" streams 8 tokens, 10 ms apart after 50 ms; "full" refuses flex with 429; "breaks" drops every
connection in mid-stream; "errors" sends an error event.
"""

from __future__ import annotations

import asyncio
import json
import socket
import sys
from collections.abc import AsyncIterator

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

TOKENS = 8
FIRST_S = 0.05
GAP_S = 0.01


def application(mode: str) -> FastAPI:
    app = FastAPI()

    @app.get("/v1/models")
    async def models() -> dict[str, object]:
        return {"object": "list", "data": [{"id": "paced", "object": "model"}]}

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        body = await request.json()
        if body["model"] != "paced" or not body["stream"] or not body["stream_options"]["include_usage"]:
            return JSONResponse({"error": {"message": "not what this server streams"}}, 400)
        if mode == "full" and body["service_tier"] == "flex":
            return JSONResponse({"error": {"message": "full"}}, 429, {"Retry-After": "0.2"})
        return StreamingResponse(_events(mode), media_type="text/event-stream")

    return app


async def _events(mode: str) -> AsyncIterator[str]:
    yield _chunk({"role": "assistant", "content": ""})
    await asyncio.sleep(FIRST_S)
    yield ": keep-alive\n\n"
    for number in range(TOKENS):
        if number == 3 and mode == "breaks":
            raise ConnectionResetError
        if number == 3 and mode == "errors":
            yield 'data: {"error": {"message": "out of luck"}}\n\n'
            return
        yield _chunk({"content": f"token {number} "})
        await asyncio.sleep(GAP_S)
    yield _chunk({}, "stop")
    details = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}
    usage = {"prompt_tokens": 4, "completion_tokens": TOKENS, "completion_tokens_details": details}
    yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
    yield "data: [DONE]\n\n"


def _chunk(delta: dict[str, str], finish: str | None = None) -> str:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    return f"data: {json.dumps({'choices': [choice], 'usage': None})}\n\n"


if __name__ == "__main__":
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    server = uvicorn.Server(uvicorn.Config(application(sys.argv[1]), log_level="critical"))
    server.run(sockets=[listener])
