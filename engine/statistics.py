"""What a verifier's rounds came to: counts for reports and metrics, running survival for the next decision."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from engine.sequence import Sequence
from scheduler.gate import SurvivalEstimate, conditional_trials


def acceptance_rule(sequence: Sequence) -> str:
    """Which rule decides for this request: drafts are worth more under one than under another."""
    params = sequence.request.params
    return "greedy" if params.greedy else "coupled" if params.coupled else "rejection"


@dataclass
class TierCounts:
    """Tokens of one tier since the counts were last taken."""

    emitted: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0


@dataclass
class RoundLog:
    """Counts since they were last taken, totals since the start, and the running estimate of survival.

    Attributes:
        block_size: gamma.
        late: rounds whose drafts did not come in time.
        mismatched: replies made with other weights.
    """

    block_size: int
    late: int = 0
    mismatched: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0
    draft_seconds: float = 0.0
    predicted_seconds: float = 0.0
    predicted_steps: int = 0
    expected_accepted: float = 0.0
    accepted: int = 0
    verified: int = 0
    blocks: int = 0
    accepted_at: npt.NDArray[np.int64] = field(init=False)
    trials_at: npt.NDArray[np.int64] = field(init=False)
    tiers: dict[str, TierCounts] = field(default_factory=lambda: defaultdict(TierCounts))
    _survival: dict[str, SurvivalEstimate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.accepted_at = np.zeros(self.block_size, np.int64)
        self.trials_at = np.zeros(self.block_size, np.int64)

    def mean_survival(self, sequence: Sequence) -> npt.NDArray[np.float64]:
        """[gamma] expected survival of the sequence's next block, from resolved rounds under its rule."""
        rule = acceptance_rule(sequence)
        if rule not in self._survival:
            self._survival[rule] = SurvivalEstimate.start(self.block_size)
        return self._survival[rule].mean_survival()

    def step(self, tokens: int, seconds: float, waited: float) -> None:
        """A step of `tokens` tokens took `seconds`, after `waited` seconds for its drafts."""
        self.steps += 1
        self.step_seconds += seconds + waited
        self.wait_seconds += waited

    def drafted(self, requests: int, seconds: float) -> None:
        """A drafter spent `seconds` on a batch of `requests`."""
        self.draft_seconds += seconds

    def planned(self, expected: float, seconds: float | None, waited: float) -> None:
        """A plan expected so many accepted tokens and so many seconds (the wait among them)."""
        self.expected_accepted += expected
        if seconds is not None:
            self.predicted_seconds += seconds
            self.predicted_steps += 1

    def resolved(self, sequence: Sequence, verified: int, accepted: int) -> None:
        """A block came to its end: `verified` of its tokens were checked, `accepted` stayed."""
        rule = acceptance_rule(sequence)
        estimate = self._survival.get(rule, SurvivalEstimate.start(self.block_size))
        self._survival[rule] = estimate.update(accepted, verified)
        trials, accepts = conditional_trials([accepted], [verified], self.block_size)
        self.trials_at += trials.astype(np.int64)
        self.accepted_at += accepts.astype(np.int64)
        self.blocks += 1
        self.verified += verified
        self.accepted += accepted
        counts = self.tiers[sequence.request.tier]
        counts.drafted += self.block_size
        counts.verified += verified
        counts.accepted += accepted
