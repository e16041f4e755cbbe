"""What a verifier tells the controller about the interval since its last report."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field, model_validator

from scheduler.arguments import ArgumentError


class TierReport(BaseModel):
    """One tier on one replica.

    Attributes:
        running, waiting: requests at the moment of the report.
        tokens_per_second: tokens emitted per second, all its requests together.
        drafted, verified, accepted: draft tokens in the interval; each at most the one before.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    running: int = Field(default=0, ge=0)
    waiting: int = Field(default=0, ge=0)
    tokens_per_second: float = Field(default=0.0, ge=0.0)
    drafted: int = Field(default=0, ge=0)
    verified: int = Field(default=0, ge=0)
    accepted: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _ordered(self) -> TierReport:
        if self.verified > self.drafted:
            raise ArgumentError("verified", f"must not exceed drafted: {self.verified} > {self.drafted}")
        if self.accepted > self.verified:
            raise ArgumentError("accepted", f"must not exceed verified: {self.accepted} > {self.verified}")
        return self


class VerifierReport(BaseModel):
    """One replica over one interval. Travels as JSON.

    Attributes:
        replica_id: Serve's id of the replica.
        policy_version: version of the policy that was in force.
        tiers: by tier name.
        position_trials, position_accepts: [gamma] conditional trials and acceptances of each position
            (`scheduler.gate.conditional_trials`).
        steps: steps taken in the interval.
        mean_step_seconds: what a step took; 0 without steps.
        predicted_step_seconds: mean of what the plans of these steps predicted; None without a cost model.
        free_pages: pages of the KV pool that are free.
        temperatures: [gamma] STS temperatures refitted on this replica's own rounds; None if it has not.
        temperature_rounds: rounds that fit rests on.

    Raises:
        pydantic.ValidationError: a field is out of range; names it.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    replica_id: str = Field(min_length=1)
    policy_version: int = Field(ge=0)
    tiers: dict[str, TierReport] = Field(default_factory=dict)
    position_trials: tuple[int, ...] = ()
    position_accepts: tuple[int, ...] = ()
    steps: int = Field(default=0, ge=0)
    mean_step_seconds: float = Field(default=0.0, ge=0.0)
    predicted_step_seconds: float | None = Field(default=None, ge=0.0)
    free_pages: int = Field(ge=0)
    temperatures: tuple[float, ...] | None = None
    temperature_rounds: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _positions_hold(self) -> VerifierReport:
        if len(self.position_accepts) != len(self.position_trials):
            raise ArgumentError("position_accepts", "must have as many entries as position_trials")
        if any(not 0 <= a <= t for a, t in zip(self.position_accepts, self.position_trials, strict=True)):
            raise ArgumentError("position_accepts", "must be between 0 and position_trials")
        if self.temperatures is not None:
            if any(t <= 0.0 for t in self.temperatures):
                raise ArgumentError("temperatures", f"must be positive, not {self.temperatures}")
            if self.temperature_rounds < 1:
                raise ArgumentError("temperature_rounds", "must be at least 1 where temperatures are given")
        return self
