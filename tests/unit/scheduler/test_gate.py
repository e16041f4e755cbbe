import itertools

import numpy as np
import pytest

from scheduler.arguments import ArgumentError
from scheduler.costs import StepCosts
from scheduler.gate import SurvivalEstimate, choose_drafted, conditional_trials, probe_due
from scheduler.planner import plan_prefixes

# A draft of n requests takes 0.1 + 0.1 n; a verify pass 1 + 0.1 per token past the first.
COSTS = StepCosts(
    tokens=(1, 101),
    seconds=(1.0, 11.0),
    draft_requests=(1, 11),
    draft_seconds=(0.1, 1.1),
    link_seconds=0.1,
)


def choose(a, weights=None, eligible=None, costs=COSTS, **changes):
    a = np.asarray(a, dtype=float)
    arguments = {"other_tokens": 0, "previously_on": False, "hysteresis": 0.0} | changes
    w = np.ones(len(a)) if weights is None else weights
    may = np.ones(len(a), bool) if eligible is None else np.asarray(eligible, bool)
    return choose_drafted(a, w, may, costs, **arguments).tolist()


def best_by_enumeration(a, weights, eligible, costs, other_tokens):
    """Highest predicted throughput over every subset of requests and every length of each."""
    requests, gamma = a.shape
    best = -np.inf
    for lengths in itertools.product(*(range(gamma + 1 if e else 1) for e in eligible)):
        drafted = sum(length > 0 for length in lengths)
        if drafted:
            gain = sum(w * row[:length].sum() for w, row, length in zip(weights, a, lengths, strict=True))
            seconds = costs.draft(drafted) + costs.verify_seconds(requests + other_tokens + sum(lengths))
            best = max(best, (weights.sum() + gain) / seconds)
    return best


def test_good_drafts_are_made_and_hopeless_ones_not():
    assert choose([[0.95, 0.9, 0.85]]) == [True]
    assert choose([[0.1, 0.0, 0.0]]) == [False]


def test_only_the_requests_that_pay_are_drafted():
    assert choose([[0.01, 0.0], [0.99, 0.98], [0.0, 0.0]]) == [False, True, False]


def test_only_eligible_requests_are_drafted():
    assert choose([[0.95, 0.9], [0.99, 0.98]], eligible=[True, False]) == [True, False]
    assert choose([[0.95, 0.9]], eligible=[False]) == [False]


def test_weights_count():
    a = [[0.3, 0.2], [0.3, 0.2]]
    assert choose(a, np.array([20.0, 1.0])) == [True, False]


def test_the_draft_has_to_earn_its_own_time():
    free = COSTS.model_copy(update={"draft_requests": (), "draft_seconds": (), "link_seconds": 0.0})
    assert choose([[0.25]], costs=free) == [True]
    assert choose([[0.25]]) == [False]


def test_a_long_prefill_in_the_step_hides_the_cost_of_drafting():
    assert choose([[0.25]]) == [False]
    assert choose([[0.25]], other_tokens=50) == [True]


def test_hysteresis_holds_the_last_decision():
    just_better, just_worse = [[0.31]], [[0.29]]  # break-even at 1.3 s against 1 s: 0.30
    assert choose(just_better) == [True]
    assert choose(just_worse) == [False]
    assert choose(just_better, hysteresis=0.05) == [False]
    assert choose(just_better, hysteresis=0.05, previously_on=True) == [True]
    # Drafting at a loss is never worth holding on to, however small the loss.
    assert choose(just_worse, hysteresis=0.05, previously_on=True) == [False]
    assert choose([[0.5]], hysteresis=0.05) == [True]
    assert choose([[0.1]], hysteresis=0.05, previously_on=True) == [False]


def test_with_equal_requests_the_search_finds_the_best_of_all_plans():
    rng = np.random.default_rng(0)
    for _ in range(300):
        requests, gamma = int(rng.integers(1, 5)), int(rng.integers(1, 4))
        # Rows in one order at every position, so that ranking by total gain is ranking by any position.
        a = np.cumprod(np.sort(rng.uniform(0, 1, (requests, gamma)), axis=0), axis=1)
        weights = np.ones(requests)
        eligible = rng.random(requests) < 0.8
        other = int(rng.integers(0, 8))
        plain = requests / COSTS.verify_seconds(requests + other)
        best = best_by_enumeration(a, weights, eligible, COSTS, other)
        chosen = choose(a, weights, eligible, other_tokens=other)
        assert any(chosen) == (best > plain * (1 + 1e-12))
        if any(chosen):
            reached = best_by_enumeration(a, weights, np.array(chosen), COSTS, other)
            assert reached == pytest.approx(best, rel=1e-12)


def test_a_gain_that_the_planner_cannot_reach_does_not_keep_drafting_on():
    # The first draft token costs a step of the staircase, the next ones nothing: five would pay, one does not.
    costs = StepCosts(tokens=(1, 2, 6), seconds=(1.0, 1.9, 1.9), draft_requests=(1, 2), draft_seconds=(0.1, 0.1))
    a = np.full((1, 5), 0.8)
    assert (1 + a.sum()) / (1.9 + 0.1) > 1.0
    for previously_on in (False, True):
        assert choose(a, costs=costs, previously_on=previously_on) == [False]


