"""Who is drafted at all, decided from the outcomes of earlier rounds, before anything is sampled.

Drafting costs time even if nothing of it is verified. Deciding here, from history only, keeps that free of
the block's own tokens, as non-anticipation demands; once a block exists, `scheduler.planner` decides.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from scheduler.arguments import F64, ArgumentError, Bool, counts, flags, survival_matrix, weight_vector
from scheduler.costs import StepCosts

MOST_COUNTS_TRIED = 32


def choose_drafted(
    mean_survival: npt.ArrayLike,
    weights: npt.ArrayLike,
    eligible: npt.ArrayLike,
    costs: StepCosts | None,
    *,
    other_tokens: int,
    previously_on: bool,
    hysteresis: float = 0.05,
) -> Bool:
    """Which of a step's decoding requests to draft, by predicted weighted tokens per second.

    Plain decoding of all R is compared with drafting the n requests of the highest expected gain
    w * sum(a), for every n, with `costs.draft(n)` on the path and as many positions verified as the planner's
    Algorithm 1 would admit at these means: a gain behind a step of the cost staircase that it never passes must
    not keep drafting on. (Beyond 32 eligible requests, 32 evenly spread values of n are tried.) To be switched on,
    drafting has to win by the hysteresis margin; it is switched off as soon as it does not win. Requests of
    equal gain go by row.

    Args:
        mean_survival: [R, gamma] expected survival of each request's next block, from resolved rounds only;
            in [0, 1] and non-increasing along gamma.
        weights: [R] positive.
        eligible: [R] bool, whether a request may be drafted.
        costs: the step-cost model; None drafts all that are eligible (the caller warns about it).
        other_tokens: tokens of the step that are not these requests' (prefill).
        previously_on: whether the last decision was to draft.
        hysteresis: relative margin, 0 to below 1.

    Returns:
        [R] bool; all False where plain decoding is predicted to be better.

    Raises:
        ArgumentError: names the argument that breaks the above.
    """
    a = survival_matrix("mean_survival", mean_survival)
    requests = a.shape[0]
    w = weight_vector(weights, requests)
    may = flags("eligible", eligible, requests)
    if other_tokens < 0:
        raise ArgumentError("other_tokens", f"must not be negative, not {other_tokens}")
    if not 0.0 <= hysteresis < 1.0:
        raise ArgumentError("hysteresis", f"must be in [0, 1), not {hysteresis}")
    if costs is None or not may.any():
        return may

    base_tokens = requests + other_tokens
    base_value = float(w.sum())
    plain = base_value / costs.verify_seconds(base_tokens)

    rows = np.flatnonzero(may)
    gains = w[rows, None] * a[rows]
    best_first = np.argsort(-gains.sum(axis=1), kind="stable")
    rows, gains = rows[best_first], gains[best_first]

    # All positions of all eligible requests, best first; `rank` says whose they are.
    flat = gains.T.ravel()
    order = np.argsort(-flat, kind="stable")
    rank = order % rows.size
    tried = np.unique(np.linspace(1, rows.size, min(rows.size, MOST_COUNTS_TRIED)).round().astype(np.int64))
    # One line per number n of drafted requests; along it, their positions are admitted one by one.
    belongs = rank[None, :] < tried[:, None]
    tokens = np.cumsum(belongs, axis=1)
    value = base_value + np.cumsum(np.where(belongs, flat[order], 0.0), axis=1)
    verify = costs.verify_seconds(base_tokens + np.arange(order.size + 1))
    seconds = verify[tokens] + costs.draft(tried)[:, None]
    theta = value / seconds
    # The planner will stop at the first position that does not raise theta: what lies behind it is out of reach.
    before = np.column_stack((base_value / (verify[0] + costs.draft(tried)), theta[:, :-1]))
    theta[np.logical_or.accumulate(belongs & (theta <= before), axis=1)] = -np.inf
    theta[tokens == 0] = -np.inf  # drafted and nothing verified is no way of drafting
    line, column = np.unravel_index(int(np.argmax(theta)), theta.shape)

    margin = 0.0 if previously_on else hysteresis
    chosen = np.zeros(requests, dtype=np.bool_)
    if theta[line, column] > plain * (1.0 + margin):
        chosen[rows[rank[: column + 1][belongs[line, : column + 1]]]] = True
        if chosen.sum() < tried[line]:
            # Some would be drafted for nothing. Without them drafting is cheaper, so the question is another one.
            return choose_drafted(
                a, w, chosen, costs, other_tokens=other_tokens, previously_on=previously_on, hysteresis=hysteresis
            )
    return chosen


def probe_due(steps_since_last_probe: int, interval: int) -> bool:
    """Whether a step whose gate is off drafts one request all the same, to notice that drafts became good.

    Args:
        steps_since_last_probe: steps since a block was last drafted.
        interval: steps between probes, at least 1.

    Raises:
        ArgumentError: a value is out of range.
    """
    if steps_since_last_probe < 0:
        raise ArgumentError("steps_since_last_probe", f"must not be negative, not {steps_since_last_probe}")
    if interval < 1:
        raise ArgumentError("interval", f"must be at least 1, not {interval}")
    return steps_since_last_probe >= interval


def conditional_trials(accepted: npt.ArrayLike, verified: npt.ArrayLike, block_size: int) -> tuple[F64, F64]:
    """Trials and acceptances of each position, given that the positions before it were accepted.

    Position k of a round is a trial only if it was verified and k-1 tokens were accepted: what a refusal or
    a short prefix hides says nothing about it.

    Args:
        accepted: [N] draft tokens accepted in each round, 0..verified.
        verified: [N] draft tokens verified in each round, 0..block_size.
        block_size: gamma.

    Returns:
        trials [gamma], acceptances [gamma], float64.

    Raises:
        ArgumentError: a shape or range does not hold.
    """
    if block_size < 1:
        raise ArgumentError("block_size", f"must be at least 1, not {block_size}")
    rounds = np.asarray(verified).size
    tried = counts("verified", verified, rounds, block_size)
    taken = counts("accepted", accepted, rounds, block_size)
    if np.any(taken > tried):
        raise ArgumentError("accepted", "must not exceed verified")
    position = np.arange(1, block_size + 1)
    trial = (tried[:, None] >= position) & (taken[:, None] >= position - 1)
    success = trial & (taken[:, None] >= position)
    return trial.sum(axis=0).astype(np.float64), success.sum(axis=0).astype(np.float64)


@dataclass(frozen=True)
class SurvivalEstimate:
    """Running estimate of a tier's or a request's acceptance by position; `update` gives the next one.

    Old trials fade by `decay` per *new trial of the same position*, so that every position remembers equally
    many trials, and one that is not tried keeps what is known of it (probes are there to refresh it).

    Attributes:
        trials: [gamma] faded trials of each position.
        accepts: [gamma] faded acceptances.
        prior: conditional acceptance assumed before anything was seen, in [0, 1].
        prior_trials: how many trials that assumption is worth, positive.
        decay: in (0, 1]; 1 never forgets.
    """

    trials: F64
    accepts: F64
    prior: float
    prior_trials: float
    decay: float

    @classmethod
    def start(
        cls, block_size: int, *, prior: float = 0.7, prior_trials: float = 8.0, decay: float = 0.98
    ) -> SurvivalEstimate:
        """The estimate before any round.

        Raises:
            ArgumentError: a value is outside its range.
        """
        if block_size < 1:
            raise ArgumentError("block_size", f"must be at least 1, not {block_size}")
        if not 0.0 <= prior <= 1.0:
            raise ArgumentError("prior", f"must be in [0, 1], not {prior}")
        if not 0.0 < prior_trials < np.inf:
            raise ArgumentError("prior_trials", f"must be positive and finite, not {prior_trials}")
        if not 0.0 < decay <= 1.0:
            raise ArgumentError("decay", f"must be in (0, 1], not {decay}")
        return cls(np.zeros(block_size), np.zeros(block_size), prior, prior_trials, decay)

    def update(self, accepted: npt.ArrayLike, verified: npt.ArrayLike) -> SurvivalEstimate:
        """The estimate after more resolved rounds: one (two integers) or N ([N] and [N]), all equally new.

        Raises:
            ArgumentError: as `conditional_trials`.
        """
        trials, accepts = conditional_trials(np.atleast_1d(accepted), np.atleast_1d(verified), self.trials.size)
        fade = self.decay**trials
        return replace(self, trials=self.trials * fade + trials, accepts=self.accepts * fade + accepts)

    def conditional(self) -> F64:
        """[gamma] estimated acceptance of each position, given that those before it were accepted."""
        seen = self.trials + self.prior_trials
        return np.asarray((self.accepts + self.prior * self.prior_trials) / seen, dtype=np.float64)

    def mean_survival(self) -> F64:
        """[gamma] estimated probability that positions 1..k are all accepted; never rises."""
        return np.asarray(np.minimum.accumulate(np.cumprod(self.conditional())), dtype=np.float64)
