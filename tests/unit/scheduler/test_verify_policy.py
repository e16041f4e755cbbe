import pytest
from pydantic import ValidationError

from scheduler.arguments import ArgumentError
from scheduler.costs import StepCosts
from scheduler.fleet import next_policy
from scheduler.policy import VerifyPolicy, safe_default
from scheduler.report import TierReport, VerifierReport
from scheduler.tiers import DEFAULT_TIERS

COSTS = StepCosts(tokens=(1, 8), seconds=(1.0, 2.0), draft_requests=(1,), draft_seconds=(0.1,))
POLICY = VerifyPolicy(
    version=3,
    issued_at=100.0,
    time_to_live_s=5.0,
    weights={"priority": 4.0, "default": 1.0, "flex": 0.25},
    temperatures=(1.0, 2.0),
    costs=COSTS,
)


def report(replica_id, temperatures=None, rounds=0):
    return VerifierReport(
        replica_id=replica_id,
        policy_version=3,
        tiers={"flex": TierReport(running=2, waiting=1, drafted=10, verified=8, accepted=3)},
        position_trials=(8, 3),
        position_accepts=(3, 1),
        steps=4,
        mean_step_seconds=0.1,
        free_pages=10,
        temperatures=temperatures,
        temperature_rounds=rounds,
    )


def test_json_round_trips():
    assert VerifyPolicy.model_validate_json(POLICY.model_dump_json()) == POLICY
    bare = VerifyPolicy(version=0, issued_at=0.0, weights={"default": 1.0})
    assert VerifyPolicy.model_validate_json(bare.model_dump_json()) == bare
    told = report("a", (1.0, 1.5), 10)
    assert VerifierReport.model_validate_json(told.model_dump_json()) == told


def test_a_policy_expires_after_its_time_to_live():
    assert not POLICY.expired(100.0)
    assert not POLICY.expired(105.0)
    assert POLICY.expired(105.1)


def test_the_safe_default_never_expires_and_leaves_confidences_alone():
    default = safe_default(DEFAULT_TIERS, 3)
    assert not default.expired(1e12)
    assert default.version == 0
    assert default.temperatures == (1.0, 1.0, 1.0)
    assert default.costs is None
    assert default.weights == {"priority": 4.0, "default": 1.0, "flex": 0.25}
    own = safe_default(DEFAULT_TIERS, 2, temperatures=[1.5, 2.0], costs=COSTS)
    assert (own.temperatures, own.costs) == ((1.5, 2.0), COSTS)
    with pytest.raises(ArgumentError, match="temperatures must have 3 entries"):
        safe_default(DEFAULT_TIERS, 3, temperatures=[1.0])
    with pytest.raises(ArgumentError, match="block_size"):
        safe_default(DEFAULT_TIERS, 0)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"version": -1}, "version"),
        ({"weights": {}}, "weights"),
        ({"weights": {"default": 0.0}}, "weights"),
        ({"weights": {"default": float("nan")}}, "weights"),
        ({"temperatures": (1.0, 0.0)}, "temperatures"),
        ({"hysteresis": 1.0}, "hysteresis"),
        ({"probe_interval_steps": 0}, "probe_interval_steps"),
        ({"time_to_live_s": 0.0}, "time_to_live_s"),
        ({"price": 1.0}, "price"),
    ],
)
def test_bad_policies_are_refused_by_name(fields, named):
    with pytest.raises(ValidationError, match=named):
        VerifyPolicy(**({"version": 1, "issued_at": 0.0, "weights": {"default": 1.0}} | fields))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"replica_id": ""}, "replica_id"),
        ({"free_pages": -1}, "free_pages"),
        ({"position_accepts": (1,)}, "position_accepts"),
        ({"position_trials": (1,), "position_accepts": (2,)}, "position_accepts"),
        ({"temperatures": (1.0,)}, "temperature_rounds"),
        ({"temperatures": (0.0,), "temperature_rounds": 1}, "temperatures"),
        ({"tiers": {"flex": {"drafted": 1, "verified": 2}}}, "verified"),
        ({"tiers": {"flex": {"drafted": 2, "verified": 1, "accepted": 2}}}, "accepted"),
    ],
)
def test_bad_reports_are_refused_by_name(fields, named):
    with pytest.raises(ValidationError, match=named):
        VerifierReport(**({"replica_id": "a", "policy_version": 0, "free_pages": 1} | fields))


def test_the_same_content_keeps_its_version_and_is_renewed():
    following = next_policy(POLICY, [report("a"), report("b")], DEFAULT_TIERS, 104.0)
    assert following == POLICY.model_copy(update={"issued_at": 104.0})
    assert following.same_content(POLICY)
    assert next_policy(POLICY, [], DEFAULT_TIERS, 104.0).version == 3


def test_new_weights_or_costs_make_a_new_version():
    dearer = (DEFAULT_TIERS[0].model_copy(update={"weight": 8.0}), *DEFAULT_TIERS[1:])
    following = next_policy(POLICY, [], dearer, 104.0)
    assert (following.version, following.weights["priority"]) == (4, 8.0)
    assert following.costs == COSTS
    profiled = StepCosts(tokens=(1, 8), seconds=(1.0, 3.0))
    following = next_policy(POLICY, [], DEFAULT_TIERS, 104.0, costs=profiled)
    assert (following.version, following.costs) == (4, profiled)
    assert not following.same_content(POLICY)


def test_temperatures_are_pooled_by_rounds_in_log_space():
    reports = [report("a", (0.5, 2.0), 100), report("b", (2.0, 2.0), 100), report("c")]
    assert next_policy(POLICY, reports, DEFAULT_TIERS, 1.0).version == 3  # (1, 2), as before
    reports = [report("a", (1.0, 4.0), 300), report("b", (1.0, 2.0), 100)]
    pooled = next_policy(POLICY, reports, DEFAULT_TIERS, 1.0)
    assert pooled.version == 4
    assert pooled.temperatures == pytest.approx((1.0, 2.0 * 2.0**0.75))
    small_move = next_policy(POLICY, [report("a", (1.01, 2.02), 9)], DEFAULT_TIERS, 1.0)
    assert (small_move.version, small_move.temperatures) == (3, POLICY.temperatures)
    untold = POLICY.model_copy(update={"temperatures": None})
    assert next_policy(untold, [report("a", (1.0, 3.0), 9)], DEFAULT_TIERS, 1.0).temperatures == pytest.approx(
        (1.0, 3.0)
    )


def test_a_policy_made_from_a_safe_default_expires():
    first = next_policy(safe_default(DEFAULT_TIERS, 2), [], DEFAULT_TIERS, 50.0, costs=COSTS)
    assert first.version == 1
    assert first.time_to_live_s is not None
    assert first.expired(50.0 + first.time_to_live_s + 1.0)


def test_reports_that_contradict_are_refused():
    with pytest.raises(ArgumentError, match="one report per replica"):
        next_policy(POLICY, [report("a"), report("a")], DEFAULT_TIERS, 1.0)
    with pytest.raises(ArgumentError, match="temperatures of replica a must have 2 entries, not 3"):
        next_policy(POLICY, [report("a", (1.0, 1.0, 1.0), 5)], DEFAULT_TIERS, 1.0)
