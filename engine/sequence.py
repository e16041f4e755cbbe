"""One request inside the engine: its tokens, pages, features and what has come out of it."""

from __future__ import annotations

import numpy as np

from engine.noise import extend_digest
from engine.pages import PagePool
from engine.request import FinishReason, GenerationRequest, TokenChunk
from engine.rounds import F16
from engine.text import TextStream


class FeatureTail:
    """Fused features of the latest positions: what a drafter that lost its context is given again.

    Holds at least the last `window` positions; older ones are dropped now and then.

    Attributes:
        end: positions seen so far.
    """

    def __init__(self, window: int, hidden_size: int) -> None:
        self._window = window
        self._rows = np.zeros((2 * window, hidden_size), np.float16)
        self._count = 0
        self.end = 0

    def append(self, rows: F16) -> None:
        """Features [n, H] of the next n positions."""
        self.end += len(rows)
        rows = rows[-self._window :]
        if self._count + len(rows) > len(self._rows):
            keep = min(self._count, self._window)
            self._rows[:keep] = self._rows[self._count - keep : self._count]
            self._count = keep
        self._rows[self._count : self._count + len(rows)] = rows
        self._count += len(rows)

    def since(self, position: int) -> tuple[int, F16]:
        """(first position, rows): everything from `position` on, or the last window if that is gone or long ago."""
        first = max(position, self.end - min(self._window, self._count))
        return first, self._rows[self._count - (self.end - first) : self._count].copy()


class Sequence:
    """A request's state. Tokens t[0..n-1] are committed; keys and values exist for positions 0..computed-1.

    While decoding, computed = n - 1: the last committed token is the anchor, run in the next step.

    Args:
        request: what was asked.
        number: unique within the engine.
        text: decoder of the output.
        features: tail of fused features; None without a drafter.
    """

    def __init__(self, request: GenerationRequest, number: int, text: TextStream, features: FeatureTail | None) -> None:
        self.request = request
        self.number = number
        self.epoch = 0
        self.tokens = list(request.prompt)
        self.pages: list[int] = []
        self.computed = 0
        self.text = text
        self.features = features
        self.sent = 0  # feature positions the drafter has been given
        self.known_to = -1  # generation of the link that `sent` is about
        self.finish_reason: FinishReason | None = None
        self.digest = extend_digest(0, request.prompt)

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def emitted(self) -> int:
        """Tokens committed behind the prompt."""
        return len(self.tokens) - self.prompt_length

    @property
    def remaining(self) -> int:
        """Tokens that may still come."""
        return self.request.params.max_tokens - self.emitted

    @property
    def decoding(self) -> bool:
        """Whether the prompt is behind it, up to the anchor."""
        return self.emitted > 0

    @property
    def pages_wanted(self) -> int:
        """Pages of the whole prompt and everything that may come."""
        return PagePool.pages_for(self.prompt_length + self.request.params.max_tokens)

    def emit(self, tokens: list[int], end_tokens: frozenset[int], accepted: int, rejected: int) -> TokenChunk:
        """Commit tokens one by one until something ends the request; what lies behind that is dropped.

        An end token is committed but has no text; the token that completes a stop string is committed, its text
        is cut before the string; the length limit comes last.
        """
        kept: list[int] = []
        text = ""
        for token in tokens:
            kept.append(token)
            if token in end_tokens and not self.request.params.ignore_eos:
                self.finish_reason = "stop"
            else:
                text += self.text.push(token)
                if self.text.stopped:
                    self.finish_reason = "stop"
                elif len(kept) >= self.remaining:
                    self.finish_reason = "length"
            if self.finish_reason is not None:
                text += self.text.finish()
                break
        self.tokens += kept
        self.digest = extend_digest(self.digest, kept)
        return TokenChunk(
            self.request.request_id,
            tuple(kept),
            text,
            self.finish_reason,
            accepted=min(accepted, len(kept)),
            rejected=rejected + accepted - min(accepted, len(kept)),
        )
