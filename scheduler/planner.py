"""How much of each sampled block a step verifies: the paper's Algorithm 1, early-stopping, with weights.

Exactness hangs on this file. Whether position k of a block is verified may depend on history, on other
requests and on the block's tokens 1..k-1, never on token k or later. A confidence c_{k+1} reads token k, so
changing c_{k+1..gamma} of a request must never change min(length, k). It does not, because
  * a request's positions enter in order: its row never rises, and equal values are ordered by position, so
    what follows (r, k) in the row follows it in the admission order and cannot displace it;
  * admission stops at the first position that does not raise the throughput, which is a question about
    positions already admitted and the one at hand. Looking further ahead (a global maximum) would break it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from scheduler.arguments import I64, ArgumentError, counts, survival_matrix, weight_vector
from scheduler.costs import StepCosts


@dataclass(frozen=True)
class Plan:
    """What a step verifies.

    Attributes:
        lengths: [R] int64, draft tokens verified of each request's block, 0..gamma.
        expected_tokens: draft tokens expected to be accepted, unweighted; the one token that each decoding
            request gains anyway is not in it.
        predicted_seconds: time of the round, sunk seconds included; None without a cost model.
    """

    lengths: I64
    expected_tokens: float
    predicted_seconds: float | None


def plan_prefixes(
    survival: npt.ArrayLike,
    weights: npt.ArrayLike,
    costs: StepCosts | None,
    *,
    base_tokens: int,
    base_value: float,
    limits: npt.ArrayLike,
    sunk_seconds: float = 0.0,
    max_draft_tokens: int | None = None,
) -> Plan:
    """Verify lengths that raise the expected weighted tokens per second, one position at a time.

    Positions (r, j) are admitted by w[r] * a[r, j], highest first, ties by (j, r), while
    theta = (base_value + sum of admitted w * a) / (sunk_seconds + verify_seconds(base_tokens + admitted))
    strictly rises; the first that does not raise it ends the plan. With weights of 1, base_value =
    base_tokens = R and nothing sunk this is Algorithm 1 of the DSpark paper.

    For non-anticipation, `limits`, `max_draft_tokens`, `weights` and the order of the rows must come from
    history, never from the tokens or confidences of the blocks at hand. `limits` cuts rows before the
    positions are ordered, so that a position beyond a limit neither enters nor stops anything.

    Args:
        survival: [R, gamma] from `scheduler.survival`, in [0, 1] and non-increasing along gamma.
        weights: [R] positive, one per request.
        costs: the step-cost model. None trims nothing (all up to `limits`); the caller warns about it.
        base_tokens: tokens of the step besides drafts: one anchor per decoding request, and prefill tokens.
        base_value: sum of the weights of the decoding requests, each of which gains at least one token.
        limits: [R] int, most draft tokens each request may verify, 0..gamma.
        sunk_seconds: draft and link time already spent in this round.
        max_draft_tokens: most draft tokens the step may hold, or None.

    Raises:
        ArgumentError: names the argument that breaks the above.
    """
    a = survival_matrix("survival", survival)
    requests, gamma = a.shape
    w = weight_vector(weights, requests)
    limit = counts("limits", limits, requests, gamma)
    if base_tokens < 0:
        raise ArgumentError("base_tokens", f"must not be negative, not {base_tokens}")
    if not 0.0 <= base_value < np.inf:
        raise ArgumentError("base_value", f"must be finite and not negative, not {base_value}")
    if not 0.0 <= sunk_seconds < np.inf:
        raise ArgumentError("sunk_seconds", f"must be finite and not negative, not {sunk_seconds}")
    if max_draft_tokens is not None and max_draft_tokens < 0:
        raise ArgumentError("max_draft_tokens", f"must not be negative, not {max_draft_tokens}")

    # Laid out position by position, a stable sort leaves equal values in the order (position, request).
    gains = (w[:, None] * a).T.ravel()
    allowed = np.flatnonzero((np.arange(gamma)[:, None] < limit[None, :]).ravel())
    order = allowed[np.argsort(-gains[allowed], kind="stable")][:max_draft_tokens]

    if costs is None:
        admitted = order
        predicted = None
    else:
        # np.cumsum adds strictly left to right, so theta[i] reads the first i positions and nothing else.
        value = np.cumsum(np.concatenate(([base_value], gains[order])))
        seconds = sunk_seconds + costs.verify_seconds(base_tokens + np.arange(order.size + 1))
        theta = value / seconds
        stalls = np.flatnonzero(theta[1:] <= theta[:-1])
        count = int(stalls[0]) if stalls.size else order.size
        admitted = order[:count]
        predicted = float(seconds[count])

    lengths = np.bincount(admitted % max(1, requests), minlength=requests).astype(np.int64)
    return Plan(lengths, float(a.T.ravel()[admitted].sum()), predicted)
