"""Tokens from verifiers to a gateway: one message a step, apart from the handle that opened the session."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import zmq
import zmq.asyncio

from deployments.curve import Admitted, KeyPair
from deployments.wire import WireError, decode_chunks, encode_chunks
from engine.request import TokenChunk

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class GatewayAddress:
    """Where a gateway listens for tokens; it travels with every request."""

    endpoint: str
    public_key: str


class TokenInbox:
    """A gateway's end: binds a port and sorts arriving chunks into the queue of each request."""

    def __init__(self, host: str) -> None:
        self._context = zmq.asyncio.Context()
        self._admitted = Admitted(zmq.Context.shadow(self._context))
        keys = KeyPair.generate()
        self._socket = self._context.socket(zmq.PULL)
        self._socket.linger = 0
        keys.serve(self._socket)
        port = self._socket.bind_to_random_port(f"tcp://{host}")
        self.address = GatewayAddress(f"tcp://{host}:{port}", keys.public)
        self._queues: dict[str, asyncio.Queue[TokenChunk]] = {}
        self._task = asyncio.get_running_loop().create_task(self._run())

    def admit(self, public_key: str) -> None:
        """Let a verifier send."""
        self._admitted.admit(public_key)

    def open(self, request_id: str) -> asyncio.Queue[TokenChunk]:
        """A queue that gets the request's chunks until `close`."""
        queue: asyncio.Queue[TokenChunk] = asyncio.Queue()
        self._queues[request_id] = queue
        return queue

    def close(self, request_id: str) -> None:
        """Drop whatever still comes for the request."""
        self._queues.pop(request_id, None)

    async def _run(self) -> None:
        while True:
            message = await self._socket.recv()
            try:
                chunks = decode_chunks(message)
            except WireError as error:
                logger.warning("token message refused: %s", error)
                continue
            for chunk in chunks:
                queue = self._queues.get(chunk.request_id)
                if queue is not None:
                    queue.put_nowait(chunk)

    def stop(self) -> None:
        """Close the port."""
        self._task.cancel()
        self._admitted.stop()
        self._context.destroy(linger=0)


class TokenOutbox:
    """A verifier's end: one socket per gateway. Only the step loop's thread may use it."""

    def __init__(self, keys: KeyPair) -> None:
        self._keys = keys
        self._context: zmq.Context[Any] = zmq.Context()
        self._sockets: dict[GatewayAddress, zmq.Socket[Any]] = {}

    def send(self, gateway: GatewayAddress, chunks: Sequence[TokenChunk]) -> None:
        """Queue one message; never blocks. A gateway that does not read loses messages past the high-water mark."""
        socket = self._sockets.get(gateway)
        if socket is None:
            socket = self._context.socket(zmq.PUSH)
            socket.linger = 0
            self._keys.connect(socket, gateway.public_key)
            socket.connect(gateway.endpoint)
            self._sockets[gateway] = socket
        try:
            socket.send(encode_chunks(chunks), zmq.DONTWAIT)
        except zmq.Again:
            logger.error("gateway %s does not take its tokens", gateway.endpoint)

    def close(self) -> None:
        """Close all sockets."""
        self._context.destroy(linger=0)
