"""The drafter's end of the link: one thread that answers batches in the order they come."""

from __future__ import annotations

import logging
import threading
from typing import Any

import zmq

from deployments.curve import Admitted, KeyPair
from deployments.wire import WireError, decode_batch, encode_round
from engine.drafting import Drafter

logger = logging.getLogger(__name__)


class DraftServer:
    """Binds a port, admits verifiers by key, and drafts for them.

    Args:
        drafter: does the work; only this server's thread calls it.
        host: address to bind and to tell others.

    Attributes:
        endpoint: where verifiers connect.
        public_key: of this server.
        error: why the thread has ended, if it has.
    """

    def __init__(self, drafter: Drafter, host: str) -> None:
        self._drafter = drafter
        self._context: zmq.Context[Any] = zmq.Context()
        self._admitted = Admitted(self._context)
        keys = KeyPair.generate()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        keys.serve(self._socket)
        self.endpoint = f"tcp://{host}:{self._socket.bind_to_random_port(f'tcp://{host}')}"
        self.public_key = keys.public
        self.error: BaseException | None = None
        self._stop = threading.Event()
        self._gone: list[str] = []
        self._thread = threading.Thread(target=self._run, name="drafting", daemon=True)
        self._thread.start()

    def admit(self, public_key: str) -> None:
        """Let a verifier connect."""
        self._admitted.admit(public_key)

    def forget(self, owner: str) -> None:
        """Free the contexts of a verifier that has gone, before the next batch."""
        self._gone.append(owner)

    def stop(self) -> None:
        """End the thread and close the port."""
        self._stop.set()
        self._thread.join(timeout=10)
        self._admitted.stop()
        self._context.destroy(linger=0)

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                while self._gone:
                    self._drafter.forget(self._gone.pop())
                if self._socket.poll(200):
                    self._answer(*self._socket.recv_multipart())
        except BaseException as error:  # the health check tells Serve
            logger.exception("drafting has ended")
            self.error = error

    def _answer(self, peer: bytes, *frames: bytes) -> None:
        try:
            batch = decode_batch(frames)
        except WireError as error:
            logger.warning("batch of %s refused: %s", peer.decode(errors="replace"), error)
            return
        reply = self._drafter.draft(peer.decode(), batch)
        if batch.draft.any():
            self._socket.send_multipart([peer, *encode_round(reply)])
