"""The loss of DSpark: 0.1 cross-entropy + 0.9 L1 to the teacher + 1.0 cross-entropy of the confidence.

Rows are supervised slots of blocks, n of them; Vd is the draft vocabulary. With Vd = 8192 the logits, the
two distributions and their gradients of one step would take gigabytes, and the time to move them. Here they
live for one chunk of rows only: loss and gradients are made together, in the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.drafters.dspark import DSparkDrafter
from training.blocks import Blocks


@dataclass(frozen=True)
class LossWeights:
    """How the three terms and the positions are weighted.

    Attributes:
        cross_entropy, total_variation, confidence: factors of the terms (the second one's is of the *full* L1
            distance, twice the total variation).
        decay: position k (from 1) weighs exp(-(k - 1) / decay).
    """

    cross_entropy: float = 0.1
    total_variation: float = 0.9
    confidence: float = 1.0
    decay: float = 4.0


@dataclass(frozen=True)
class Supervision:
    """The rows that are supervised, flattened.

    Attributes:
        block: [n] index of the row among all S * A * g slots.
        slot: [n] 0-based position in its block.
        previous: [n] target id of the token before.
        wanted: [n] draft id of the token to be drafted, -1 if the draft vocabulary lacks it.
        teacher: [n] row of `teacher_hidden` and `teacher_lse` that holds the teacher's distribution.
    """

    block: Tensor
    slot: Tensor
    previous: Tensor
    wanted: Tensor
    teacher: Tensor


@dataclass(frozen=True)
class LossParts:
    """Loss of a step and what it is made of; all but `total` are for reading only.

    Attributes:
        total: scalar, to be differentiated.
        cross_entropy, distance, confidence: scalars, weighted means of the terms.
        acceptance: [n] 1 - L1/2: the chance that rejection sampling keeps the draft of each row.
    """

    total: Tensor
    cross_entropy: Tensor
    distance: Tensor
    confidence: Tensor
    acceptance: Tensor


def supervised_rows(blocks: Blocks, length: int, draft_index: Tensor) -> Supervision:
    """The valid slots, in order of the teacher's row: neighbouring blocks share teachers.

    Args:
        length: L, tokens of a sequence.
        draft_index: [V] int64 draft id of each target id, -1 where there is none.
    """
    sequences, _, slots = blocks.valid.shape
    teacher = blocks.positions + length * torch.arange(sequences)[:, None, None]
    rows = blocks.valid.flatten().nonzero().flatten()
    rows = rows[teacher.flatten()[rows].argsort(stable=True)]
    return Supervision(
        block=rows,
        slot=rows % slots,
        previous=blocks.previous.flatten()[rows],
        wanted=draft_index[blocks.wanted.flatten()[rows]],
        teacher=teacher.flatten()[rows],
    )


class _DraftDistance(torch.autograd.Function):
    """Weighted cross-entropy and L1 distance of draft distributions, with gradients made in the forward pass.

    Returns the scalar sum_n (ce_weight CE + l1_weight L1), and for reading CE [n] and L1 [n].
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx,
        hidden: Tensor,
        markov: Tensor,
        w2: Tensor,
        head: Tensor,
        teacher_hidden: Tensor,
        teacher_lse: Tensor,
        teacher: Tensor,
        wanted: Tensor,
        ce_weight: Tensor,
        l1_weight: Tensor,
        chunk: int,
    ) -> tuple[Tensor, Tensor, Tensor]:
        need = any(ctx.needs_input_grad)
        inputs = torch.cat((hidden, markov), dim=1)
        table = torch.cat((head, w2), dim=1)  # one product gives U + B
        grad_inputs = torch.empty_like(inputs) if need else None
        grad_w2 = torch.zeros_like(w2) if need else None
        count = len(hidden)
        entropies, distances = torch.empty(count), torch.empty(count)
        for start in range(0, count, chunk):
            rows = slice(start, min(start + chunk, count))
            x, target = inputs[rows], wanted[rows]
            logits = x @ table.T
            # Teachers are computed once for all rows of the chunk that share them.
            distinct, which = torch.unique_consecutive(teacher[rows], return_inverse=True)
            p = torch.addmm(-teacher_lse[distinct, None], teacher_hidden[distinct], head.T).exp_()
            outside = (1 - p.sum(1)).clamp_(min=0)[which]
            p = p[which]
            known = target >= 0
            picked = logits.gather(1, target.clamp(min=0)[:, None])
            lse = logits.logsumexp(1, keepdim=True)
            entropies[rows] = (lse - picked).squeeze(1) * known
            q = logits.sub_(lse).exp_()
            sign = torch.sub(q, p).sign_()
            signed_q = torch.linalg.vecdot(sign, q)
            distances[rows] = signed_q - torch.linalg.vecdot(sign, p) + outside
            if grad_inputs is None or grad_w2 is None:
                continue
            # dL1/dz = q (s - <s, q>), dCE/dz = q - onehot
            ce, l1 = (ce_weight[rows] * known)[:, None], l1_weight[rows][:, None]
            grad = sign.mul_(l1).add_(ce - l1 * signed_q[:, None]).mul_(q)
            grad.scatter_add_(1, target.clamp(min=0)[:, None], -ce)
            torch.mm(grad, table, out=grad_inputs[rows])
            grad_w2.addmm_(grad.T, markov[rows])
        if grad_inputs is not None and grad_w2 is not None:
            ctx.save_for_backward(grad_inputs, grad_w2)
            ctx.width = hidden.shape[1]
        ctx.mark_non_differentiable(entropies, distances)
        return (ce_weight * entropies + l1_weight * distances).sum(), entropies, distances

    @staticmethod
    def backward(ctx, grad: Tensor, *_: Tensor):  # type: ignore[override,no-untyped-def]
        grad_inputs, grad_w2 = ctx.saved_tensors
        scaled = grad_inputs * grad
        return scaled[:, : ctx.width], scaled[:, ctx.width :], grad_w2 * grad, *(None,) * 8


