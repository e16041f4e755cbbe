"""What each tier promises and how many of the users belong to it, as a client of the service sees it.

The defaults are those of the server's settings on a small machine; a load test against another server names
its own promises on the command line.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Promise:
    """What a tier promises to each of its users, and its share of the users.

    Attributes:
        tier: the value of `service_tier`.
        rate: tokens per second and user; None is best effort.
        first_token: seconds to the first token; None is best effort.
        weight: how many users it gets, relative to the other tiers; 0 leaves it out.
    """

    tier: str
    rate: float | None
    first_token: float | None
    weight: int


PROMISES: tuple[Promise, ...] = (
    Promise("priority", rate=15.0, first_token=1.0, weight=1),
    Promise("default", rate=5.0, first_token=5.0, weight=2),
    Promise("flex", rate=None, first_token=None, weight=1),
)


class OptionError(ValueError):
    """A command-line value that cannot be used; the message names the option and what is allowed."""


def parse_pairs(option: str, text: str) -> dict[str, float]:
    """`"priority=1,flex=2"` as numbers by tier.

    Args:
        option: name of the option, for messages.

    Raises:
        OptionError: not of that form, an unknown or repeated tier, or a number that is negative or not finite.
    """
    known = [promise.tier for promise in PROMISES]
    pairs: dict[str, float] = {}
    for part in text.split(","):
        tier, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals:
            raise OptionError(f'{option}: "{part}" must have the form TIER=NUMBER')
        if tier not in known:
            raise OptionError(f'{option}: tier must be one of {", ".join(known)}, not "{tier}"')
        if tier in pairs:
            raise OptionError(f"{option}: {tier} is given twice")
        try:
            number = float(value)
        except ValueError:
            raise OptionError(f'{option}: {tier} must be a number, not "{value}"') from None
        if not math.isfinite(number) or number < 0:
            raise OptionError(f"{option}: {tier} must be finite and not negative, not {value}")
        pairs[tier] = number
    return pairs


def with_rates(promises: tuple[Promise, ...], rates: Mapping[str, float]) -> tuple[Promise, ...]:
    """The same tiers with other promised rates (tokens per second and user); 0 is best effort."""
    return tuple(
        replace(promise, rate=rates[promise.tier] or None) if promise.tier in rates else promise for promise in promises
    )


def with_first_tokens(promises: tuple[Promise, ...], seconds: Mapping[str, float]) -> tuple[Promise, ...]:
    """The same tiers with other promised times to the first token (seconds); 0 is best effort."""
    return tuple(
        replace(promise, first_token=seconds[promise.tier] or None) if promise.tier in seconds else promise
        for promise in promises
    )


def with_mix(promises: tuple[Promise, ...], weights: Mapping[str, float]) -> tuple[Promise, ...]:
    """The same tiers with these weights; a tier that is not named gets no users.

    Raises:
        OptionError: a weight is not a whole number, or all are 0.
    """
    for tier, weight in weights.items():
        if weight != int(weight):
            raise OptionError(f"--tier: {tier} must be a whole number, not {weight}")
    if not any(weights.values()):
        raise OptionError("--tier: at least one tier must have users")
    return tuple(replace(promise, weight=int(weights.get(promise.tier, 0))) for promise in promises)
