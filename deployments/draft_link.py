"""The verifier's end of the link to a drafter."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import zmq

from deployments.curve import KeyPair
from deployments.wire import WireError, decode_reply, encode_round
from engine.rounds import DraftBatch, DraftReply

logger = logging.getLogger(__name__)

MISSES_UNTIL_LOST = 3
PEER_GONE = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL


@dataclass(frozen=True)
class DrafterAddress:
    """Where a drafter replica listens, as Serve hands it out (`record_replica_metadata`)."""

    replica: str
    endpoint: str
    public_key: str
    weights: str
    block_size: int


class ZmqDraftLink:
    """`engine.rounds.DraftLink` over an encrypted socket.

    The step loop's thread calls `ready`, `submit` and `collect`; any thread may call `connect` and read `lost`. A
    drafter that dies closes its connection, which ends a wait at once; one that only falls silent (its machine is
    gone) is given up after several rounds. Replies to rounds that are no longer waited for are dropped.

    Args:
        keys: of this verifier.
        identity: name under which the drafter keeps this verifier's contexts.
        clock: seconds.
    """

    def __init__(self, keys: KeyPair, identity: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._keys = keys
        self._identity = identity
        self._clock = clock
        self._context: zmq.Context[Any] = zmq.Context()
        self._lock = threading.Lock()
        self._offered: DrafterAddress | None = None
        self._socket: zmq.Socket[Any] | None = None
        self._monitor: zmq.Socket[Any] | None = None
        self._generation = 0
        self._misses = 0
        self._address: DrafterAddress | None = None

    @property
    def ready(self) -> bool:
        """Whether a drafter is connected and has not missed several rounds in a row."""
        self._take_offer()
        if self._monitor is not None and self._monitor.poll(0):
            self._give_up("the drafter has closed the connection")
        return self._socket is not None

    @property
    def lost(self) -> bool:
        """Whether a new drafter is wanted."""
        with self._lock:
            return self._socket is None and self._offered is None

    @property
    def address(self) -> DrafterAddress | None:
        """The drafter in use."""
        return self._address

    @property
    def generation(self) -> int:
        """Counts connections; the drafter behind a new one knows no contexts."""
        return self._generation

    def connect(self, address: DrafterAddress) -> None:
        """Use this drafter from the next round on."""
        with self._lock:
            self._offered = address

    def disconnect(self) -> None:
        """Stop using the drafter (called by the step loop's thread)."""
        with self._lock:
            self._close_socket()

    def _close_socket(self) -> None:
        if self._socket is not None:
            self._socket.disable_monitor()
            self._socket.close(linger=0)
        self._socket, self._monitor, self._address = None, None, None

    def _give_up(self, why: str) -> None:
        logger.warning("%s: requests decode plainly until another is there", why)
        self.disconnect()

    def _take_offer(self) -> None:
        with self._lock:
            if self._offered is None:
                return
            self._close_socket()
            socket = self._context.socket(zmq.DEALER)
            socket.linger = 0
            socket.identity = self._identity.encode()
            self._keys.connect(socket, self._offered.public_key)
            self._monitor = socket.get_monitor_socket(PEER_GONE)
            socket.connect(self._offered.endpoint)
            self._socket, self._address, self._offered = socket, self._offered, None
            self._generation += 1
            self._misses = 0

    def submit(self, batch: DraftBatch) -> None:
        """Send a batch; what cannot be queued is dropped, and the round goes without drafts."""
        if self._socket is None:
            return
        try:
            self._socket.send_multipart(encode_round(batch), zmq.DONTWAIT)
        except zmq.Again:
            logger.warning("the link's queue is full: round %d is not drafted", batch.round)

    def collect(self, round: int, timeout: float) -> DraftReply | None:
        """The reply to `round` within `timeout` seconds, or None."""
        deadline = self._clock() + timeout
        while self._socket is not None:
            poller = zmq.Poller()
            poller.register(self._socket, zmq.POLLIN)
            poller.register(self._monitor, zmq.POLLIN)
            left = deadline - self._clock()
            events = dict(poller.poll(max(0, int(left * 1000 + 0.5))))
            if self._socket not in events:
                self._misses += 1
                if self._monitor in events:
                    self._give_up("the drafter has closed the connection")
                elif self._misses >= MISSES_UNTIL_LOST:
                    self._give_up(f"{self._misses} rounds without an answer from the drafter")
                return None
            try:
                reply = decode_reply(self._socket.recv_multipart())
            except WireError as error:
                logger.warning("reply refused: %s", error)
                continue
            if reply.round == round:
                self._misses = 0
                return reply
        return None

    def close(self) -> None:
        """Close for good."""
        self.disconnect()
        self._context.destroy(linger=0)
