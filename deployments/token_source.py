"""The seam between the HTTP side of the gateway and whatever makes the tokens."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from engine.request import GenerationRequest, TokenChunk


class TokenSource(Protocol):
    """Continues prompts: verifier replicas behind a link, or a model in this process."""

    def stream(self, request: GenerationRequest) -> AsyncGenerator[TokenChunk, None]:
        """The tokens of `request`, one chunk for each step that added some.

        The last chunk carries `finish_reason`. Closing the generator early, or cancelling the task that
        waits in it, cancels the request at its verifier.

        Raises (while iterating):
            RequestError: the request cannot be served as asked (400).
            OverloadedError: too many requests are waiting (429).
            UnavailableError: no verifier is there, or it went away and nothing could resume it (503).
        """
        ...
