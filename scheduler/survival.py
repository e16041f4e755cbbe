"""Survival: the probability that a block's prefix is accepted whole, from its calibrated confidences."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.arguments import F64, matrix


def survival(confidence: npt.ArrayLike) -> F64:
    """Probability a[r, j] that positions 1..j of request r are all accepted.

    a[r, j] = c[r, 1] * ... * c[r, j], the confidences clipped to [0, 1]. A running minimum from the left
    then guards that no row rises, whatever rounding or a later kind of calibration does. Entry j reads
    confidences 1..j only, to the last bit: the planner's exactness rests on that.

    A NaN confidence counts as 0: a position of which nothing is known is never worth verifying, nor is
    anything behind it.

    Args:
        confidence: [R, gamma] calibrated P(position k accepted | positions before it accepted).

    Returns:
        [R, gamma] float64 in [0, 1], non-increasing along gamma. R may be 0.

    Raises:
        ArgumentError: `confidence` is not two-dimensional with gamma at least 1.

    Source: DSpark paper, a_{r,j} of Algorithm 1.
    """
    known = np.nan_to_num(matrix("confidence", confidence), nan=0.0, posinf=1.0, neginf=0.0)
    product = np.cumprod(np.clip(known, 0.0, 1.0), axis=1)
    return np.minimum.accumulate(product, axis=1)
