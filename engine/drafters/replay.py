"""A drafter for benchmarks only: proposes recorded continuations of the target at a chosen quality.

It shows what the *system* does at a given acceptance. Verification stays real, so what is emitted stays exact. It
runs the shipped drafter on every batch and throws its tokens away, so it costs what the shipped one costs.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.drafting import Drafter
from engine.noise import extend_digest
from engine.rounds import DraftBatch, DraftReply

logger = logging.getLogger(__name__)

# a + b of the Beta distribution. The AUC of the confidence against acceptance is P(X > Y) with X ~ Beta(a + 1, b)
# of accepted positions and Y ~ Beta(a, b + 1) of refused ones. Integrated numerically at a + b = 2.5 it is 0.808,
# 0.813, 0.826, 0.852, 0.872, 0.900 at means of 0.5, 0.6, 0.7, 0.8, 0.85, 0.9: a real confidence head's 0.80 to 0.90.
CONCENTRATION = 2.5
WRONG = 0.05  # confidence where nothing was recorded

Recording = Mapping[int, Sequence[int]]


def read_recording(path: Path) -> Recording:
    """Continuations by the digest of what they continue.

    The file is a JSON list of {"prompt": [token ids], "continuation": [token ids]}.
    """
    continuations: dict[int, Sequence[int]] = {}
    for entry in json.loads(path.read_text()):
        digest = extend_digest(0, entry["prompt"])
        tokens = entry["continuation"]
        for i, token in enumerate(tokens):
            digest = extend_digest(digest, [token])
            continuations[digest] = tokens[i + 1 :]
    return continuations


class ReplayDrafter:
    """Wraps a drafter and replaces what it drafted.

    For each position an acceptance probability is drawn from Beta(mean * c, (1 - mean) * c), reported as the
    confidence, and the recorded next token is proposed with that probability, another one otherwise.

    Args:
        drafter: the shipped one, run for its time.
        recording: continuations by digest.
        acceptance: mean conditional acceptance.
        seed: of the draws.

    Attributes:
        missed: blocks of prefixes that nothing is recorded for; they keep the wrapped drafter's tokens.
    """

    def __init__(self, drafter: Drafter, recording: Recording, acceptance: float, seed: int = 0) -> None:
        self._drafter = drafter
        self._recording = recording
        self._a = acceptance * CONCENTRATION
        self._b = (1.0 - acceptance) * CONCENTRATION
        self._rng = np.random.default_rng(seed)
        self.missed = 0
        logger.warning("a REPLAY drafter is in use: for benchmarks only")

    @property
    def block_size(self) -> int:
        """gamma."""
        return self._drafter.block_size

    def forget(self, owner: str) -> None:
        """As the wrapped drafter."""
        self._drafter.forget(owner)

    def draft(self, owner: str, batch: DraftBatch) -> DraftReply:
        """The wrapped drafter's reply with replayed tokens and confidences."""
        reply = self._drafter.draft(owner, batch)
        prefix = dict(zip(batch.sequence.tolist(), batch.prefix.tolist(), strict=True))
        tokens, confidence = reply.tokens.copy(), reply.confidence.copy()
        for i, number in enumerate(reply.sequence.tolist()):
            true = self._recording.get(prefix[number], ())
            self.missed += not true
            chance = self._rng.beta(self._a, self._b, self.block_size)
            chance[len(true) :] = WRONG
            right = self._rng.random(self.block_size) < chance
            for k in range(self.block_size):
                if k < len(true):
                    tokens[i, k] = true[k] if right[k] else _another(true[k])
            odds = np.clip(chance, 1e-6, 1 - 1e-6)
            confidence[i] = np.log(odds / (1 - odds))
        q_ids, q_probs = reply.q_ids.copy(), reply.q_probs.copy()
        # Proposed with certainty as far as the acceptance test can know: a point mass on the token.
        q_ids[:, :, 0], q_probs[:] = tokens, 0.0
        q_probs[:, :, 0] = 1.0
        return replace(reply, tokens=tokens, confidence=confidence, q_ids=q_ids, q_probs=q_probs)


def _another(token: int) -> int:
    """A token that is not `token` and that every vocabulary holds which holds it."""
    return token - 1 if token else 1
