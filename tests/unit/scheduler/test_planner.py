import numpy as np
import pytest

from scheduler.arguments import ArgumentError
from scheduler.costs import StepCosts
from scheduler.planner import plan_prefixes
from scheduler.survival import survival

STEEP = StepCosts(tokens=(1, 2), seconds=(1.0, 2.0))  # a token more costs as much as the first
FLAT = StepCosts(tokens=(1, 1000), seconds=(1.0, 1.0))


def obvious_algorithm_1(a, weights, costs, *, base_tokens, base_value, limits, sunk_seconds=0.0, max_draft_tokens=None):
    """Algorithm 1 as one would write it down, a position at a time."""
    waiting = [(-weights[r] * a[r][j], j, r) for r in range(len(a)) for j in range(len(a[r])) if j < limits[r]]
    waiting.sort()
    lengths = [0] * len(a)
    admitted, value, expected = 0, base_value, 0.0
    best = None if costs is None else value / (sunk_seconds + costs.verify_seconds(base_tokens))
    for negative_gain, j, r in waiting:
        if max_draft_tokens is not None and admitted == max_draft_tokens:
            break
        if costs is not None:
            theta = (value - negative_gain) / (sunk_seconds + costs.verify_seconds(base_tokens + admitted + 1))
            if theta <= best:
                break
            best = theta
        value -= negative_gain
        admitted += 1
        expected += a[r][j]
        lengths[r] = j + 1
    seconds = None if costs is None else sunk_seconds + costs.verify_seconds(base_tokens + admitted)
    return lengths, expected, seconds


def random_staircase(rng):
    sizes = np.unique(np.append(rng.integers(1, 60, rng.integers(1, 12)), (1, 60)))
    rises = rng.exponential(1.0, sizes.size) * (rng.random(sizes.size) < 0.6)
    seconds = rng.uniform(0.5, 5) + np.cumsum(rises) * rng.choice([0.05, 0.3, 1.0])
    return StepCosts(tokens=tuple(sizes.tolist()), seconds=tuple(seconds.tolist()))


def test_equals_the_obvious_loop_on_thousands_of_cases():
    rng = np.random.default_rng(0)
    stopped = 0
    for case in range(4_000):
        requests, gamma = int(rng.integers(0, 7)), int(rng.integers(1, 8))
        confidence = rng.beta(3, 1, (requests, gamma))
        if case % 3 == 0:
            confidence = np.round(confidence * 4) / 4  # ties, zeros and ones
        a = survival(confidence)
        weights = rng.choice([0.25, 1.0, 4.0], requests)
        arguments = {
            "base_tokens": requests + int(rng.integers(0, 20)),
            "base_value": float(weights.sum()) + float(rng.choice([0.0, 1.0])),
            "limits": rng.integers(0, gamma + 1, requests),
            "sunk_seconds": float(rng.choice([0.0, 0.5])),
            "max_draft_tokens": None if rng.random() < 0.7 else int(rng.integers(0, 12)),
        }
        costs = None if rng.random() < 0.1 else random_staircase(rng)
        plan = plan_prefixes(a, weights, costs, **arguments)
        lengths, expected, seconds = obvious_algorithm_1(a.tolist(), weights.tolist(), costs, **arguments)
        assert plan.lengths.tolist() == lengths, case
        assert plan.expected_tokens == pytest.approx(expected, abs=1e-9)
        assert plan.predicted_seconds == seconds
        assert plan.lengths.dtype == np.int64
        stopped += 0 < plan.lengths.sum() < arguments["limits"].sum()
    assert stopped > 500  # plans that end in the middle, not only all or nothing


def plan(a, weights=None, costs=FLAT, **changes):
    a = np.asarray(a, dtype=float)
    w = np.ones(len(a)) if weights is None else weights
    arguments = {
        "base_tokens": len(a),
        "base_value": float(np.sum(w)),
        "limits": np.full(len(a), a.shape[1]),
    } | changes
    return plan_prefixes(a, w, costs, **arguments)


