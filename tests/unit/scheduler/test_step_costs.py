import numpy as np
import pytest
from pydantic import ValidationError

from scheduler.arguments import ArgumentError
from scheduler.costs import StepCosts

COSTS = StepCosts(
    tokens=(1, 4, 8),
    seconds=(1.0, 1.6, 3.6),
    draft_requests=(1, 4),
    draft_seconds=(0.2, 0.5),
    link_seconds=0.05,
)


def test_lines_between_points_floor_below_and_the_last_line_beyond():
    assert COSTS.verify_seconds(0) == 1.0
    assert COSTS.verify_seconds(1) == 1.0
    assert COSTS.verify_seconds(2) == pytest.approx(1.2)
    assert COSTS.verify_seconds(4) == 1.6
    assert COSTS.verify_seconds(6) == pytest.approx(2.6)
    assert COSTS.verify_seconds(8) == pytest.approx(3.6)
    assert COSTS.verify_seconds(10) == pytest.approx(4.6)


def test_a_flat_end_stays_at_the_last_value():
    flat = StepCosts(tokens=(1, 2, 4), seconds=(1.0, 2.0, 2.0))
    assert flat.verify_seconds(1_000) == 2.0


def test_arrays_and_single_sizes_agree_to_the_bit():
    sizes = np.arange(40)
    many = COSTS.verify_seconds(sizes)
    assert many.shape == (40,) and many.dtype == np.float64
    assert many.tolist() == [COSTS.verify_seconds(n) for n in range(40)]
    assert COSTS.draft(sizes).tolist() == [COSTS.draft(n) for n in range(40)]
    assert isinstance(COSTS.verify_seconds(3), float) and isinstance(COSTS.draft(3), float)


def test_drafting_nothing_is_free_and_anything_pays_the_link():
    assert COSTS.draft(0) == 0.0
    assert COSTS.draft(1) == pytest.approx(0.25)
    assert COSTS.draft(2) == pytest.approx(0.35)
    assert COSTS.draft(7) == pytest.approx(0.85)
    assert COSTS.draft(np.array([0, 1])).tolist() == [0.0, COSTS.draft(1)]


def test_drafting_without_a_profile_or_with_one_point():
    bare = StepCosts(tokens=(1, 2), seconds=(1.0, 2.0), link_seconds=0.1)
    assert [bare.draft(n) for n in (0, 1, 9)] == [0.0, 0.1, 0.1]
    single = StepCosts(tokens=(1, 2), seconds=(1.0, 2.0), draft_requests=(2,), draft_seconds=(0.3,))
    assert [single.draft(n) for n in (0, 1, 9)] == [0.0, 0.3, 0.3]


def test_a_profile_takes_medians_then_the_cumulative_maximum():
    costs = StepCosts.from_profile(
        {4: [2.0, 9.0, 2.2], 1: [1.0, 1.2, 1.1], 8: [2.1, 2.0, 2.0], 16: [5.0]},
        {2: [0.3], 1: [0.4]},
        link_seconds=0.01,
    )
    assert costs.tokens == (1, 4, 8, 16)
    assert costs.seconds == (1.1, 2.2, 2.2, 5.0)
    assert (costs.draft_requests, costs.draft_seconds) == ((1, 2), (0.4, 0.4))
    assert costs.link_seconds == 0.01


def test_any_profile_becomes_a_monotone_staircase():
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = rng.choice(np.arange(1, 100), size=rng.integers(2, 12), replace=False)
        costs = StepCosts.from_profile({int(n): rng.uniform(0.1, 5, 3).tolist() for n in sizes})
        assert np.all(np.diff(costs.verify_seconds(np.arange(130))) >= -1e-12)


def test_json_round_trip():
    assert StepCosts.model_validate_json(COSTS.model_dump_json()) == COSTS


def test_is_frozen():
    with pytest.raises(ValidationError):
        COSTS.link_seconds = 1.0


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tokens": (1,), "seconds": (1.0,)}, "tokens"),
        ({"tokens": (), "seconds": ()}, "tokens"),
        ({"tokens": (1, 1), "seconds": (1.0, 1.0)}, "tokens"),
        ({"tokens": (0, 1), "seconds": (1.0, 1.0)}, "tokens"),
        ({"tokens": (1, 2, 3)}, "seconds"),
        ({"seconds": (2.0, 1.0)}, "seconds"),
        ({"seconds": (0.0, 1.0)}, "seconds"),
        ({"seconds": (1.0, float("inf"))}, "seconds"),
        ({"draft_requests": (1,)}, "draft_seconds"),
        ({"draft_requests": (2, 1), "draft_seconds": (1.0, 1.0)}, "draft_requests"),
        ({"link_seconds": -1.0}, "link_seconds"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_bad_tables_are_refused_by_name(fields, named):
    with pytest.raises(ValidationError, match=named):
        StepCosts(**({"tokens": (1, 2), "seconds": (1.0, 2.0)} | fields))


def test_a_size_without_runs_and_a_negative_size_are_refused():
    with pytest.raises(ArgumentError, match="verify"):
        StepCosts.from_profile({1: [1.0], 2: []})
    with pytest.raises(ArgumentError, match="n must not be negative"):
        COSTS.verify_seconds(-1)
