"""The direct links over real sockets: encrypted, admitted by key, late and dead peers cost nothing but time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from test_wire_format import batch, reply

from deployments.curve import KeyPair
from deployments.draft_link import MISSES_UNTIL_LOST, DrafterAddress, ZmqDraftLink
from deployments.draft_server import DraftServer
from deployments.token_link import TokenInbox, TokenOutbox
from engine.request import TokenChunk
from engine.rounds import DraftBatch, DraftReply


class EchoDrafter:
    """Answers every batch with the same blocks, after a pause."""

    block_size = 5

    def __init__(self) -> None:
        self.pause = 0.0
        self.forgotten: list[str] = []
        self.owners: list[str] = []

    def draft(self, owner: str, batch: DraftBatch) -> DraftReply:
        self.owners.append(owner)
        time.sleep(self.pause)
        return replace(reply(), round=batch.round, sequence=batch.sequence)

    def forget(self, owner: str) -> None:
        self.forgotten.append(owner)


@pytest.fixture
def server() -> Iterator[DraftServer]:
    made = DraftServer(EchoDrafter(), "127.0.0.1")
    yield made
    made.stop()


@pytest.fixture
def link() -> Iterator[ZmqDraftLink]:
    made = ZmqDraftLink(KeyPair.generate(), "verifier-1")
    yield made
    made.close()


def address_of(server: DraftServer) -> DrafterAddress:
    return DrafterAddress("replica", server.endpoint, server.public_key, "abc", 5)


def connect(link: ZmqDraftLink, server: DraftServer) -> None:
    server.admit(link._keys.public)
    link.connect(address_of(server))
    assert link.ready


def test_a_round_trip_and_its_owner(server: DraftServer, link: ZmqDraftLink) -> None:
    assert link.lost and not link.ready
    connect(link, server)
    assert not link.lost and link.generation == 1
    link.submit(batch())
    answer = link.collect(7, 10.0)
    assert answer is not None and (answer.sequence == batch().sequence).all()
    assert server._drafter.owners == ["verifier-1"]  # type: ignore[attr-defined]


def test_a_late_reply_is_dropped_and_the_next_round_is_not_confused(server: DraftServer, link: ZmqDraftLink) -> None:
    connect(link, server)
    link.submit(batch())
    assert link.collect(7, 10.0) is not None
    server._drafter.pause = 0.4  # type: ignore[attr-defined]
    link.submit(replace(batch(), round=8))
    assert link.collect(8, 0.05) is None
    server._drafter.pause = 0.0  # type: ignore[attr-defined]
    link.submit(replace(batch(), round=9))
    answer = link.collect(9, 10.0)
    assert answer is not None and answer.round == 9
    assert link.ready


def test_a_stranger_is_not_let_in(server: DraftServer, link: ZmqDraftLink) -> None:
    link.connect(address_of(server))  # nobody admitted this key
    assert link.ready
    link.submit(batch())
    assert link.collect(7, 0.5) is None
    assert server._drafter.owners == []  # type: ignore[attr-defined]


def test_a_drafter_that_closes_is_noticed_at_once(link: ZmqDraftLink) -> None:
    server = DraftServer(EchoDrafter(), "127.0.0.1")
    connect(link, server)
    link.submit(batch())
    assert link.collect(7, 10.0) is not None
    server.stop()
    began = time.monotonic()
    link.submit(replace(batch(), round=8))
    assert link.collect(8, 30.0) is None
    assert time.monotonic() - began < 5.0
    assert link.lost and not link.ready


def test_a_silent_drafter_is_given_up_after_some_rounds(server: DraftServer, link: ZmqDraftLink) -> None:
    connect(link, server)
    nothing = replace(batch(), draft=np.zeros(3, np.bool_))  # is not answered
    for round in range(MISSES_UNTIL_LOST):
        assert link.ready
        link.submit(replace(nothing, round=round))
        assert link.collect(round, 0.05) is None
    assert link.lost
    connect(link, server)
    assert link.generation == 2


def test_a_broken_batch_does_not_end_the_server(server: DraftServer, link: ZmqDraftLink) -> None:
    connect(link, server)
    assert link._socket is not None
    link._socket.send_multipart([b"nonsense"])
    link.submit(batch())
    assert link.collect(7, 10.0) is not None
    assert server.error is None


async def test_tokens_reach_the_inbox_of_the_gateway_that_admits_the_sender() -> None:
    inbox = TokenInbox("127.0.0.1")
    sender = KeyPair.generate()
    outbox, stranger = TokenOutbox(sender), TokenOutbox(KeyPair.generate())
    try:
        queue = inbox.open("a")
        inbox.admit(sender.public)
        stranger.send(inbox.address, [TokenChunk("a", (9,), "no")])
        outbox.send(inbox.address, [TokenChunk("a", (1,), "x"), TokenChunk("unknown", (2,), "y")])
        outbox.send(inbox.address, [TokenChunk("a", (3,), "z", "stop")])
        got = [await asyncio.wait_for(queue.get(), 10) for _ in range(2)]
        assert [chunk.text for chunk in got] == ["x", "z"]
        await asyncio.sleep(0.2)
        assert queue.empty()
    finally:
        outbox.close()
        stranger.close()
        inbox.stop()
