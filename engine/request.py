"""What a request asks of the engine and what the engine gives back: plain frozen data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


class RequestError(ValueError):
    """A request that cannot be served as asked.

    Attributes:
        param: name of the offending field as the user knows it, or None.
    """

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen, under the names of the OpenAI API and of vLLM.

    Raises:
        RequestError: a value is outside its range; `param` names the field.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: off
    max_tokens: int = 16
    stop: tuple[str, ...] = ()
    seed: int | None = None
    ignore_eos: bool = False

    def __post_init__(self) -> None:
        if not 0.0 <= self.temperature <= 2.0:
            raise RequestError(f"temperature must be between 0 and 2, not {self.temperature}", "temperature")
        if not 0.0 < self.top_p <= 1.0:
            raise RequestError(f"top_p must be in (0, 1], not {self.top_p}", "top_p")
        if self.top_k < -1:
            raise RequestError(f"top_k must be -1 or 0 (off) or positive, not {self.top_k}", "top_k")
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens must be at least 1, not {self.max_tokens}", "max_tokens")
        if any(not s for s in self.stop):
            raise RequestError("stop must not contain an empty string", "stop")
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise RequestError(f"seed must fit in 64 bits, not {self.seed}", "seed")

    @property
    def greedy(self) -> bool:
        """Temperature 0: the most likely token, always."""
        return self.temperature == 0.0

    @property
    def coupled(self) -> bool:
        """Whether the coupled (Gumbel) acceptance rule applies: sampled, with a seed."""
        return self.seed is not None and not self.greedy


@dataclass(frozen=True)
class GenerationRequest:
    """One prompt to be continued.

    Attributes:
        request_id: unique among all requests in flight.
        prompt: token ids, at least one.
        tier: name of the service tier.
        speculation: False opts the request out of drafting.
    """

    request_id: str
    prompt: tuple[int, ...]
    params: SamplingParams = field(default_factory=SamplingParams)
    tier: str = "default"
    speculation: bool = True


@dataclass(frozen=True)
class TokenChunk:
    """What one step added to one request. `text` lags `token_ids` where a stop string may be starting.

    Attributes:
        accepted: draft tokens accepted since the last chunk.
        rejected: draft tokens that were verified and refused, or dropped behind a refusal, since the last chunk.
        error: a message when `finish_reason` is "error".
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    accepted: int = 0
    rejected: int = 0
    error: str | None = None
