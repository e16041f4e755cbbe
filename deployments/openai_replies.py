"""The replies of the two endpoints, whole or as the events of a stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from engine.request import FinishReason, TokenChunk


@dataclass(frozen=True)
class Usage:
    """What a request has cost so far, in tokens.

    Attributes:
        accepted, rejected: draft tokens.
    """

    prompt: int
    completion: int = 0
    accepted: int = 0
    rejected: int = 0

    def plus(self, chunk: TokenChunk) -> Usage:
        return Usage(
            self.prompt,
            self.completion + len(chunk.token_ids),
            self.accepted + chunk.accepted,
            self.rejected + chunk.rejected,
        )

    def body(self) -> dict[str, Any]:
        """OpenAI's `usage`."""
        return {
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "completion_tokens_details": {
                "accepted_prediction_tokens": self.accepted,
                "rejected_prediction_tokens": self.rejected,
                "reasoning_tokens": 0,
                "audio_tokens": 0,
            },
        }


@dataclass(frozen=True)
class ReplyHead:
    """What every body about one request repeats.

    Attributes:
        created: Unix time in seconds.
        tier: name of the tier that serves it.
        include_usage: whether a stream ends with a usage event (and says `usage: null` before it).
    """

    id: str
    created: int
    model: str
    tier: str
    include_usage: bool

    def body(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "service_tier": self.tier,
            "choices": choices,
        }


class ReplyForm(Protocol):
    """One endpoint's way of saying the same things."""

    head: ReplyHead

    def whole(self, text: str, finish: FinishReason, usage: Usage) -> dict[str, Any]:
        """The body of an answer that is not streamed."""
        ...

    def opening(self) -> list[dict[str, Any]]:
        """The events before the first text."""
        ...

    def piece(self, text: str, finish: FinishReason | None) -> dict[str, Any]:
        """The event of some text, with the reason of the end if it is the last."""
        ...

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        """The events after the last text."""
        ...


class _Stream:
    """What both endpoints' streams share. `KIND` is the `object` of an event."""

    KIND = ""

    def __init__(self, head: ReplyHead) -> None:
        self.head = head

    def _event(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        event = self.head.body(self.KIND, choices)
        return event | {"usage": None} if self.head.include_usage else event

    def closing(self, usage: Usage) -> list[dict[str, Any]]:
        return [self._event([]) | {"usage": usage.body()}] if self.head.include_usage else []


class CompletionReplies(_Stream):
    """Bodies of /v1/completions."""

    KIND = "text_completion"

    def whole(self, text: str, finish: FinishReason, usage: Usage) -> dict[str, Any]:
        return self.head.body(self.KIND, [self._choice(text, finish)]) | {"usage": usage.body()}

    def opening(self) -> list[dict[str, Any]]:
        return []

    def piece(self, text: str, finish: FinishReason | None) -> dict[str, Any]:
        return self._event([self._choice(text, finish)])

    @staticmethod
    def _choice(text: str, finish: FinishReason | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


class ChatReplies(_Stream):
    """Bodies of /v1/chat/completions."""

    KIND = "chat.completion.chunk"

    def whole(self, text: str, finish: FinishReason, usage: Usage) -> dict[str, Any]:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return self.head.body("chat.completion", [choice]) | {"usage": usage.body()}

    def opening(self) -> list[dict[str, Any]]:
        return [self._delta({"role": "assistant", "content": ""}, None)]

    def piece(self, text: str, finish: FinishReason | None) -> dict[str, Any]:
        return self._delta({"content": text} if text else {}, finish)

    def _delta(self, delta: dict[str, Any], finish: FinishReason | None) -> dict[str, Any]:
        return self._event([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}])
