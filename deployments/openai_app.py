"""The gateway's HTTP application: OpenAI's endpoints over a token source."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from deployments.admission import Admission
from deployments.admitted_stream import admitted_stream
from deployments.api_keys import ApiKeys, check_tier_allowed
from deployments.errors import OverloadedError, UnavailableError
from deployments.gateway_metrics import GatewayMetrics
from deployments.gateway_settings import GatewaySettings
from deployments.generation_response import GenerationResponse
from deployments.json_body import json_object
from deployments.openai_errors import ApiError, api_error
from deployments.openai_prompts import PromptEncoder, Tokenizer, output_limit
from deployments.openai_replies import ChatReplies, CompletionReplies, ReplyHead, Usage
from deployments.openai_schema import ChatBody, CompletionBody, chat_body, completion_body
from deployments.token_source import TokenSource
from engine.request import GenerationRequest, RequestError
from scheduler.tiers import UnknownTierError, tier_named

logger = logging.getLogger(__name__)

OWNER = "dspark-serve"

_FORESEEN = (
    ApiError,
    RequestError,
    UnknownTierError,
    OverloadedError,
    UnavailableError,
    HTTPException,
    ClientDisconnect,
)


def build_app(
    *,
    tokenizer: Tokenizer,
    source: TokenSource,
    settings: GatewaySettings,
    registry: CollectorRegistry,
    health: Callable[[], Awaitable[None]] | None = None,
) -> FastAPI:
    """The application of one gateway.

    Args:
        tokenizer: of the target model.
        source: makes the tokens.
        registry: Prometheus registry that gets this gateway's metrics; one registry holds one gateway.
        health: asked by /health; raises UnavailableError while requests could not be served.

    Everything but /health needs a key when `settings.keys` has any.
    """
    gateway = _Gateway(tokenizer, source, settings, registry, health)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        gateway.prompts.close()

    # No generated pages: they load scripts from elsewhere, and the bodies are checked here, not by FastAPI.
    app = FastAPI(lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    app.add_api_route("/health", gateway.health, methods=["GET"])
    app.add_api_route("/metrics", gateway.exposition, methods=["GET"])
    app.add_api_route("/v1/models", gateway.models, methods=["GET"])
    app.add_api_route("/v1/models/{model_id:path}", gateway.model, methods=["GET"])
    app.add_api_route("/v1/completions", gateway.completions, methods=["POST"])
    app.add_api_route("/v1/chat/completions", gateway.chat_completions, methods=["POST"])
    app.add_exception_handler(Exception, gateway.refuse)
    # Named one by one: what only the handler of Exception answers is also raised into the server.
    for error in _FORESEEN:
        app.add_exception_handler(error, gateway.refuse)
    return app


class _Gateway:
    """The endpoints, over what they share."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        source: TokenSource,
        settings: GatewaySettings,
        registry: CollectorRegistry,
        health: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self.prompts = PromptEncoder(tokenizer)
        self._source = source
        self._settings = settings
        self._keys = ApiKeys(settings.keys)
        self._admission = Admission(settings.tiers)
        self._metrics = GatewayMetrics(registry, settings.model_name, [tier.name for tier in settings.tiers])
        self._health = health
        self._created = int(time.time())

    async def health(self) -> JSONResponse:
        if self._health is not None:
            await self._health()
        return JSONResponse({"status": "ok"})

    async def exposition(self, request: Request) -> Response:
        self._authenticate(request)
        return Response(self._metrics.exposition(), headers={"content-type": CONTENT_TYPE_LATEST})

    async def models(self, request: Request) -> JSONResponse:
        self._authenticate(request)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request, model_id: str) -> JSONResponse:
        self._authenticate(request)
        self._check_model(model_id)
        return JSONResponse(self._card())

    async def completions(self, request: Request) -> Response:
        arrived = time.monotonic()
        allowed = self._authenticate(request)
        body = completion_body(await json_object(request, self._settings.max_body_bytes))
        tier = self._placed(body, allowed)
        with self._admission.held(tier):
            prompt = await self.prompts.completion(body)
        return self._generation(body, prompt, CompletionReplies(self._head("cmpl", body, tier)), arrived)

    async def chat_completions(self, request: Request) -> Response:
        arrived = time.monotonic()
        allowed = self._authenticate(request)
        body = chat_body(await json_object(request, self._settings.max_body_bytes))
        tier = self._placed(body, allowed)
        with self._admission.held(tier):
            prompt = await self.prompts.chat(body)
        return self._generation(body, prompt, ChatReplies(self._head("chatcmpl", body, tier)), arrived)

    async def refuse(self, request: Request, error: Exception) -> Response:
        """The answer to a request that ended in `error` before anything was generated."""
        if isinstance(error, ClientDisconnect):
            return Response(status_code=499)  # nobody reads it
        if isinstance(error, HTTPException):  # of the router: no such path or method
            message = f"{request.method} {request.url.path}: {error.detail}"
            error = ApiError(error.status_code, message, headers=error.headers)
        told = api_error(error)
        if told.status == 500:
            logger.error("%s %s failed", request.method, request.url.path, exc_info=error)
        self._metrics.refused(told.status)
        return told.response()

    def _authenticate(self, request: Request) -> frozenset[str] | None:
        return self._keys.authenticate(request.headers.get("authorization"))

    def _check_model(self, name: str) -> None:
        if name != self._settings.model_name:
            raise ApiError(
                404,
                f"the model {name!r} does not exist here, only {self._settings.model_name!r}",
                param="model",
                code="model_not_found",
            )

    def _placed(self, body: CompletionBody | ChatBody, allowed: frozenset[str] | None) -> str:
        """The name of the tier that serves `body`, once model, tier and key are known to fit."""
        self._check_model(body.model)
        tier = tier_named(self._settings.tiers, body.service_tier).name
        check_tier_allowed(allowed, tier)
        return tier

    def _head(self, prefix: str, body: CompletionBody | ChatBody, tier: str) -> ReplyHead:
        return ReplyHead(
            id=f"{prefix}-{uuid.uuid4().hex}",
            created=int(time.time()),
            model=self._settings.model_name,
            tier=tier,
            include_usage=body.include_usage,
        )

    def _generation(
        self,
        body: CompletionBody | ChatBody,
        prompt: tuple[int, ...],
        form: CompletionReplies | ChatReplies,
        arrived: float,
    ) -> GenerationResponse:
        limit = output_limit(body, len(prompt), self._settings.max_context)
        request = GenerationRequest(
            request_id=form.head.id,
            prompt=prompt,
            params=body.sampling(limit),
            tier=form.head.tier,
            speculation=body.speculation,
        )
        return GenerationResponse(
            admitted_stream(self._source, request, self._admission, self._metrics, arrived),
            form,
            Usage(prompt=len(prompt)),
            stream=body.stream,
            on_error=lambda told: self._metrics.refused(told.status),
        )

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._settings.model_name,
            "object": "model",
            "created": self._created,
            "owned_by": OWNER,
            "max_model_len": self._settings.max_context,
        }
