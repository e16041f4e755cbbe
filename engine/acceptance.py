"""Which drafted tokens of a verified prefix stay, and the token that follows them.

Two ends of a prefix must not be confused. Where the planner stopped, the next position is a bonus position and
samples p. Where a drafted token was refused, the position samples the residual max(0, p - q).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from engine.rounds import F32, I32
from engine.sampling import sample_weights

Draw = Callable[[int], float]  # position within the block, from 0 -> a fresh number in (0, 1)


def accept_agreeing(choices: Sequence[int], drafted: Sequence[int]) -> list[int]:
    """Greedy and coupled rule: keep drafted tokens while they equal the target's own choice.

    Args:
        choices: [l + 1] the target's token after the anchor and after each verified draft token.
        drafted: [l] the verified prefix of the block.

    Returns:
        tokens to emit: the accepted ones and the target's choice at the position after them.
    """
    count = 0
    while count < len(drafted) and choices[count] == drafted[count]:
        count += 1
    return list(choices[: count + 1])


def accept_by_rejection(
    p: Tensor, drafted: Sequence[int], q_ids: I32, q_probs: F32, accept: Draw, sample: Draw
) -> list[int]:
    """Rejection rule: keep x with probability min(1, p(x) / q(x)), else sample the normalised max(0, p - q).

    Args:
        p: [l + 1, V] float32 target probabilities after the anchor and after each verified draft token.
        drafted: [l] the verified prefix of the block. A token outside the vocabulary has p = 0.
        q_ids, q_probs: [l, K] the distributions the tokens were really sampled from; every other token has q = 0.
            A drafted token that is not among them was not sampled from q and is refused.
        accept, sample: independent fresh numbers.

    Returns:
        tokens to emit: the accepted ones and one more.
    """
    vocabulary = p.shape[1]
    for k, token in enumerate(drafted):
        chosen = q_ids[k] == token
        q = float(q_probs[k][chosen].sum())
        px = float(p[k, token]) if 0 <= token < vocabulary else 0.0
        if q > 0.0 and accept(k) * q < px:
            continue
        inside = (q_ids[k] >= 0) & (q_ids[k] < vocabulary)
        residual = p[k].double()
        ids = torch.from_numpy(q_ids[k][inside]).long().to(p.device)
        residual.index_add_(0, ids, -torch.from_numpy(q_probs[k][inside]).double().to(p.device))
        residual.clamp_(min=0.0)
        # Nothing is left where p = q up to rounding; there a refusal has probability 0 up to rounding.
        return [*drafted[:k], sample_weights(residual if float(residual.sum()) > 0.0 else p[k], sample(k))]
    return [*drafted, sample_weights(p[len(drafted)], sample(len(drafted)))]
