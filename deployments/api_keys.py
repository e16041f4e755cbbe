"""API keys: who may speak to the gateway, and which tiers each may ask for. Only digests are ever stored."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from collections.abc import Mapping

from deployments.openai_errors import ApiError

PREFIX = "sk-dspark-"


def generate_key() -> str:
    """A new key of 256 random bits, to be given to its user and kept nowhere else."""
    return PREFIX + secrets.token_urlsafe(32)


def key_digest(key: str) -> str:
    """SHA-256 of a key, hexadecimal: the form in which settings hold it."""
    return hashlib.sha256(key.encode()).hexdigest()


class ApiKeys:
    """The keys of one gateway.

    Args:
        tiers_of: digest of a key -> names of the tiers it may ask for. Empty: no key is needed.
    """

    def __init__(self, tiers_of: Mapping[str, tuple[str, ...]]) -> None:
        self._tiers_of = dict(tiers_of)

    @property
    def required(self) -> bool:
        return bool(self._tiers_of)

    def authenticate(self, authorization: str | None) -> frozenset[str] | None:
        """The tiers that the bearer of an `Authorization` header may ask for; None is any of them.

        Raises:
            ApiError: 401, no key or an unknown one.
        """
        if not self._tiers_of:
            return None
        scheme, _, key = (authorization or "").partition(" ")
        if scheme.lower() != "bearer" or not key.strip():
            raise _unauthorized("an API key is required: send it as 'Authorization: Bearer <key>'")
        # Every stored digest is compared, each in constant time.
        presented = key_digest(key.strip())
        found: tuple[str, ...] | None = None
        for digest, tiers in self._tiers_of.items():
            if hmac.compare_digest(digest, presented):
                found = tiers
        if found is None:
            raise _unauthorized("this API key is not known here")
        return frozenset(found)


def check_tier_allowed(allowed: frozenset[str] | None, tier: str) -> None:
    """Refuse a tier that the key of this request may not ask for.

    Raises:
        ApiError: 403, naming `service_tier`.
    """
    if allowed is not None and tier not in allowed:
        raise ApiError(
            403,
            f"this API key may not ask for service_tier {tier!r}, only for {', '.join(sorted(allowed))}",
            kind="permission_error",
            param="service_tier",
            code="service_tier_not_allowed",
        )


def _unauthorized(message: str) -> ApiError:
    return ApiError(
        401,
        message,
        kind="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )
