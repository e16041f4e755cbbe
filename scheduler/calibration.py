"""Sequential temperature scaling (STS) of confidences, and how calibration is measured.

A confidence head is over-confident, and errors multiply along a block. STS gives each position one
temperature, fitted left to right on the quantity the planner uses: the *product* up to that position.

Noise floor of the measure: a perfectly calibrated predictor does not score an expected calibration error
(ECE) of 0. With N rounds spread over `bins` bins, each bin's observed rate is off by a standard deviation of
sqrt(p (1 - p) bins / N), whose mean absolute value is sqrt(2 / pi) = 0.8 of that. At p = 0.6 and 20 bins this
is 3.9 % for 2,000 rounds and 0.8 % for 50,000. Compare an ECE with `ece_noise_floor` before calling it bad.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from scheduler.arguments import F64, ArgumentError, counts, matrix, vector

DEFAULT_GRID: tuple[float, ...] = tuple(float(t) for t in np.geomspace(1 / 8, 8, 97))
MINIMUM_TRIALS = 64


def apply_temperatures(logits: npt.ArrayLike, temperatures: npt.ArrayLike) -> F64:
    """Calibrated confidences sigmoid(logit_k / T_k). Order-preserving at every position.

    Args:
        logits: [..., gamma] raw confidence logits; NaN stays NaN (and counts as 0 in `survival`).
        temperatures: [gamma], positive.

    Returns:
        [..., gamma] float64 in [0, 1].

    Raises:
        ArgumentError: shapes do not match, or a temperature is not positive and finite.
    """
    scores = np.asarray(logits, dtype=np.float64)
    if scores.ndim < 1:
        raise ArgumentError("logits", "must have at least one dimension, the block's positions")
    scale = vector("temperatures", temperatures, scores.shape[-1])
    if not np.all((scale > 0.0) & np.isfinite(scale)):
        raise ArgumentError("temperatures", f"must be positive and finite, not {scale.tolist()}")
    # The tanh form of the sigmoid neither overflows nor loses the small tail to an exponential.
    return np.asarray(0.5 * (1.0 + np.tanh(0.5 * scores / scale)), dtype=np.float64)


def fit_sts(
    logits: npt.ArrayLike,
    accepted: npt.ArrayLike,
    verified: npt.ArrayLike,
    grid: npt.ArrayLike = DEFAULT_GRID,
    *,
    bins: int = 20,
    minimum_trials: int = MINIMUM_TRIALS,
) -> F64:
    """One temperature per position, left to right, each with the least ECE of the product up to it.

    Rounds are censored by the verified length: round n says something about the product up to k only if
    position k was verified, and its outcome there is `accepted >= k`. (A round that was verified to k and
    refused before k is an honest failure of the product, so it counts.) A position with fewer than
    `minimum_trials` such rounds keeps temperature 1. Equal errors go to the temperature nearest to 1.

    Args:
        logits: [N, gamma] raw confidence logits of N rounds; finite.
        accepted: [N] draft tokens accepted in each round, 0..verified.
        verified: [N] draft tokens verified in each round, 0..gamma.
        grid: candidate temperatures, positive.
        bins: equal-width bins of the ECE.
        minimum_trials: see above.

    Returns:
        [gamma] float64 temperatures.

    Raises:
        ArgumentError: a shape or a range does not hold.

    Source: DSpark paper, sequential temperature scaling.
    """
    scores = matrix("logits", logits)
    if not np.all(np.isfinite(scores)):
        raise ArgumentError("logits", "must be finite")
    rounds, gamma = scores.shape
    tried = counts("verified", verified, rounds, gamma)
    taken = counts("accepted", accepted, rounds, gamma)
    if np.any(taken > tried):
        raise ArgumentError("accepted", "must not exceed verified")
    candidates = np.sort(np.asarray(grid, dtype=np.float64).reshape(-1))
    if candidates.size == 0 or not np.all((candidates > 0.0) & np.isfinite(candidates)):
        raise ArgumentError("grid", "must hold positive finite temperatures")
    # Nearest to 1 first, so that the first least error is the mildest change.
    candidates = candidates[np.argsort(np.abs(np.log(candidates)), kind="stable")]

    temperatures = np.ones(gamma, dtype=np.float64)
    before = np.ones(rounds, dtype=np.float64)
    for k in range(gamma):
        trial = tried > k
        if int(trial.sum()) >= max(1, minimum_trials):
            outcome = taken[trial] > k
            errors = [
                expected_calibration_error(
                    before[trial] * apply_temperatures(scores[trial, k : k + 1], [t])[:, 0], outcome, bins
                )
                for t in candidates
            ]
            temperatures[k] = candidates[int(np.argmin(errors))]
        before = before * apply_temperatures(scores[:, k : k + 1], temperatures[k : k + 1])[:, 0]
    return temperatures


def expected_calibration_error(p: npt.ArrayLike, y: npt.ArrayLike, bins: int = 20) -> float:
    """Mean over rounds of |predicted rate - observed rate| of their bin; bins of equal width on [0, 1].

    Args:
        p: [N] predicted probabilities.
        y: [N] outcomes, 0 or 1.
        bins: number of bins.

    Returns:
        The error in [0, 1]; NaN for N = 0. Its noise floor is `ece_noise_floor`.

    Raises:
        ArgumentError: shapes differ, a probability is outside [0, 1], an outcome is neither 0 nor 1, no bins.
    """
    predicted, outcome = _predictions(p, y)
    if bins < 1:
        raise ArgumentError("bins", f"must be at least 1, not {bins}")
    if predicted.size == 0:
        return math.nan
    index = np.minimum((predicted * bins).astype(np.int64), bins - 1)
    gap = np.bincount(index, weights=predicted - outcome, minlength=bins)
    return float(np.abs(gap).sum() / predicted.size)


def ece_noise_floor(rate: float, rounds: int, bins: int = 20) -> float:
    """ECE that a perfect predictor still shows: sqrt(2 / pi) * sqrt(rate (1 - rate) bins / rounds).

    It is an upper estimate when predictions fill few bins.

    Raises:
        ArgumentError: `rate` is outside [0, 1], or `rounds` or `bins` is less than 1.
    """
    if not 0.0 <= rate <= 1.0:
        raise ArgumentError("rate", f"must be in [0, 1], not {rate}")
    if rounds < 1:
        raise ArgumentError("rounds", f"must be at least 1, not {rounds}")
    if bins < 1:
        raise ArgumentError("bins", f"must be at least 1, not {bins}")
    return math.sqrt(2.0 / math.pi) * math.sqrt(rate * (1.0 - rate) * bins / rounds)


def auc(p: npt.ArrayLike, y: npt.ArrayLike) -> float:
    """Probability that an accepted round was given a higher score than a refused one, ties counting half.

    Args:
        p: [N] predicted probabilities.
        y: [N] outcomes, 0 or 1.

    Returns:
        The area under the ROC curve; NaN if one of the two outcomes does not occur.

    Raises:
        ArgumentError: as for `expected_calibration_error`.
    """
    predicted, outcome = _predictions(p, y)
    positives = int(outcome.sum())
    negatives = outcome.size - positives
    if positives == 0 or negatives == 0:
        return math.nan
    _, inverse, group = np.unique(predicted, return_inverse=True, return_counts=True)
    # Mean rank (from 1) of each group of equal scores: the Mann-Whitney statistic with ties.
    mean_rank = np.cumsum(group) - (group - 1) / 2.0
    rank_sum = float(mean_rank[inverse][outcome == 1.0].sum())
    return (rank_sum - positives * (positives + 1) / 2.0) / (positives * negatives)


def _predictions(p: npt.ArrayLike, y: npt.ArrayLike) -> tuple[F64, F64]:
    predicted = np.asarray(p, dtype=np.float64)
    if predicted.ndim != 1:
        raise ArgumentError("p", f"must have one dimension, not {predicted.ndim}")
    if not np.all((predicted >= 0.0) & (predicted <= 1.0)):
        raise ArgumentError("p", "must be in [0, 1]")
    outcome = vector("y", y, predicted.size)
    if not np.all((outcome == 0.0) | (outcome == 1.0)):
        raise ArgumentError("y", "must be 0 or 1")
    return predicted, outcome