def draft_loss(
    drafter: DSparkDrafter,
    hidden: Tensor,
    rows: Supervision,
    teacher_hidden: Tensor,
    teacher_lse: Tensor,
    weights: LossWeights,
    chunk: int = 512,
) -> LossParts:
    """Loss of the supervised rows. Every term is divided by the sum of its own weights.

    The mass that the teacher puts outside the draft vocabulary counts in the L1 distance; a wanted token
    outside it has no cross-entropy term.

    Args:
        hidden: [S * A * g, H] backbone outputs of all slots.
        teacher_hidden: [S * L, H] inputs of the target's LM head; teacher_lse: [S * L].
        chunk: rows whose distributions are in memory at once.
    """
    x = hidden[rows.block]
    if drafter.markov_head is not None:
        markov, w2 = drafter.markov_head.embed(rows.previous), drafter.markov_head.markov_w2.weight
    else:
        markov, w2 = x.new_zeros(len(x), 0), x.new_zeros(drafter.config.draft_vocab_size, 0)
    decay = torch.exp(-rows.slot / weights.decay)
    known = decay * (rows.wanted >= 0)
    ce_weight = weights.cross_entropy * known / known.sum().clamp(min=1e-9)
    l1_weight = weights.total_variation * decay / decay.sum().clamp(min=1e-9)
    total, entropies, distances = _DraftDistance.apply(
        x,
        markov,
        w2,
        drafter.lm_head.weight,
        teacher_hidden,
        teacher_lse,
        rows.teacher,
        rows.wanted,
        ce_weight,
        l1_weight,
        chunk,
    )
    acceptance = (1 - 0.5 * distances).clamp(0, 1)
    confidence = x.new_zeros(())
    if drafter.confidence_head is not None:
        read = markov if drafter.config.confidence_head_with_markov else None
        logits = drafter.confidence_head(x, read)
        each = F.binary_cross_entropy_with_logits(logits, acceptance, reduction="none")
        confidence = (each * decay).sum() / decay.sum().clamp(min=1e-9)
        total = total + weights.confidence * confidence
    return LossParts(
        total=total,
        cross_entropy=(entropies * known).sum() / known.sum().clamp(min=1e-9),
        distance=(distances * decay).sum() / decay.sum().clamp(min=1e-9),
        confidence=confidence.detach(),
        acceptance=acceptance,
    )
