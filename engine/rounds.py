"""The two messages of a round, as arrays: what a verifier asks of a drafter and what it gets back.

R requests, gamma draft tokens a request, K candidates kept of each draft distribution, H hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]
I32 = npt.NDArray[np.int32]
U64 = npt.NDArray[np.uint64]
F32 = npt.NDArray[np.float32]
F16 = npt.NDArray[np.float16]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class DraftBatch:
    """What the verifier sends once a step.

    A request's committed tokens are t[0..n-1]; the anchor is t[n-1], at position n-1; its context is the
    fused features of positions 0..n-2. `feature_start/count` say which of these travel with this message.
    An entry with `draft` False only extends the context.

    Attributes:
        round: number of the step, echoed by the reply.
        weights: hash of the drafter weights whose `fc` made the features.
        closed: sequence numbers whose contexts may be freed.
        sequence: [R] number of the request, unique within this verifier.
        epoch: [R] fences off replies to an earlier life of the sequence.
        committed: [R] n, tokens committed so far, the anchor among them.
        prefix: [R] digest of the committed tokens (`engine.noise.extend_digest`), the same in every process.
        anchor: [R] token ids.
        draft: [R] whether a block is wanted.
        temperature: [R] 0 is greedy.
        coupled: [R] whether `key` is the seed of the coupled rule (else a fresh key of this round).
        key: [R] uint64 key of the noise the block is sampled with.
        feature_start, feature_count: [R] positions of the features sent.
        features: [sum(feature_count), H] float16, fused and normed.
    """

    round: int
    weights: str
    closed: I64
    sequence: I64
    epoch: I32
    committed: I32
    prefix: U64
    anchor: I32
    draft: Bool
    temperature: F32
    coupled: Bool
    key: U64
    feature_start: I32
    feature_count: I32
    features: F16


@dataclass(frozen=True)
class DraftReply:
    """The drafted blocks of one round, only for entries that could be drafted.

    Attributes:
        tokens: [R, gamma] target token ids.
        confidence: [R, gamma] raw confidence logits (before calibration).
        q_ids: [R, gamma, K] target token ids of the truncated proposal.
        q_probs: [R, gamma, K] float32 probabilities that were really sampled from; rows sum to 1.
        resync: sequence numbers whose context has a gap; their features must be sent again.
        seconds: time the drafter spent on this batch.
    """

    round: int
    weights: str
    sequence: I64
    epoch: I32
    committed: I32
    tokens: I32
    confidence: F32
    q_ids: I32
    q_probs: F32
    resync: I64
    seconds: float


class DraftLink(Protocol):
    """The seam between a step loop and whatever drafts for it: in this process, or over a socket."""

    @property
    def ready(self) -> bool:
        """Whether a drafter is there to be asked."""
        ...

    @property
    def generation(self) -> int:
        """Counts the drafters seen; a change means that no context exists over there."""
        ...

    def submit(self, batch: DraftBatch) -> None:
        """Send a round's batch. Never blocks."""
        ...

    def collect(self, round: int, timeout: float) -> DraftReply | None:
        """The reply to `round`, waiting at most `timeout` seconds; None if it has not come (or is lost)."""
        ...
