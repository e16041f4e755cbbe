"""The controller deployment: keeps measured costs, receives reports, publishes the verify policy."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path
from typing import Any

from deployments.settings import AppSettings
from scheduler.costs import StepCosts
from scheduler.fleet import next_policy
from scheduler.policy import VerifyPolicy, safe_default
from scheduler.report import VerifierReport

logger = logging.getLogger(__name__)

REPORT_TIMEOUT_S = 10.0


class Controller:
    """Holds the policy and the last report of each verifier; everything runs on without it.

    Args:
        settings: of the application.
    """

    def __init__(self, settings: AppSettings) -> None:
        self._settings = settings
        self._profiles = settings.cache_root / "step_costs"
        self._policy: VerifyPolicy | None = None
        self._reports: dict[str, tuple[float, VerifierReport]] = {}

    async def register(self, key: str, block_size: int, temperatures: list[float]) -> dict[str, Any]:
        """A verifier has started.

        Args:
            key: `engine.loading.profile_key` of its kind.
            block_size: gamma of its drafter.
            temperatures: [gamma] stored with the drafter.

        Returns:
            {"policy": ..., "profile": whether the verifier has to measure its costs and `submit_profile` them}.
        """
        costs = self._load(key)
        if self._policy is None or len(self._policy.temperatures or ()) != block_size:
            default = safe_default(self._settings.tiers, block_size, temperatures=temperatures, costs=costs)
            self._policy = next_policy(default, [], self._settings.tiers, time.time(), costs=costs)
        return {"policy": self._publish(costs), "profile": costs is None}

    async def submit_profile(
        self, key: str, verify: dict[int, list[float]], draft: dict[int, list[float]]
    ) -> dict[str, Any]:
        """Measured seconds by tokens and by requests: kept on disk, and in force from now on."""
        costs = StepCosts.from_profile(verify, draft or None)
        self._profiles.mkdir(parents=True, exist_ok=True)
        path = self._path(key)
        part = path.with_suffix(".part")
        part.write_text(costs.model_dump_json(indent=2))
        part.replace(path)
        logger.info("step costs kept in %s", path)
        return self._publish(costs)

    async def report(self, report: dict[str, Any]) -> dict[str, Any]:
        """A verifier's report; the policy is the answer."""
        parsed = VerifierReport.model_validate(report)
        self._reports[parsed.replica_id] = (time.time(), parsed)
        return self._publish(None)

    async def state(self) -> dict[str, Any]:
        """The policy and the latest reports, for people and tests."""
        return {
            "policy": None if self._policy is None else self._policy.model_dump(mode="json"),
            "reports": {key: report.model_dump(mode="json") for key, (_, report) in self._reports.items()},
        }

    def _publish(self, costs: StepCosts | None) -> dict[str, Any]:
        now = time.time()
        self._reports = {k: (t, r) for k, (t, r) in self._reports.items() if now - t < REPORT_TIMEOUT_S}
        if self._policy is None:  # restarted: the verifiers' own defaults hold until one registers again
            return {}
        reports = [report for _, report in self._reports.values()]
        self._policy = next_policy(self._policy, reports, self._settings.tiers, now, costs=costs)
        return self._policy.model_dump(mode="json")

    def _path(self, key: str) -> Path:
        return self._profiles / f"{key}.json"

    def _load(self, key: str) -> StepCosts | None:
        try:
            return StepCosts.model_validate_json(self._path(key).read_text())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, json.JSONDecodeError) as error:
            logger.warning("saved step costs cannot be read and are measured again: %s", error)
            return None
