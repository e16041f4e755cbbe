"""The gateway deployment: the OpenAI API in front, sessions with verifiers behind."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from dataclasses import asdict
from typing import Any

from prometheus_client import CollectorRegistry
from ray import serve
from ray.exceptions import RayError

from deployments.errors import GenerationError, UnavailableError
from deployments.gateway_settings import GatewaySettings
from deployments.node import link_host
from deployments.openai_app import build_app
from deployments.settings import AppSettings
from deployments.token_link import TokenInbox
from deployments.verifier import request_message
from deployments.verifier_metrics import VerifierMetrics
from engine.embedded import resolve_target
from engine.request import GenerationRequest, RequestError, TokenChunk

logger = logging.getLogger(__name__)

FIND_TIMEOUT_S = 30.0
LAST_CHUNK_TIMEOUT_S = 10.0


class VerifierSource:
    """`deployments.token_source.TokenSource` over a handle (the session) and the token link (the tokens).

    Args:
        verifier: handle of the verifier deployment.
        host: address that the token link binds to.
    """

    def __init__(self, verifier: Any, host: str) -> None:
        self._verifier = verifier
        self._host = host
        self._inbox: TokenInbox | None = None

    @property
    def inbox(self) -> TokenInbox:
        """Bound at first use, inside the event loop that reads it."""
        if self._inbox is None:
            self._inbox = TokenInbox(self._host)
        return self._inbox

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """See `TokenSource.stream`."""
        message, gateway = request_message(request), asdict(self.inbox.address)
        queue = self.inbox.open(request.request_id)
        choosing = self._verifier.generate.choose_replica(message, gateway)
        try:
            replica = await asyncio.wait_for(choosing.__aenter__(), FIND_TIMEOUT_S)
        except (TimeoutError, RayError) as error:
            self.inbox.close(request.request_id)
            raise UnavailableError(f"no verifier is there: {error!r}") from error
        session: Any = None
        try:
            self.inbox.admit(replica.replica_metadata["public_key"])
            session = self._verifier.generate.dispatch(replica, message, gateway)
            async for chunk in _chunks(session, queue):
                yield chunk
        finally:
            if session is not None:
                session.cancel()
            self.inbox.close(request.request_id)
            await choosing.__aexit__(None, None, None)

    async def health(self) -> None:
        """Raises UnavailableError unless a verifier answers that it takes requests."""
        try:
            state = await asyncio.wait_for(self._verifier.state.remote(), 5.0)
        except (TimeoutError, RayError) as error:
            raise UnavailableError(f"no verifier answers: {error!r}") from error
        if not state["ready"]:
            raise UnavailableError("the verifier is still measuring what its steps cost")


async def _chunks(session: Any, queue: asyncio.Queue[TokenChunk]) -> AsyncGenerator[TokenChunk, None]:
    """The queue's chunks up to the last one; the session's end without it is an error."""
    ended = asyncio.ensure_future(_end(session))
    try:
        while True:
            waiting = asyncio.ensure_future(queue.get())
            await asyncio.wait((waiting, ended), return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                # The session's answer may overtake the last tokens: they come by another way.
                outcome = ended.result()
                if "error" in outcome:
                    waiting.cancel()
                    raise RequestError(outcome["error"], outcome["param"])
                try:
                    await asyncio.wait_for(waiting, LAST_CHUNK_TIMEOUT_S)
                except TimeoutError:
                    raise GenerationError("the last tokens did not arrive") from None
            chunk = waiting.result()
            yield chunk
            if chunk.finish_reason is not None:
                return
    finally:
        ended.cancel()


async def _end(session: Any) -> dict[str, Any]:
    try:
        outcome: dict[str, Any] = await session
    except RayError as error:
        raise UnavailableError(f"the verifier has gone: {error!r}") from error
    return outcome


def gateway_class(settings: AppSettings) -> type:
    """The deployment's class, with the OpenAI app as its ingress; everything is built in the replica."""
    registries: list[VerifierMetrics] = []

    class Gateway:
        """What Serve manages; requests go straight to the app.

        Args:
            verifier: handle of the verifier deployment.
        """

        def __init__(self, verifier: Any) -> None:
            self._verifier = verifier

        async def check_health(self) -> None:
            """Called by Serve every few seconds: a good time to read the verifiers' figures for /metrics."""
            try:
                states = await asyncio.wait_for(self._verifier.broadcast("state").results_async(), 5.0)
            except (TimeoutError, RayError) as error:  # their own health checks deal with it
                logger.info("the verifiers' figures could not be read: %r", error)
                return
            for metrics in registries:
                metrics.update(states)

    def app() -> Any:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(resolve_target(settings.engine.target, settings.cache_root))
        handle = serve.get_deployment_handle("Verifier", serve.get_replica_context().app_name)
        source = VerifierSource(handle, link_host(settings.link_host))
        registry = CollectorRegistry()
        registries.append(VerifierMetrics(registry, settings.model_name))
        gateway = GatewaySettings(
            host=settings.host,
            model_name=settings.model_name,
            max_context=settings.engine.max_context,
            tiers=settings.tiers,
            keys=settings.keys,
        )
        return build_app(tokenizer=tokenizer, source=source, settings=gateway, registry=registry, health=source.health)

    return serve.ingress(app)(Gateway)
