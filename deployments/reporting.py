"""From an engine's counts to a report for the controller."""

from __future__ import annotations

from engine.engine import Engine
from scheduler.report import TierReport, VerifierReport


def report_of(engine: Engine, replica_id: str) -> VerifierReport:
    """What happened since the last report, and the load right now. Takes the counts: the next report starts anew."""
    counts = engine.log.take()
    tiers = {
        name: TierReport(
            running=running,
            waiting=waiting,
            tokens_per_second=counts.tiers[name].emitted / counts.seconds if counts.seconds > 0 else 0.0,
            drafted=counts.tiers[name].drafted,
            verified=counts.tiers[name].verified,
            accepted=counts.tiers[name].accepted,
        )
        for name, (running, waiting) in engine.load().items()
    }
    return VerifierReport(
        replica_id=replica_id,
        policy_version=engine.policy.version,
        tiers=tiers,
        position_trials=tuple(counts.trials_at),
        position_accepts=tuple(counts.accepted_at),
        steps=counts.steps,
        mean_step_seconds=counts.step_seconds / counts.steps if counts.steps else 0.0,
        predicted_step_seconds=counts.predicted_seconds / counts.predicted_steps if counts.predicted_steps else None,
        free_pages=engine.pool.free,
    )
