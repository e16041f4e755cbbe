"""The controller's decision: the next verify policy, from the last one and what verifiers report."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.arguments import ArgumentError
from scheduler.costs import StepCosts
from scheduler.policy import VerifyPolicy, tier_weights
from scheduler.report import VerifierReport
from scheduler.tiers import Tier

TEMPERATURE_HYSTERESIS = 0.02


def next_policy(
    previous: VerifyPolicy,
    reports: Sequence[VerifierReport],
    tiers: Sequence[Tier],
    now: float,
    *,
    costs: StepCosts | None = None,
) -> VerifyPolicy:
    """The policy to publish at `now`.

    Weights are the tiers'. Temperatures are pooled over the replicas that refitted them. The cost model is
    `costs` where a new profile is given, else the previous one. Load and step times in the reports do not
    change the policy: a verifier's planner already sees both as they are in each step.

    The version rises by one if the content differs from the previous one, else only `issued_at` is renewed.
    A policy from a safe default (which never expires) gets the default time to live.

    Args:
        previous: the policy last published, or a safe default.
        reports: the latest report of each replica; at most one each.
        tiers: the settings' tiers.
        now: seconds, wall time.
        costs: a newly measured cost model, if there is one.

    Raises:
        ArgumentError: two reports of one replica, temperatures for another block size, or bad tiers.
    """
    replicas = [report.replica_id for report in reports]
    if len(set(replicas)) != len(replicas):
        raise ArgumentError("reports", f"must hold one report per replica, not {replicas}")
    time_to_live_s = previous.time_to_live_s
    if time_to_live_s is None:
        time_to_live_s = VerifyPolicy.model_fields["time_to_live_s"].default
    candidate = VerifyPolicy(
        version=previous.version,
        issued_at=now,
        time_to_live_s=time_to_live_s,
        weights=tier_weights(tiers),
        temperatures=_pooled_temperatures(previous.temperatures, reports),
        costs=previous.costs if costs is None else costs,
        hysteresis=previous.hysteresis,
        probe_interval_steps=previous.probe_interval_steps,
    )
    if candidate.same_content(previous):
        return candidate
    return candidate.model_copy(update={"version": previous.version + 1})


def _pooled_temperatures(
    previous: tuple[float, ...] | None, reports: Sequence[VerifierReport]
) -> tuple[float, ...] | None:
    """Mean of the reported temperatures in log space, by rounds; the previous ones if none moved by 2 %."""
    fitted = [report for report in reports if report.temperatures is not None]
    if not fitted:
        return previous
    sizes = {report.replica_id: len(report.temperatures or ()) for report in fitted}
    expected = next(iter(sizes.values())) if previous is None else len(previous)
    for replica_id, size in sizes.items():
        if size != expected:
            raise ArgumentError("temperatures", f"of replica {replica_id} must have {expected} entries, not {size}")
    # A temperature is a scale, so the middle of 0.5 and 2 is 1.
    logs = np.log(np.array([report.temperatures for report in fitted], dtype=np.float64))
    pooled = np.exp(np.average(logs, axis=0, weights=[report.temperature_rounds for report in fitted]))
    if previous is not None and np.all(np.abs(pooled / np.array(previous) - 1.0) <= TEMPERATURE_HYSTERESIS):
        return previous
    return tuple(float(t) for t in pooled)
