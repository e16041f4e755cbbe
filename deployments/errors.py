"""What can go wrong between the gateway and the replicas behind it, and in the gateway's own settings."""

from __future__ import annotations


class SettingsError(Exception):
    """Settings that must not be started with.

    Not a ValueError, so that pydantic lets it through instead of folding it into a ValidationError.

    Attributes:
        field: name of the setting at fault.
    """

    def __init__(self, field: str, message: str) -> None:
        super().__init__(f"{field} {message}")
        self.field = field


class OverloadedError(RuntimeError):
    """More requests than can be served now; becomes 429 with Retry-After.

    Attributes:
        retry_after_s: seconds after which it is worth trying again.
    """

    def __init__(self, retry_after_s: float, message: str = "too many requests are waiting") -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class UnavailableError(RuntimeError):
    """Nothing is there that could serve the request; becomes 503."""


class GenerationError(RuntimeError):
    """The engine gave up on a request after it had taken it; becomes 500."""
