"""The drafter deployment: loads the small model and answers verifiers over the direct link."""

from __future__ import annotations

import logging
import os
from typing import Any

from deployments.draft_server import DraftServer
from deployments.node import link_host
from deployments.settings import AppSettings
from engine.checkpoint import weights_hash
from engine.loading import drafter_folder, load_draft_engine

logger = logging.getLogger(__name__)


class Drafter:
    """A thin shell around `DraftServer`.

    Args:
        settings: of the application.
    """

    def __init__(self, settings: AppSettings) -> None:
        drafter = load_draft_engine(settings.engine, settings.drafting, settings.cache_root)
        self._server = DraftServer(drafter, link_host(settings.link_host))
        self._weights = weights_hash(drafter_folder(settings.drafting))
        self._block_size = drafter.block_size
        logger.info("drafter %s listens on %s", self._weights, self._server.endpoint)

    def record_replica_metadata(self) -> dict[str, Any]:
        """Where this replica listens, and its process; delivered to verifiers with the list of replicas."""
        return {
            "endpoint": self._server.endpoint,
            "public_key": self._server.public_key,
            "weights": self._weights,
            "block_size": self._block_size,
            "pid": os.getpid(),
        }

    async def open_link(self, public_key: str) -> str:
        """Admit a verifier; returns this replica's public key, as a check that it is the one meant."""
        self._server.admit(public_key)
        return self._server.public_key

    async def close_link(self, identity: str) -> None:
        """A verifier has gone or moved on: free its contexts."""
        self._server.forget(identity)

    async def check_health(self) -> None:
        """Raises when the drafting thread has ended."""
        if self._server.error is not None:
            raise RuntimeError(f"drafting has ended: {self._server.error!r}")

    def __del__(self) -> None:
        server = getattr(self, "_server", None)
        if server is not None:
            server.stop()
