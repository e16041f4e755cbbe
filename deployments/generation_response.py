"""The HTTP response of a generation: one JSON body, or a stream of server-sent events.

It watches the client itself, in both modes and from the first moment. Starlette's StreamingResponse does so
only on older ASGI servers and only once it streams, and nothing does while a whole answer is gathered.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from deployments.errors import GenerationError
from deployments.openai_errors import ApiError, api_error
from deployments.openai_replies import ReplyForm, Usage
from engine.request import TokenChunk

logger = logging.getLogger(__name__)

SSE_HEADERS = {
    "content-type": "text/event-stream; charset=utf-8",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",  # tells a reverse proxy not to collect events
}


class GenerationResponse(Response):
    """Sends what `chunks` yields.

    A failure before the first chunk has a status of its own; after it, in a stream, it is the last event, and
    no `[DONE]` follows. When the client disconnects, `chunks` is closed at once.

    Args:
        chunks: ends with a chunk that has a finish reason, or raises.
        form: how the endpoint words it.
        usage: of the prompt alone.
        stream: events or one body.
        on_error: told of every error that a client is sent.
    """

    def __init__(
        self,
        chunks: AsyncGenerator[TokenChunk, None],
        form: ReplyForm,
        usage: Usage,
        *,
        stream: bool,
        on_error: Callable[[ApiError], None],
    ) -> None:
        super().__init__()
        self._chunks = chunks
        self._form = form
        self._usage = usage
        self._stream = stream
        self._on_error = on_error

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        work = asyncio.ensure_future(self._stream_events(send) if self._stream else self._send_whole(send))
        gone = asyncio.ensure_future(_disconnected(receive))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            work.cancel()
            gone.cancel()
            await asyncio.gather(work, gone, return_exceptions=True)
        if not work.cancelled() and (error := work.exception()) is not None and not isinstance(error, OSError):
            raise error  # an OSError of `send` only says that the client is gone

    async def _send_whole(self, send: Send) -> None:
        usage, texts = self._usage, []
        finish = None
        try:
            async with aclosing(self._chunks) as chunks:
                async for chunk in chunks:
                    usage = usage.plus(chunk)
                    texts.append(chunk.text)
                    finish = chunk.finish_reason
            if finish is None:
                raise GenerationError("generation broke off before its end")
        except Exception as error:
            await self._send_error(send, error)
            return
        await self._send_start(send, 200, {"content-type": "application/json"})
        await _send_body(send, _json(self._form.whole("".join(texts), finish, usage)), more=False)

    async def _stream_events(self, send: Send) -> None:
        usage = self._usage
        started = False
        events: list[dict[str, Any]] = []
        async with aclosing(self._chunks) as chunks:
            while True:
                try:
                    chunk = await anext(chunks, None)
                    if chunk is None:
                        raise GenerationError("generation broke off before its end")
                except Exception as error:
                    if not started:
                        await self._send_error(send, error)
                    else:
                        await _send_body(send, _event(self._told(error).body()), more=False)
                    return
                usage = usage.plus(chunk)
                events.clear()
                if not started:
                    await self._send_start(send, 200, SSE_HEADERS)
                    started = True
                    events += self._form.opening()
                if chunk.text or chunk.finish_reason:
                    events.append(self._form.piece(chunk.text, chunk.finish_reason))
                if chunk.finish_reason:
                    break
                if events:
                    await _send_body(send, b"".join(map(_event, events)), more=True)
        events += self._form.closing(usage)
        await _send_body(send, b"".join(map(_event, events)) + b"data: [DONE]\n\n", more=False)

    async def _send_error(self, send: Send, error: Exception) -> None:
        told = self._told(error)
        await self._send_start(send, told.status, {"content-type": "application/json"} | told.headers)
        await _send_body(send, _json(told.body()), more=False)

    async def _send_start(self, send: Send, status: int, headers: dict[str, str]) -> None:
        headers = headers | {"x-request-id": self._form.head.id}
        raw = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": raw})

    def _told(self, error: Exception) -> ApiError:
        told = api_error(error)
        if told.status == 500:
            logger.error("request %s failed", self._form.head.id, exc_info=error)
        self._on_error(told)
        return told


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _send_body(send: Send, body: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": body, "more_body": more})


def _json(body: dict[str, Any]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode()


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + _json(body) + b"\n\n"
