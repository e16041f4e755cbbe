"""Errors as OpenAI's API words them: a status, and a body {"error": {message, type, param, code}}."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fastapi.responses import JSONResponse

from deployments.errors import GenerationError, OverloadedError, UnavailableError
from engine.request import RequestError
from scheduler.tiers import UnknownTierError


class ApiError(Exception):
    """An answer that is an error.

    Attributes:
        status: of HTTP.
        kind: OpenAI's `type`.
        param: the request field at fault, as its sender knows it.
        code: OpenAI's machine-readable `code`.
        headers: to be sent along.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, Any]:
        """The JSON body; in a stream that has begun, the data of its last event."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), status_code=self.status, headers=self.headers)


def api_error(error: Exception) -> ApiError:
    """How `error` is told to a client. What is not foreseen becomes a 500 that gives nothing away."""
    match error:
        case ApiError():
            return error
        case RequestError() | UnknownTierError():
            return ApiError(400, str(error), param=error.param)
        case OverloadedError():
            return ApiError(
                429,
                str(error),
                kind="rate_limit_error",
                code="overloaded",
                headers={"Retry-After": str(max(1, math.ceil(error.retry_after_s)))},
            )
        case UnavailableError():
            return ApiError(503, str(error), kind="service_unavailable_error", code="unavailable")
        case GenerationError():
            return ApiError(500, str(error), kind="server_error", code="generation_failed")
        case _:
            return ApiError(500, "internal error of the server", kind="server_error", code="internal_error")
