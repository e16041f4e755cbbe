"""Non-anticipation of the planner, checked on itself and on planners that are known to break it.

For every request r and every k: changing c_{k+1..gamma} of r, in whatever way, never changes
min(length of r, k). The check is exact (no statistics): one counterexample fails it.
"""

from dataclasses import dataclass

import numpy as np
import pytest

from scheduler.costs import StepCosts
from scheduler.planner import plan_prefixes
from scheduler.survival import survival

PLANS = 20_000


@dataclass(frozen=True)
class Case:
    confidence: np.ndarray
    weights: np.ndarray
    costs: StepCosts
    base_tokens: int
    base_value: float
    limits: np.ndarray
    sunk_seconds: float
    max_draft_tokens: int | None


def random_case(rng):
    requests, gamma = int(rng.integers(1, 7)), int(rng.integers(1, 8))
    confidence = rng.beta(rng.choice([1.0, 3.0, 8.0]), 1.0, (requests, gamma))
    if rng.random() < 0.3:
        confidence = np.round(confidence * 4) / 4  # ties within and between requests
    weights = rng.choice([0.25, 1.0, 4.0], requests)
    # Jagged: flat pieces and sudden rises, as padding to the shapes of a kernel makes them.
    sizes = np.arange(1, 72, int(rng.integers(1, 4)))
    rises = rng.exponential(1.0, sizes.size) * (rng.random(sizes.size) < rng.choice([0.2, 0.5, 1.0]))
    seconds = rng.uniform(0.5, 4.0) + np.cumsum(rises) * rng.choice([0.05, 0.2, 0.6])
    return Case(
        confidence=confidence,
        weights=weights,
        costs=StepCosts(tokens=tuple(sizes.tolist()), seconds=tuple(seconds.tolist())),
        base_tokens=requests + int(rng.integers(0, 25)),
        base_value=float(weights.sum()),
        limits=np.where(rng.random(requests) < 0.6, gamma, rng.integers(0, gamma + 1, requests)),
        sunk_seconds=float(rng.choice([0.0, 0.5])),
        max_draft_tokens=None if rng.random() < 0.7 else int(rng.integers(0, 20)),
    )


def the_planner(case, confidence):
    return plan_prefixes(
        survival(confidence),
        case.weights,
        case.costs,
        base_tokens=case.base_tokens,
        base_value=case.base_value,
        limits=case.limits,
        sunk_seconds=case.sunk_seconds,
        max_draft_tokens=case.max_draft_tokens,
    ).lengths


def global_search(case, confidence):
    """Faulty: the unrestricted maximum of theta over the same admission order."""
    requests, gamma = confidence.shape
    gains = (case.weights[:, None] * survival(confidence)).T.ravel()
    allowed = np.flatnonzero((np.arange(gamma)[:, None] < case.limits[None, :]).ravel())
    order = allowed[np.argsort(-gains[allowed], kind="stable")][: case.max_draft_tokens]
    value = case.base_value + np.concatenate(([0.0], np.cumsum(gains[order])))
    seconds = case.sunk_seconds + case.costs.verify_seconds(case.base_tokens + np.arange(order.size + 1))
    best = int(np.argmax(value / seconds))
    return np.bincount(order[:best] % requests, minlength=requests)


def lengths_rounded_down(case, confidence):
    """Faulty: the planner's lengths, each rounded down to a bucket of 0, 2, 4, 6."""
    return the_planner(case, confidence) // 2 * 2


def total_rounded_down(case, confidence):
    """Faulty: the planner's number of draft tokens, rounded down to a multiple of 4 after planning."""
    total = int(the_planner(case, confidence).sum()) // 4 * 4
    limited = plan_prefixes(
        survival(confidence),
        case.weights,
        None,
        base_tokens=case.base_tokens,
        base_value=case.base_value,
        limits=case.limits,
        max_draft_tokens=total,
    )
    return limited.lengths


def count_violations(planner, plans, seed):
    """Plans that anticipate, and how often a change of confidences changed any length at all."""
    rng = np.random.default_rng(seed)
    violations = reactions = 0
    for _ in range(plans):
        case = random_case(rng)
        requests, gamma = case.confidence.shape
        r, k = int(rng.integers(requests)), int(rng.integers(0, gamma + 1))
        before = planner(case, case.confidence)
        anticipated = False
        for later in (rng.random(gamma - k), rng.choice([0.0, 1.0, np.nan], gamma - k)):
            changed = case.confidence.copy()
            changed[r, k:] = later
            after = planner(case, changed)
            anticipated |= bool(min(before[r], k) != min(after[r], k))
            reactions += bool(np.any(before != after))
        violations += anticipated
    return violations, reactions


def test_the_planner_never_anticipates():
    violations, reactions = count_violations(the_planner, PLANS, seed=0)
    assert violations == 0
    assert reactions > PLANS / 10  # the changes do reach the plans


@pytest.mark.parametrize("faulty", [global_search, lengths_rounded_down, total_rounded_down])
def test_faulty_planners_are_caught(faulty):
    violations, _ = count_violations(faulty, PLANS // 10, seed=0)
    assert violations > 0
