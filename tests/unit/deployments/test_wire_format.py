"""What travels between verifier and drafter arrives unchanged, and what is broken is refused at the border."""

from __future__ import annotations

from dataclasses import fields, replace

import msgspec
import numpy as np
import pytest

from deployments.wire import WireError, decode_batch, decode_chunks, decode_reply, encode_chunks, encode_round
from engine.request import TokenChunk
from engine.rounds import DraftBatch, DraftReply

R, G, K, H = 3, 5, 4, 6


def batch() -> DraftBatch:
    rng = np.random.default_rng(0)
    return DraftBatch(
        round=7,
        weights="abc",
        closed=np.array([9], np.int64),
        sequence=np.arange(R, dtype=np.int64),
        epoch=np.zeros(R, np.int32),
        committed=np.array([4, 5, 6], np.int32),
        prefix=np.array([2**63, 1, 2], np.uint64),
        anchor=np.array([1, 2, 3], np.int32),
        draft=np.array([True, False, True]),
        temperature=np.array([0.0, 0.7, 1.0], np.float32),
        coupled=np.array([False, False, True]),
        key=np.array([0, 2**64 - 1, 5], np.uint64),
        feature_start=np.array([0, 3, 4], np.int32),
        feature_count=np.array([3, 1, 1], np.int32),
        features=rng.standard_normal((5, H)).astype(np.float16),
    )


def reply() -> DraftReply:
    rng = np.random.default_rng(1)
    return DraftReply(
        round=7,
        weights="abc",
        sequence=np.arange(R, dtype=np.int64),
        epoch=np.zeros(R, np.int32),
        committed=np.array([4, 5, 6], np.int32),
        tokens=rng.integers(0, 9, (R, G)).astype(np.int32),
        confidence=rng.standard_normal((R, G)).astype(np.float32),
        q_ids=rng.integers(0, 9, (R, G, K)).astype(np.int32),
        q_probs=np.full((R, G, K), 1 / K, np.float32),
        resync=np.array([], np.int64),
        seconds=0.25,
    )


def assert_same(one: object, other: object) -> None:
    for field in fields(one):  # type: ignore[arg-type]
        a, b = getattr(one, field.name), getattr(other, field.name)
        if isinstance(a, np.ndarray):
            assert a.dtype == b.dtype and a.shape == b.shape and (a == b).all(), field.name
        else:
            assert a == b, field.name


def test_rounds_arrive_unchanged() -> None:
    assert_same(batch(), decode_batch(encode_round(batch())))
    assert_same(reply(), decode_reply(encode_round(reply())))


def test_an_idle_round_of_no_requests_travels_too() -> None:
    none = {
        field.name: getattr(batch(), field.name)[:0]
        for field in fields(DraftBatch)
        if isinstance(getattr(batch(), field.name), np.ndarray)
    }
    assert_same(replace(batch(), **none), decode_batch(encode_round(replace(batch(), **none))))


def broken_header(change: dict[str, object]) -> list[bytes]:
    frames = encode_round(reply())
    header = {**msgspec.msgpack.decode(frames[0]), **change}
    return [msgspec.msgpack.encode(header), *frames[1:]]


@pytest.mark.parametrize(
    ("frames", "says"),
    [
        (lambda: broken_header({"version": 2}), "version"),
        (lambda: broken_header({"kind": "DraftBatch"}), "DraftBatch"),
        (lambda: broken_header({"scalars": {"round": 1}}), "fields"),
        (lambda: broken_header({"extra": 1}), "header"),
        (lambda: [b"\xff", *encode_round(reply())[1:]], "header"),
        (lambda: encode_round(reply())[:-1], "frames"),
        (lambda: [*encode_round(reply())[:-1], b"123"], "bytes"),
        (lambda: encode_round(replace(reply(), tokens=reply().tokens[:2])), "tokens"),
        (lambda: encode_round(replace(reply(), q_probs=np.full((R, G, K), np.nan, np.float32))), "q_probs"),
        (lambda: encode_round(replace(reply(), q_probs=np.full((R, G, K), -1.0, np.float32))), "q_probs"),
    ],
)
def test_broken_replies_are_refused(frames: object, says: str) -> None:
    with pytest.raises(WireError, match=says):
        decode_reply(frames())  # type: ignore[operator]


@pytest.mark.parametrize(
    "change",
    [
        {"feature_count": np.array([3, 1, 2], np.int32)},
        {"feature_count": np.array([7, -1, -1], np.int32)},
        {"anchor": np.array([1, -1, 3], np.int32)},
        {"committed": np.array([0, 5, 6], np.int32)},
        {"feature_start": np.array([-1, 3, 4], np.int32)},
    ],
)
def test_broken_batches_are_refused(change: dict[str, np.ndarray]) -> None:
    with pytest.raises(WireError):
        decode_batch(encode_round(replace(batch(), **change)))


def test_chunks_arrive_unchanged() -> None:
    chunks = [TokenChunk("a", (1, 2), "hé", None, 1, 2), TokenChunk("b", (), "", "error", error="broken")]
    assert decode_chunks(encode_chunks(chunks)) == chunks
    with pytest.raises(WireError):
        decode_chunks(b"\x93")
