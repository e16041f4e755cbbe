"""What a verifier's rounds came to: counts for reports and metrics, running survival for the next decision."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
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
    """Tokens of one tier: emitted, and drafted, verified, accepted draft tokens."""

    emitted: int = 0
    drafted: int = 0
    verified: int = 0
    accepted: int = 0


@dataclass
class Counts:
    """What happened in `seconds`.

    Attributes:
        steps, tokens: steps, and tokens that ran through the target in them.
        step_seconds, wait_seconds: time of the steps with their waits for drafts, and of the waits alone.
        draft_seconds: what the drafter says it worked.
        predicted_seconds, predicted_steps: what plans with a cost model predicted, and how many those were.
        expected_accepted: draft tokens that plans expected to be accepted.
        rounds, late, mismatched: blocks resolved; rounds whose drafts came too late; replies with other weights.
        trials_at, accepted_at: [gamma] conditional trials and acceptances of each position.
        tiers: by tier.
    """

    seconds: float = 0.0
    steps: int = 0
    tokens: int = 0
    step_seconds: float = 0.0
    wait_seconds: float = 0.0
    draft_seconds: float = 0.0
    predicted_seconds: float = 0.0
    predicted_steps: int = 0
    expected_accepted: float = 0.0
    rounds: int = 0
    late: int = 0
    mismatched: int = 0
    trials_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    tiers: dict[str, TierCounts] = field(default_factory=lambda: defaultdict(TierCounts))

    @property
    def accepted(self) -> int:
        """Draft tokens accepted in all tiers."""
        return sum(tier.accepted for tier in self.tiers.values())

    @property
    def verified(self) -> int:
        """Draft tokens verified in all tiers."""
        return sum(tier.verified for tier in self.tiers.values())


class RoundLog:
    """Counts since the start, counts since they were last taken, and the running estimates of survival.

    Args:
        block_size: gamma.
        clock: seconds.
    """

    def __init__(self, block_size: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._block_size = block_size
        self._clock = clock
        self._survival: dict[str, SurvivalEstimate] = {}
        self._since = clock()
        self._both = (self._empty(), self._empty())  # since the start, since the last `take`

    def _empty(self) -> Counts:
        return Counts(trials_at=[0] * self._block_size, accepted_at=[0] * self._block_size)

    @property
    def total(self) -> Counts:
        """Since the start."""
        return self._both[0]

    def take(self) -> Counts:
        """Since the last call."""
        now = self._clock()
        taken = self._both[1]
        taken.seconds = now - self._since
        self._since = now
        self._both = (self._both[0], self._empty())
        return taken

    def totals(self) -> dict[str, object]:
        """Totals as plain numbers."""
        t = self.total
        return {
            "steps": t.steps,
            "tokens": t.tokens,
            "step_seconds": t.step_seconds,
            "wait_seconds": t.wait_seconds,
            "draft_seconds": t.draft_seconds,
            "expected_accepted": t.expected_accepted,
            "rounds": t.rounds,
            "late": t.late,
            "mismatched": t.mismatched,
            "accepted": t.accepted,
            "verified": t.verified,
            "emitted": sum(tier.emitted for tier in t.tiers.values()),
            "trials_at": list(t.trials_at),
            "accepted_at": list(t.accepted_at),
        }

    def mean_survival(self, sequence: Sequence) -> npt.NDArray[np.float64]:
        """[gamma] expected survival of the sequence's next block, from resolved rounds under its rule."""
        rule = acceptance_rule(sequence)
        if rule not in self._survival:
            self._survival[rule] = SurvivalEstimate.start(self._block_size)
        return self._survival[rule].mean_survival()

    def step(self, tokens: int, seconds: float, waited: float) -> None:
        """A step of `tokens` tokens took `seconds`, after `waited` seconds for its drafts."""
        for c in self._both:
            c.steps += 1
            c.tokens += tokens
            c.step_seconds += seconds + waited
            c.wait_seconds += waited

    def drafted(self, seconds: float) -> None:
        """A drafter spent `seconds` on a batch."""
        for c in self._both:
            c.draft_seconds += seconds

    def missed(self, *, late: int = 0, mismatched: int = 0) -> None:
        """A round whose reply could not be used."""
        for c in self._both:
            c.late += late
            c.mismatched += mismatched

    def planned(self, expected: float, seconds: float | None) -> None:
        """A plan expected so many accepted tokens and so many seconds, the wait among them."""
        for c in self._both:
            c.expected_accepted += expected
            if seconds is not None:
                c.predicted_seconds += seconds
                c.predicted_steps += 1

    def emitted(self, sequence: Sequence, tokens: int) -> None:
        """Tokens were committed."""
        for c in self._both:
            c.tiers[sequence.request.tier].emitted += tokens

    def resolved(self, sequence: Sequence, verified: int, accepted: int) -> None:
        """A block came to its end: `verified` of its tokens were checked, `accepted` stayed."""
        rule = acceptance_rule(sequence)
        estimate = self._survival.get(rule, SurvivalEstimate.start(self._block_size))
        self._survival[rule] = estimate.update(accepted, verified)
        trials, accepts = conditional_trials([accepted], [verified], self._block_size)
        for c in self._both:
            c.rounds += 1
            tier = c.tiers[sequence.request.tier]
            tier.drafted += self._block_size
            tier.verified += verified
            tier.accepted += accepted
            for k in range(self._block_size):
                c.trials_at[k] += int(trials[k])
                c.accepted_at[k] += int(accepts[k])