def test_free_tokens_are_all_verified_and_dear_ones_not():
    assert plan([[0.9, 0.5], [0.8, 0.1]]).lengths.tolist() == [2, 2]
    nothing = plan([[0.9, 0.5], [0.8, 0.1]], costs=STEEP)
    assert nothing.lengths.tolist() == [0, 0]
    assert nothing.expected_tokens == 0.0
    assert nothing.predicted_seconds == 2.0


def test_a_survival_of_zero_is_never_worth_a_token_even_a_free_one():
    assert plan([[0.9, 0.0]]).lengths.tolist() == [1]


def test_it_stops_at_the_first_stall_even_if_more_would_pay():
    stall = StepCosts(tokens=(1, 2, 3), seconds=(1.0, 2.0, 2.0))
    assert plan([[1.0, 1.0]], costs=stall).lengths.tolist() == [0]  # 3 tokens in 2 s would be more


def test_weights_decide_between_requests_only():
    a = [[0.5, 0.4], [0.9, 0.8]]
    assert plan(a, max_draft_tokens=2).lengths.tolist() == [0, 2]
    assert plan(a, np.array([4.0, 1.0]), max_draft_tokens=2).lengths.tolist() == [2, 0]


def test_ties_go_by_position_then_by_row():
    a = [[0.5, 0.5, 0.5]] * 3
    assert plan(a, max_draft_tokens=4).lengths.tolist() == [2, 1, 1]


def test_seconds_already_spent_make_more_tokens_worth_it():
    costs = StepCosts(tokens=(1, 2), seconds=(1.0, 1.6))
    assert plan([[0.5]], costs=costs).lengths.tolist() == [0]
    later = plan([[0.5]], costs=costs, sunk_seconds=1.0)
    assert later.lengths.tolist() == [1]
    assert later.predicted_seconds == pytest.approx(2.6)


def test_limits_cut_before_anything_is_ordered():
    a = [[0.9, 0.9, 0.9], [0.3, 0.2, 0.1]]
    assert plan(a, limits=[1, 3]).lengths.tolist() == [1, 3]
    assert plan(a, limits=[0, 0]).lengths.tolist() == [0, 0]


def test_no_cost_model_trims_nothing():
    untrimmed = plan([[0.9, 0.0], [0.1, 0.0]], costs=None, limits=[2, 1])
    assert untrimmed.lengths.tolist() == [2, 1]
    assert untrimmed.predicted_seconds is None
    assert plan([[0.9, 0.0], [0.1, 0.0]], costs=None, max_draft_tokens=1).lengths.tolist() == [1, 0]


def test_no_requests():
    empty = plan_prefixes(np.zeros((0, 7)), [], FLAT, base_tokens=5, base_value=0.0, limits=[])
    assert empty.lengths.shape == (0,)
    assert empty.expected_tokens == 0.0
    assert empty.predicted_seconds == 1.0


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"survival": [[0.5, 0.6]]}, "survival"),
        ({"survival": [[np.nan, 0.0]]}, "survival"),
        ({"survival": [[1.1, 0.6]]}, "survival"),
        ({"weights": [0.0]}, "weights"),
        ({"weights": [np.inf]}, "weights"),
        ({"weights": [1.0, 1.0]}, "weights"),
        ({"limits": [3]}, "limits"),
        ({"limits": [-1]}, "limits"),
        ({"limits": [1.5]}, "limits"),
        ({"base_tokens": -1}, "base_tokens"),
        ({"base_value": np.nan}, "base_value"),
        ({"sunk_seconds": -0.1}, "sunk_seconds"),
        ({"max_draft_tokens": -1}, "max_draft_tokens"),
    ],
)
def test_bad_arguments_are_refused_by_name(changes, param):
    arguments = {
        "survival": [[0.5, 0.4]],
        "weights": [1.0],
        "costs": FLAT,
        "base_tokens": 1,
        "base_value": 1.0,
        "limits": [2],
    } | changes
    with pytest.raises(ArgumentError) as refused:
        plan_prefixes(**arguments)
    assert refused.value.param == param