def test_whoever_is_drafted_gets_something_verified_by_the_planner_at_the_same_survival():
    rng = np.random.default_rng(4)
    drafted = 0
    for _ in range(500):
        requests, gamma = int(rng.integers(1, 6)), int(rng.integers(1, 6))
        a = np.cumprod(rng.uniform(0.2, 1, (requests, gamma)), axis=1)
        steps = np.cumsum(rng.choice([0.0, 0.01, 0.3], size=40)) + 1.0
        costs = StepCosts(
            tokens=tuple(range(1, 41)), seconds=tuple(steps), draft_requests=(1, 2), draft_seconds=(0.05, 0.06)
        )
        weights = np.ones(requests)
        chosen = np.array(choose(a, costs=costs, previously_on=bool(rng.integers(2))))
        if chosen.any():
            drafted += 1
            plan = plan_prefixes(
                a[chosen],
                weights[chosen],
                costs,
                base_tokens=requests,
                base_value=float(requests),
                limits=np.full(int(chosen.sum()), gamma),
                sunk_seconds=costs.draft(int(chosen.sum())),
            )
            assert plan.lengths.sum() > 0
            assert plan.predicted_seconds is not None
            theta = (requests + plan.expected_tokens) / plan.predicted_seconds
            assert theta > requests / costs.verify_seconds(requests)
    assert drafted > 50


def test_many_requests():
    a = np.tile(np.linspace(0.99, 0.8, 7), (200, 1))
    chosen = choose(a, costs=StepCosts(tokens=(1, 5000), seconds=(1.0, 2.0)))
    assert all(chosen)


def test_no_cost_model_drafts_all_that_are_eligible():
    assert choose([[0.0], [0.0]], eligible=[True, False], costs=None) == [True, False]


def test_no_requests():
    assert choose(np.zeros((0, 5))) == []


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"mean_survival": [[0.1, 0.2]]}, "mean_survival"),
        ({"weights": [-1.0]}, "weights"),
        ({"eligible": [1]}, "eligible"),
        ({"eligible": [True, True]}, "eligible"),
        ({"other_tokens": -1}, "other_tokens"),
        ({"hysteresis": 1.0}, "hysteresis"),
    ],
)
def test_bad_arguments_are_refused_by_name(changes, param):
    arguments = {
        "mean_survival": [[0.5, 0.4]],
        "weights": [1.0],
        "eligible": [True],
        "costs": COSTS,
        "other_tokens": 0,
        "previously_on": False,
    } | changes
    with pytest.raises(ArgumentError) as refused:
        choose_drafted(**arguments)
    assert refused.value.param == param


def test_probes():
    assert [probe_due(n, 3) for n in range(5)] == [False, False, False, True, True]
    with pytest.raises(ArgumentError, match="interval"):
        probe_due(0, 0)
    with pytest.raises(ArgumentError, match="steps_since_last_probe"):
        probe_due(-1, 1)


def test_trials_are_censored():
    # verified 3 accepted 1: trials of 1 and 2; verified 1 accepted 1: of 1 only; verified 0: of none.
    trials, accepts = conditional_trials([1, 1, 0, 3], [3, 1, 0, 3], 3)
    assert trials.tolist() == [3, 2, 1]
    assert accepts.tolist() == [3, 1, 1]
    assert [x.tolist() for x in conditional_trials([], [], 2)] == [[0, 0], [0, 0]]
    with pytest.raises(ArgumentError, match="accepted"):
        conditional_trials([2], [1], 3)
    with pytest.raises(ArgumentError, match="verified"):
        conditional_trials([2], [4], 3)


def test_the_estimate_finds_the_conditional_rates_under_censoring():
    rng = np.random.default_rng(0)
    truth = np.array([0.8, 0.5, 0.9])
    verified = rng.integers(0, 4, 20_000)
    run = np.cumprod(rng.random((20_000, 3)) < truth, axis=1).sum(axis=1)
    estimate = SurvivalEstimate.start(3, decay=1.0).update(np.minimum(run, verified), verified)
    np.testing.assert_allclose(estimate.conditional(), truth, atol=0.03)
    np.testing.assert_allclose(estimate.mean_survival(), np.cumprod(truth), atol=0.03)


def test_the_estimate_starts_at_the_prior_and_follows_a_change():
    estimate = SurvivalEstimate.start(2, prior=0.7, prior_trials=4.0, decay=0.9)
    np.testing.assert_allclose(estimate.mean_survival(), [0.7, 0.49])
    start = estimate
    for _ in range(100):
        estimate = estimate.update(0, 2)
    assert estimate.conditional()[0] < 0.25
    assert estimate.conditional()[1] == 0.7  # never a trial: nothing learnt, nothing forgotten
    for _ in range(100):
        estimate = estimate.update(2, 2)
    assert np.all(estimate.conditional() > 0.9)
    assert start.trials.tolist() == [0.0, 0.0]


@pytest.mark.parametrize(
    ("arguments", "param"),
    [
        ({"block_size": 0}, "block_size"),
        ({"prior": 1.1}, "prior"),
        ({"prior_trials": 0.0}, "prior_trials"),
        ({"decay": 0.0}, "decay"),
    ],
)
def test_a_bad_start_is_refused(arguments, param):
    with pytest.raises(ArgumentError) as refused:
        SurvivalEstimate.start(**({"block_size": 2} | arguments))
    assert refused.value.param == param
