"""The step-cost model: seconds of a verify pass by its tokens, and of a draft by its requests.

Where no profile exists there is no `StepCosts`: callers pass None, the planner then trims nothing, and
whoever passed None warns about it visibly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import overload

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, model_validator

from scheduler.arguments import F64, ArgumentError


class StepCosts(BaseModel):
    """A profiled, monotone cost model; 1 / verify_seconds(B) is the paper's SPS(B).

    Attributes:
        tokens: profiled sizes of a verify pass in tokens, strictly rising, at least two.
        seconds: time of each of them, positive, never falling.
        draft_requests: profiled numbers of requests drafted at once, strictly rising; may be empty.
        draft_seconds: time of each of them, never falling. With no point, drafting costs `link_seconds` only.
        link_seconds: constant cost of one exchange with the drafter.

    Raises:
        pydantic.ValidationError: the tables break the rules above; names the field.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    tokens: tuple[int, ...]
    seconds: tuple[float, ...]
    draft_requests: tuple[int, ...] = ()
    draft_seconds: tuple[float, ...] = ()
    link_seconds: float = 0.0

    @model_validator(mode="after")
    def _tables_hold(self) -> StepCosts:
        # With a single point every further token would look free, and the planner would verify everything.
        if len(self.tokens) < 2:
            raise ArgumentError("tokens", f"needs at least two profiled points, not {len(self.tokens)}")
        _check_table("tokens", self.tokens, "seconds", self.seconds)
        _check_table("draft_requests", self.draft_requests, "draft_seconds", self.draft_seconds)
        if self.link_seconds < 0.0:
            raise ArgumentError("link_seconds", f"must not be negative, not {self.link_seconds}")
        return self

    @classmethod
    def from_profile(
        cls,
        verify: Mapping[int, Sequence[float]],
        draft: Mapping[int, Sequence[float]] | None = None,
        link_seconds: float = 0.0,
    ) -> StepCosts:
        """The model of measured runs: the median of each size, then the cumulative maximum over sizes.

        The median drops stray slow runs; the maximum removes the dips left by noise, so that a larger step
        never looks cheaper than a smaller one.

        Args:
            verify: seconds of each run of a verify pass, by its number of tokens.
            draft: seconds of each run of a draft, by the number of requests drafted.
            link_seconds: see the class.

        Raises:
            ArgumentError: a size has no runs.
            pydantic.ValidationError: the resulting tables break the rules of the class.
        """
        tokens, seconds = _staircase("verify", verify)
        draft_requests, draft_seconds = _staircase("draft", draft or {})
        return cls(
            tokens=tokens,
            seconds=seconds,
            draft_requests=draft_requests,
            draft_seconds=draft_seconds,
            link_seconds=link_seconds,
        )

    @overload
    def verify_seconds(self, n: int) -> float: ...

    @overload
    def verify_seconds(self, n: npt.NDArray[np.integer]) -> F64: ...

    def verify_seconds(self, n: int | npt.NDArray[np.integer]) -> float | F64:
        """Seconds of a verify pass over `n` tokens (all requests together, anchors and prefill included).

        Straight lines between profiled points; below the first its value; beyond the last the line through
        the last two.

        Raises:
            ArgumentError: `n` is negative.
        """
        result = _line(self.tokens, self.seconds, n)
        return result if isinstance(n, np.ndarray) else float(result)

    @overload
    def draft(self, n: int) -> float: ...

    @overload
    def draft(self, n: npt.NDArray[np.integer]) -> F64: ...

    def draft(self, n: int | npt.NDArray[np.integer]) -> float | F64:
        """Seconds from asking for the blocks of `n` requests to having them; 0 for n = 0.

        Read from the table as in `verify_seconds`, plus `link_seconds`. A table of one point is constant.

        Raises:
            ArgumentError: `n` is negative.
        """
        size = np.asarray(n)
        work = _line(self.draft_requests, self.draft_seconds, n) if self.draft_requests else np.zeros(size.shape)
        result = np.where(size > 0, work + self.link_seconds, 0.0)
        return result if isinstance(n, np.ndarray) else float(result)


def _check_table(size_name: str, sizes: tuple[int, ...], time_name: str, times: tuple[float, ...]) -> None:
    if len(sizes) != len(times):
        raise ArgumentError(time_name, f"must have one entry per {size_name}: {len(times)} for {len(sizes)}")
    if any(size < 1 for size in sizes) or any(b <= a for a, b in pairwise(sizes)):
        raise ArgumentError(size_name, f"must be positive and strictly rising, not {sizes}")
    if any(time <= 0.0 for time in times) or any(b < a for a, b in pairwise(times)):
        raise ArgumentError(time_name, f"must be positive and never fall, not {times}")


def _staircase(param: str, points: Mapping[int, Sequence[float]]) -> tuple[tuple[int, ...], tuple[float, ...]]:
    sizes = sorted(points)
    if any(len(points[size]) == 0 for size in sizes):
        raise ArgumentError(param, "has a size without a run")
    medians = np.array([np.median(points[size]) for size in sizes], dtype=np.float64)
    return tuple(sizes), tuple(float(s) for s in np.maximum.accumulate(medians))


def _line(sizes: tuple[int, ...], times: tuple[float, ...], n: int | npt.NDArray[np.integer]) -> F64:
    x = np.asarray(sizes, dtype=np.float64)
    y = np.asarray(times, dtype=np.float64)
    at = np.asarray(n, dtype=np.float64)
    if np.any(at < 0.0):
        raise ArgumentError("n", "must not be negative")
    if x.size == 1:
        return np.full(at.shape, y[0])
    # The same expression for one size or many, so that a time never depends on what is asked along with it.
    segment = np.clip(np.searchsorted(x, at, side="right") - 1, 0, x.size - 2)
    slope = np.diff(y) / np.diff(x)
    return np.asarray(y[segment] + slope[segment] * (np.maximum(at, x[0]) - x[segment]), dtype=np.float64)
