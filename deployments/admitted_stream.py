"""One request on its way through the gateway: admitted, measured, and its ways of failing made one."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from deployments.admission import Admission
from deployments.errors import GenerationError, UnavailableError
from deployments.gateway_metrics import Finish, GatewayMetrics
from deployments.token_source import TokenSource
from engine.request import GenerationRequest, TokenChunk


async def admitted_stream(
    source: TokenSource,
    request: GenerationRequest,
    admission: Admission,
    metrics: GatewayMetrics,
    arrived: float,
) -> AsyncGenerator[TokenChunk, None]:
    """The chunks of `request`, up to one that says "stop" or "length"; any other end is an error.

    Times are measured from `arrived` (time.monotonic), which includes the making of the prompt.
    The source's generator is closed whichever way this one ends: at the end, by an error, by `aclose`, by
    cancellation.

    Raises:
        OverloadedError: the tier's queue is full, or the source says so.
        GenerationError: the engine failed, or its stream broke off without an end.
        UnavailableError: the engine aborted the request, though nobody here asked it to.
        RequestError: the source refuses the request.
    """
    tier = request.tier
    admission.enter(tier)
    metrics.admitted(tier, len(request.prompt))
    first = last = 0.0
    count = 0
    finish: Finish = "abort"
    try:
        async with aclosing(source.stream(request)) as chunks:
            async for chunk in chunks:
                if chunk.token_ids:
                    now = time.monotonic()
                    if count:
                        metrics.token_gap(tier, len(chunk.token_ids), now - last)
                    else:
                        first = now
                        admission.leave(tier, now - arrived)
                        metrics.first_token(tier, now - arrived)
                    count += len(chunk.token_ids)
                    last = now
                metrics.tokens(tier, len(chunk.token_ids), chunk.accepted, chunk.rejected)
                if chunk.finish_reason == "stop" or chunk.finish_reason == "length":
                    finish = chunk.finish_reason
                    yield chunk
                    return
                if chunk.finish_reason is not None:
                    if chunk.token_ids or chunk.text:
                        yield replace(chunk, finish_reason=None, error=None)
                    raise _failure(chunk)
                yield chunk
        raise GenerationError("generation broke off before its end")
    except Exception:
        finish = "error"
        raise
    finally:
        if not count:
            admission.leave(tier, None)
        per_token = (last - first) / (count - 1) if count > 1 else None
        metrics.finished(tier, finish, time.monotonic() - arrived, per_token, ran=count > 0)


def _failure(chunk: TokenChunk) -> Exception:
    if chunk.finish_reason == "abort":
        return UnavailableError(chunk.error or "the request was aborted by the server")
    return GenerationError(chunk.error or "generation failed")
