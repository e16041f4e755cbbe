"""The verify policy: what the controller tells verifiers, a few times a second, off the token path."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field, model_validator

from scheduler.arguments import ArgumentError
from scheduler.costs import StepCosts
from scheduler.tiers import Tier, check_tiers


class VerifyPolicy(BaseModel):
    """One version of the policy. Travels as JSON.

    Attributes:
        version: rises by one whenever the content changes; 0 is a verifier's own safe default.
        issued_at: seconds on the issuer's clock. Verifiers compare it with theirs, so both use wall time.
        time_to_live_s: age in seconds past which a verifier falls back to its safe default; None is never.
        weights: weight of each tier, positive.
        temperatures: [gamma] STS temperatures of the confidences; None for a verifier that keeps its own.
        costs: step-cost model; None is "not profiled", and nothing is trimmed.
        hysteresis: relative margin of the drafting gate, 0 to below 1.
        probe_interval_steps: steps between probes while the gate is off.

    Raises:
        pydantic.ValidationError: a field is out of range; names it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    version: int = Field(ge=0)
    issued_at: float
    time_to_live_s: float | None = Field(default=30.0, gt=0.0)
    weights: dict[str, float]
    temperatures: tuple[float, ...] | None = None
    costs: StepCosts | None = None
    hysteresis: float = Field(default=0.05, ge=0.0, lt=1.0)
    probe_interval_steps: int = Field(default=64, ge=1)

    @model_validator(mode="after")
    def _values_positive(self) -> VerifyPolicy:
        if not self.weights or any(weight <= 0.0 for weight in self.weights.values()):
            raise ArgumentError("weights", f"must be positive, at least one, not {self.weights}")
        if self.temperatures is not None and any(t <= 0.0 for t in self.temperatures):
            raise ArgumentError("temperatures", f"must be positive, not {self.temperatures}")
        return self

    def expired(self, now: float) -> bool:
        """Whether the policy is older than its time to live at `now` (seconds, the issuer's clock)."""
        return self.time_to_live_s is not None and now - self.issued_at > self.time_to_live_s

    def same_content(self, other: VerifyPolicy) -> bool:
        """Whether both say the same, whatever their version and time."""
        return self.model_copy(update={"version": 0, "issued_at": 0.0}) == other.model_copy(
            update={"version": 0, "issued_at": 0.0}
        )


def tier_weights(tiers: Sequence[Tier]) -> dict[str, float]:
    """Weight of each tier by name.

    Raises:
        ArgumentError: as `check_tiers`.
    """
    check_tiers(tiers)
    return {tier.name: tier.weight for tier in tiers}


def safe_default(
    tiers: Sequence[Tier],
    block_size: int,
    *,
    temperatures: Sequence[float] | None = None,
    costs: StepCosts | None = None,
) -> VerifyPolicy:
    """What a verifier does before the first policy, and after the last one has expired. It never expires.

    Args:
        tiers: the settings' tiers.
        block_size: gamma.
        temperatures: [gamma] those stored with the drafter; None leaves confidences as they are (all 1).
        costs: the verifier's own profile, if it has one.

    Raises:
        ArgumentError: `temperatures` has not `block_size` entries, or the tiers do not hold together.
    """
    if block_size < 1:
        raise ArgumentError("block_size", f"must be at least 1, not {block_size}")
    if temperatures is not None and len(temperatures) != block_size:
        raise ArgumentError("temperatures", f"must have {block_size} entries, not {len(temperatures)}")
    return VerifyPolicy(
        version=0,
        issued_at=0.0,
        time_to_live_s=None,
        weights=tier_weights(tiers),
        temperatures=(1.0,) * block_size if temperatures is None else tuple(temperatures),
        costs=costs,
    )
