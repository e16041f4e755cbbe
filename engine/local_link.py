"""A drafter in the same process, behind the same seam as one across a socket."""

from __future__ import annotations

from engine.drafting import Drafter
from engine.rounds import DraftBatch, DraftReply


class LocalLink:
    """Drafts at once when asked, and keeps the reply until it is collected.

    Args:
        drafter: what drafts; None is a link without anyone at the other end.
    """

    def __init__(self, drafter: Drafter | None) -> None:
        self._drafter = drafter
        self._reply: DraftReply | None = None
        self._generation = 0

    @property
    def ready(self) -> bool:
        """Whether there is a drafter."""
        return self._drafter is not None

    @property
    def generation(self) -> int:
        """Counts `replace` calls."""
        return self._generation

    def replace(self, drafter: Drafter | None) -> None:
        """Another drafter, with no context of anything; a reply of the old one is lost."""
        self._drafter, self._reply = drafter, None
        self._generation += 1

    def submit(self, batch: DraftBatch) -> None:
        """Draft now."""
        if self._drafter is not None:
            self._reply = self._drafter.draft("local", batch)

    def collect(self, round: int, timeout: float) -> DraftReply | None:
        """The reply to `round`, if that was the last one asked for."""
        reply, self._reply = self._reply, None
        return reply if reply is not None and reply.round == round else None
