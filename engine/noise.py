"""Counter-based randomness: every number is a pure function of its key, so any process can draw it again.

The mixing function is SplitMix64's finaliser (Steele, Lea, Flood, 2014), chained over the parts of a key.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

import numpy as np
import numpy.typing as npt

U64 = npt.NDArray[np.uint64]
F64 = npt.NDArray[np.float64]

_MASK = (1 << 64) - 1
_STEP = 0x9E3779B97F4A7C15


class Purpose(IntEnum):
    """What a number is drawn for; numbers for different purposes are independent."""

    DRAFT = 1
    ACCEPT = 2
    SAMPLE = 3
    COUPLED = 4
    DIGEST = 5


def _mix(x: int) -> int:
    x = (x + _STEP) & _MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def key_of(*parts: int) -> int:
    """A 64-bit key of several integers (taken modulo 2^64), in this order."""
    key = 0
    for part in parts:
        key = _mix(key ^ (part & _MASK))
    return key


def uniform(key: int) -> float:
    """One number in the open interval (0, 1).

    52 bits and not 53: with 53 the addition of a half would round the largest one up to 1.
    """
    return ((_mix(key) >> 12) + 0.5) * 2.0**-52


def uniforms(keys: npt.ArrayLike, counters: npt.ArrayLike) -> F64:
    """Numbers in (0, 1) of `key_of`-style keys [..] uint64 and counters [..] (broadcast)."""
    x = np.asarray(keys, np.uint64) ^ np.asarray(counters, np.uint64)
    x = x + np.uint64(_STEP)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return ((x >> np.uint64(12)).astype(np.float64) + 0.5) * 2.0**-52


def gumbel(seed: int, position: int, tokens: npt.ArrayLike) -> F64:
    """Gumbel noise of the coupled rule at an absolute position, for target token ids [..].

    Both sides of a link draw the same numbers from (seed, choice 0, position, token).
    """
    key = key_of(Purpose.COUPLED, seed, 0, position)
    return np.asarray(-np.log(-np.log(uniforms(key, tokens))))


def extend_digest(digest: int, tokens: Iterable[int]) -> int:
    """Digest of a token sequence, extended by more tokens; the empty sequence has digest 0."""
    for token in tokens:
        digest = key_of(Purpose.DIGEST, digest, token)
    return digest
