"""Messages between processes as ZeroMQ frames: one header (MessagePack), then the raw bytes of each array.

Decoding checks everything a peer could get wrong (version, fields, types, shapes), so that a broken message is
refused at the border instead of reaching a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import msgspec
import numpy as np

from engine.request import TokenChunk
from engine.rounds import DraftBatch, DraftReply

VERSION = 1

# Shape of each array in words; R requests of the message, G draft tokens, K candidates, H hidden, F features, N free.
_BATCH = {
    "closed": ("i8", "N"),
    "sequence": ("i8", "R"),
    "epoch": ("i4", "R"),
    "committed": ("i4", "R"),
    "prefix": ("u8", "R"),
    "anchor": ("i4", "R"),
    "draft": ("b1", "R"),
    "temperature": ("f4", "R"),
    "coupled": ("b1", "R"),
    "key": ("u8", "R"),
    "feature_start": ("i4", "R"),
    "feature_count": ("i4", "R"),
    "features": ("f2", "FH"),
}
_REPLY = {
    "sequence": ("i8", "R"),
    "epoch": ("i4", "R"),
    "committed": ("i4", "R"),
    "tokens": ("i4", "RG"),
    "confidence": ("f4", "RG"),
    "q_ids": ("i4", "RGK"),
    "q_probs": ("f4", "RGK"),
    "resync": ("i8", "S"),
}
_LAYOUT = {DraftBatch: _BATCH, DraftReply: _REPLY}


class WireError(ValueError):
    """A message that does not keep to the format; says what is wrong with it."""


class _Header(msgspec.Struct, forbid_unknown_fields=True):
    version: int
    kind: str
    scalars: dict[str, int | float | str]
    shapes: dict[str, list[int]]


_encoder = msgspec.msgpack.Encoder()
_header = msgspec.msgpack.Decoder(_Header)
_chunks = msgspec.msgpack.Decoder(list[TokenChunk])


def encode_round(message: DraftBatch | DraftReply) -> list[bytes]:
    """Frames of a batch or a reply."""
    layout = _LAYOUT[type(message)]
    arrays = {name: np.ascontiguousarray(getattr(message, name), kind) for name, (kind, _) in layout.items()}
    scalars = {f.name: getattr(message, f.name) for f in fields(message) if f.name not in layout}
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    header = _Header(VERSION, type(message).__name__, scalars, shapes)
    return [_encoder.encode(header), *(array.tobytes() for array in arrays.values())]


def decode_batch(frames: Sequence[bytes]) -> DraftBatch:
    """A batch from its frames.

    Raises:
        WireError: a frame, type or shape is not as it must be, or the counts of features do not add up.
    """
    batch = _decode(frames, DraftBatch)
    assert isinstance(batch, DraftBatch)
    if (batch.feature_count < 0).any() or int(batch.feature_count.sum()) != len(batch.features):
        raise WireError(f"feature_count adds up to {batch.feature_count.sum()}, {len(batch.features)} rows came")
    if (batch.committed < 1).any() or (batch.anchor < 0).any() or (batch.feature_start < 0).any():
        raise WireError("committed, anchor or feature_start is below its least value")
    return batch


def decode_reply(frames: Sequence[bytes]) -> DraftReply:
    """A reply from its frames.

    Raises:
        WireError: as `decode_batch`; or probabilities that are not finite or negative.
    """
    reply = _decode(frames, DraftReply)
    assert isinstance(reply, DraftReply)
    if not np.isfinite(reply.q_probs).all() or (reply.q_probs < 0).any():
        raise WireError("q_probs must be finite and not negative")
    return reply


def _decode(frames: Sequence[bytes], kind: type[DraftBatch] | type[DraftReply]) -> DraftBatch | DraftReply:
    layout = _LAYOUT[kind]
    if len(frames) != 1 + len(layout):
        raise WireError(f"{len(frames)} frames, a {kind.__name__} has {1 + len(layout)}")
    try:
        header = _header.decode(frames[0])
    except msgspec.MsgspecError as error:
        raise WireError(f"header: {error}") from error
    if header.version != VERSION:
        raise WireError(f"version {header.version}, this process speaks {VERSION}")
    if header.kind != kind.__name__:
        raise WireError(f"a {header.kind} came where a {kind.__name__} was expected")
    values: dict[str, object] = dict(header.scalars)
    wanted = {f.name for f in fields(kind)} - set(layout)
    if set(header.scalars) != wanted:
        raise WireError(f"fields {sorted(header.scalars)}, wanted {sorted(wanted)}")
    sizes: dict[str, int] = {}
    for frame, (name, (dtype, dimensions)) in zip(frames[1:], layout.items(), strict=True):
        shape = header.shapes.get(name, [])
        if len(shape) != len(dimensions) or any(n < 0 for n in shape):
            raise WireError(f"{name} has shape {shape}, wanted {len(dimensions)} dimensions")
        for letter, size in zip(dimensions, shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise WireError(f"{name} has shape {shape}, but {letter} is {sizes[letter]}")
        count = int(np.prod(shape, dtype=np.int64))
        if len(frame) != count * np.dtype(dtype).itemsize:
            raise WireError(f"{name} has {len(frame)} bytes, shape {shape} of {dtype} needs another number")
        values[name] = np.frombuffer(frame, dtype).reshape(shape)
    return kind(**values)  # type: ignore[arg-type]


def encode_chunks(chunks: Sequence[TokenChunk]) -> bytes:
    """One message: everything a step has for one gateway."""
    return _encoder.encode(list(chunks))


def decode_chunks(message: bytes) -> list[TokenChunk]:
    """The chunks of a message.

    Raises:
        WireError: it is not such a message.
    """
    try:
        return _chunks.decode(message)
    except msgspec.MsgspecError as error:
        raise WireError(f"chunks: {error}") from error
