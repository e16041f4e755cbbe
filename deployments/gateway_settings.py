"""The settings of the gateway."""

from __future__ import annotations

import ipaddress
import re
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from deployments.errors import SettingsError
from scheduler.arguments import ArgumentError
from scheduler.tiers import DEFAULT_TIERS, Tier, check_tiers

DIGEST = re.compile(r"[0-9a-f]{64}")


def is_loopback(host: str) -> bool:
    """Whether a listener on `host` can be reached from this machine only."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False  # a name may resolve to anything


class GatewaySettings(BaseModel):
    """What the gateway listens on, serves and refuses.

    Attributes:
        host: interface to listen on. Anything but loopback needs `keys`.
        port: TCP port.
        model_name: the one name that requests may give as `model`.
        max_context: tokens of prompt and output together.
        tiers: the service tiers; one is called "default".
        keys: SHA-256 of an API key, hexadecimal -> names of the tiers it may ask for.
        max_body_bytes: longest request body that is read.

    Raises:
        SettingsError: no keys though others can reach the listener, a key that is not a digest, a key with
            no or an unknown tier, tiers without "default" or with one name twice.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=0, le=65535)
    model_name: str = Field(min_length=1)
    max_context: int = Field(ge=2)
    tiers: tuple[Tier, ...] = DEFAULT_TIERS
    keys: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    max_body_bytes: int = Field(default=4 * 2**20, ge=1024)

    @model_validator(mode="after")
    def _may_be_started(self) -> Self:
        try:
            check_tiers(self.tiers)
        except ArgumentError as error:
            raise SettingsError("tiers", str(error).removeprefix("tiers ")) from error
        if not self.keys and not is_loopback(self.host):
            raise SettingsError("keys", f"must not be empty when host is {self.host!r}: only loopback is open")
        known = {tier.name for tier in self.tiers}
        for digest, names in self.keys.items():
            if not DIGEST.fullmatch(digest):
                raise SettingsError("keys", "must be SHA-256 digests of keys (64 hexadecimal digits)")
            if not names or not set(names) <= known:
                raise SettingsError("keys", f"must each name some of the tiers {sorted(known)}, not {list(names)}")
        return self
