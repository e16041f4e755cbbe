"""Reading the JSON body of a request, within a limit and without guessing."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request

from deployments.openai_errors import ApiError


async def json_object(request: Request, max_bytes: int) -> dict[str, Any]:
    """The JSON object that `request` carries.

    `application/json` is insisted on because a web page can make a browser post any other type to loopback
    without asking first.

    Raises:
        ApiError: 413 over `max_bytes`; 415 another content type; 400 not JSON, not an object, NaN or
            Infinity, a name given twice, or half a surrogate pair.
        starlette.requests.ClientDisconnect: the client went away while sending.
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise ApiError(415, f"Content-Type must be application/json, not {content_type or 'absent'}")
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > max_bytes:
            raise ApiError(413, f"the request body is longer than {max_bytes} bytes", code="request_too_large")
    try:
        # Decoded here: json.loads lets encoded surrogates in bytes pass.
        parsed = json.loads(body.decode("utf-8"), parse_constant=_not_a_number, object_pairs_hook=_once_each)
        if b"\\u" in body:  # an escape can still make half a surrogate pair, which is no text
            json.dumps(parsed, ensure_ascii=False).encode("utf-8")
    except (ValueError, RecursionError) as error:  # JSON and Unicode errors are ValueErrors
        raise ApiError(400, f"the request body is not valid JSON: {error}", code="invalid_json") from None
    if not isinstance(parsed, dict):
        raise ApiError(400, "the request body must be a JSON object", code="invalid_json")
    return parsed


def _not_a_number(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} is given twice")
    return made
