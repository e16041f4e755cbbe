"""Service tiers: what a request may ask for with OpenAI's `service_tier`, and what it is promised."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field, field_validator

from scheduler.arguments import ArgumentError

DEFAULT_TIER = "default"


class UnknownTierError(ValueError):
    """A tier that the settings do not have.

    Attributes:
        param: the API field, "service_tier".
        name: what was asked for.
        known: the names there are, "auto" among them.
    """

    def __init__(self, name: str, known: tuple[str, ...]) -> None:
        super().__init__(f"service_tier must be one of {', '.join(known)}, not {name!r}")
        self.param = "service_tier"
        self.name = name
        self.known = known


class Tier(BaseModel):
    """One service tier.

    Attributes:
        name: as in `service_tier`; "auto" is taken.
        weight: value of one of its tokens to the planner, relative to other tiers.
        priority: lower is served first.
        tokens_per_second: rate promised to each user; None is best effort.
        time_to_first_token_s: promised time to the first token in seconds; None is best effort.
        max_queued: requests that may wait before further ones are refused with 429.
        description: one line for people.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = Field(min_length=1, pattern=r"^[a-z0-9_-]+$")
    weight: float = Field(gt=0.0)
    priority: int
    tokens_per_second: float | None = Field(default=None, gt=0.0)
    time_to_first_token_s: float | None = Field(default=None, gt=0.0)
    max_queued: int = Field(ge=0)
    description: str = ""

    @field_validator("name")
    @classmethod
    def _name_is_free(cls, name: str) -> str:
        if name == "auto":
            raise ArgumentError("name", 'must not be "auto", which stands for the default tier')
        return name


DEFAULT_TIERS: tuple[Tier, ...] = (
    Tier(
        name="priority",
        weight=4.0,
        priority=0,
        tokens_per_second=15.0,
        time_to_first_token_s=1.0,
        max_queued=32,
        description="Served first, at a promised rate.",
    ),
    Tier(
        name=DEFAULT_TIER,
        weight=1.0,
        priority=1,
        tokens_per_second=5.0,
        time_to_first_token_s=5.0,
        max_queued=128,
        description="What a request gets that asks for nothing.",
    ),
    Tier(
        name="flex",
        weight=0.25,
        priority=2,
        max_queued=512,
        description="Best effort: uses what the others leave.",
    ),
)


def check_tiers(tiers: Sequence[Tier]) -> None:
    """Refuse a set of tiers in which a request could not be placed.

    Raises:
        ArgumentError: two tiers share a name, or none is called "default".
    """
    names = [tier.name for tier in tiers]
    if len(set(names)) != len(names):
        raise ArgumentError("tiers", f"must have distinct names, not {names}")
    if DEFAULT_TIER not in names:
        raise ArgumentError("tiers", f"must contain one named {DEFAULT_TIER!r}, not only {names}")


def tier_named(tiers: Sequence[Tier], name: str | None) -> Tier:
    """The tier that `service_tier: name` asks for. None and OpenAI's "auto" mean "default".

    Raises:
        UnknownTierError: there is none of that name; lists those there are.
    """
    wanted = DEFAULT_TIER if name is None or name == "auto" else name
    for tier in tiers:
        if tier.name == wanted:
            return tier
    raise UnknownTierError(wanted, ("auto", *(tier.name for tier in tiers)))
