import pytest
from pydantic import ValidationError

from scheduler.arguments import ArgumentError
from scheduler.tiers import DEFAULT_TIERS, Tier, UnknownTierError, check_tiers, tier_named


def test_the_default_tiers_hold_together():
    check_tiers(DEFAULT_TIERS)
    assert [tier.name for tier in DEFAULT_TIERS] == ["priority", "default", "flex"]
    assert [tier.priority for tier in DEFAULT_TIERS] == sorted(tier.priority for tier in DEFAULT_TIERS)
    assert DEFAULT_TIERS[-1].tokens_per_second is None


@pytest.mark.parametrize(
    ("asked", "got"), [("flex", "flex"), ("auto", "default"), (None, "default"), ("default", "default")]
)
def test_tiers_by_name(asked, got):
    assert tier_named(DEFAULT_TIERS, asked).name == got


def test_an_unknown_tier_lists_the_names():
    with pytest.raises(UnknownTierError, match="auto, priority, default, flex, not 'gold'") as refused:
        tier_named(DEFAULT_TIERS, "gold")
    assert refused.value.param == "service_tier"
    assert refused.value.known == ("auto", "priority", "default", "flex")


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"weight": 0.0}, "weight"),
        ({"weight": float("inf")}, "weight"),
        ({"name": ""}, "name"),
        ({"name": "auto"}, "name"),
        ({"name": "Gold Tier"}, "name"),
        ({"tokens_per_second": 0.0}, "tokens_per_second"),
        ({"time_to_first_token_s": -1.0}, "time_to_first_token_s"),
        ({"max_queued": -1}, "max_queued"),
        ({"colour": "gold"}, "colour"),
    ],
)
def test_bad_tiers_are_refused_by_name(fields, named):
    with pytest.raises(ValidationError, match=named):
        Tier(**({"name": "gold", "weight": 1.0, "priority": 0, "max_queued": 1} | fields))


def test_sets_in_which_a_request_has_no_place_are_refused():
    with pytest.raises(ArgumentError, match="distinct"):
        check_tiers((*DEFAULT_TIERS, DEFAULT_TIERS[0]))
    with pytest.raises(ArgumentError, match="default"):
        check_tiers(DEFAULT_TIERS[:1])


def test_json_round_trip_and_frozen():
    for tier in DEFAULT_TIERS:
        assert Tier.model_validate_json(tier.model_dump_json()) == tier
    with pytest.raises(ValidationError):
        DEFAULT_TIERS[0].weight = 2.0
