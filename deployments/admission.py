"""The bounded queues at the door: how many requests of a tier may wait for their first token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from deployments.errors import OverloadedError
from scheduler.tiers import Tier

SMOOTHING = 0.2  # weight of the newest wait in the mean
LONGEST_RETRY_S = 60.0


class Admission:
    """Counts the waiting requests of every tier, and refuses what would exceed `max_queued`.

    It lives in the gateway because the queue bound of a Serve handle holds for each caller alone.
    A request counts from its admission to its first token, so `max_queued` 0 closes a tier.
    """

    def __init__(self, tiers: Sequence[Tier]) -> None:
        self._limit = {tier.name: tier.max_queued for tier in tiers}
        self._waiting = dict.fromkeys(self._limit, 0)
        self._wait_s = dict.fromkeys(self._limit, 0.0)

    def waiting(self, tier: str) -> int:
        return self._waiting[tier]

    def enter(self, tier: str) -> None:
        """Let a request of `tier` in; `leave` must follow.

        Raises:
            OverloadedError: the queue is full. By Little's law it drains in about the time that requests
                lately waited in it, so that is what the client is told to wait.
        """
        limit = self._limit[tier]
        if self._waiting[tier] >= limit:
            raise OverloadedError(
                min(max(self._wait_s[tier], 1.0), LONGEST_RETRY_S),
                f"the queue of service_tier {tier!r} is full ({limit} requests are waiting); try again later",
            )
        self._waiting[tier] += 1

    @contextmanager
    def held(self, tier: str) -> Iterator[None]:
        """Count a request while its prompt is made, so that a flood of long prompts is bounded too.

        Raises:
            OverloadedError: as `enter`.
        """
        self.enter(tier)
        try:
            yield
        finally:
            self.leave(tier, None)

    def leave(self, tier: str, waited_s: float | None) -> None:
        """A request waits no more: it got its first token after `waited_s` seconds, or None if never."""
        self._waiting[tier] -= 1
        if waited_s is not None:
            mean = self._wait_s[tier]
            self._wait_s[tier] = mean + SMOOTHING * (waited_s - mean) if mean else waited_s
