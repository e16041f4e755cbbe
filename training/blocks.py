"""Many draft blocks a sequence in one pass: anchors, their supervision, attention to a shared context.

S sequences of L tokens, A anchors each, g slots a block. The context keys of a sequence are made once, over
all its positions, and every block sees its own window of them by a mask.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from engine.drafters.dspark import Attend, DSparkDrafter
from training.dataset import DataError, eligible_anchors


@dataclass(frozen=True)
class Blocks:
    """Anchors and the supervision of their slots.

    Attributes:
        anchors: [S, A] positions, rising within a sequence.
        positions: [S, A, g] position of the token that each slot reads: the token before the drafted one. The
            teacher's distribution of the drafted token is the one at this position.
        previous: [S, A, g] target ids of these tokens.
        wanted: [S, A, g] target ids of the tokens to be drafted.
        valid: [S, A, g] bool: the slots of the unbroken generated run that follows the anchor.
    """

    anchors: Tensor
    positions: Tensor
    previous: Tensor
    wanted: Tensor
    valid: Tensor


def sample_anchors(mask: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """[S, A] random eligible positions, rising: without repetition where a sequence has A of them.

    A sequence with fewer repeats some, so that shapes stay fixed.

    Raises:
        DataError: if a sequence has no eligible position.
    """
    rows = []
    for eligible in eligible_anchors(mask):
        places = eligible.nonzero().flatten()
        if not len(places):
            raise DataError("a sequence has no two generated tokens in a row: nothing to draft in it")
        picked = [torch.randperm(len(places), generator=generator) for _ in range(-(-count // len(places)))]
        rows.append(places[torch.cat(picked)[:count]].sort().values)
    return torch.stack(rows)


def supervise(tokens: Tensor, mask: Tensor, anchors: Tensor, slots: int) -> Blocks:
    """What each slot of each block should say, and which slots may be supervised.

    Args:
        tokens: [S, L]; mask: [S, L] bool; anchors: [S, A] positions.
        slots: g.
    """
    length = tokens.shape[1]
    positions = anchors[..., None] + torch.arange(slots)
    inside = positions + 1 < length
    here, there = positions.clamp(max=length - 1), (positions + 1).clamp(max=length - 1)

    def at(values: Tensor, places: Tensor) -> Tensor:
        return values.gather(1, places.flatten(1)).view_as(places)

    generated = at(mask, there) & inside
    return Blocks(
        anchors=anchors,
        positions=here,
        previous=at(tokens, here),
        wanted=at(tokens, there),
        valid=generated.long().cumprod(dim=-1).bool(),
    )


def context_visibility(anchors: Tensor, length: int, window: int) -> Tensor:
    """[S, A] anchors -> [S, A, L] bool: the last `window` positions before each anchor."""
    places = torch.arange(length)
    return (places < anchors[..., None]) & (places >= anchors[..., None] - window)


class _SharedContextAttention(torch.autograd.Function):
    """softmax([q K_ctx^T ; q K_own^T]) [V_ctx ; V_own] without ever laying the two key sets side by side.

    The context part is torch's blocked CPU kernel, which keeps nothing of size queries x keys. It returns the
    log-sum-exp of its scores, with which both parts merge exactly; given the *merged* output and log-sum-exp,
    its backward yields the gradients of the joint softmax.

    q [S, Hkv, Q, D] already scaled, context k, v [S, Hkv, L, D], bias [S, 1, Q, L] (0 or -inf),
    own scores' k, v [S, Hkv, A, g, D] where the Q rows are (A, n, g) flattened.
    """

    @staticmethod
    def forward(  # type: ignore[override]
        ctx, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, own_k: Tensor, own_v: Tensor
    ) -> Tensor:
        blocks = own_k.shape[2]
        context, context_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, False, attn_mask=bias, scale=1.0
        )
        rows = q.unflatten(2, (blocks, -1))  # [S, Hkv, A, n*g, D]
        own_scores = rows @ own_k.transpose(-1, -2)
        lse = torch.logaddexp(context_lse, own_scores.logsumexp(-1).flatten(2))
        own_weights = (own_scores - lse.unflatten(2, (blocks, -1))[..., None]).exp()
        out = context * (context_lse - lse).exp()[..., None] + (own_weights @ own_v).flatten(2, 3)
        ctx.save_for_backward(q, k, v, bias, own_k, own_v, own_weights, out, lse)
        return out

    @staticmethod
    def backward(ctx, grad: Tensor):  # type: ignore[override,no-untyped-def]
        q, k, v, bias, own_k, own_v, own_weights, out, lse = ctx.saved_tensors
        blocks = own_k.shape[2]
        grad = grad.contiguous()
        grad_q, grad_k, grad_v = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q, k, v, out, lse, 0.0, False, attn_mask=bias, scale=1.0
        )
        rows, grad_rows = q.unflatten(2, (blocks, -1)), grad.unflatten(2, (blocks, -1))
        grad_weights = grad_rows @ own_v.transpose(-1, -2)
        delta = (grad * out).sum(-1).unflatten(2, (blocks, -1))[..., None]
        grad_scores = own_weights * (grad_weights - delta)
        grad_q = grad_q + (grad_scores @ own_k).flatten(2, 3)
        grad_own_k = grad_scores.transpose(-1, -2) @ rows
        grad_own_v = own_weights.transpose(-1, -2) @ grad_rows
        return grad_q, grad_k, grad_v, None, grad_own_k, grad_own_v


def attend_shared(keys: Tensor, values: Tensor, visible: Tensor, slots: int) -> Attend:
    """Attention of S * A blocks, of which A share each sequence's context.

    Args:
        keys, values: [S, L, Hkv, D] context of each sequence.
        visible: [S, A, L] bool; each block must see at least one context position.
        slots: g.
    """
    sequences, count = visible.shape[:2]
    context_keys, context_values = keys.transpose(1, 2).contiguous(), values.transpose(1, 2).contiguous()
    bias = torch.zeros(visible.shape).masked_fill_(~visible, -torch.inf)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        heads, size = q.shape[2:]
        key_heads = k.shape[2]
        group = heads // key_heads
        # [S*A, g, Hq, D] -> [S, Hkv, (A, group, g), D]
        rows = (q * size**-0.5).view(sequences, count, slots, key_heads, group, size)
        rows = rows.permute(0, 3, 1, 4, 2, 5).reshape(sequences, key_heads, -1, size)
        row_bias = bias[:, None, :, None, :].expand(-1, -1, -1, group * slots, -1).flatten(2, 3)
        own_k, own_v = (x.view(sequences, count, slots, key_heads, size).permute(0, 3, 1, 2, 4) for x in (k, v))
        out = _SharedContextAttention.apply(rows, context_keys, context_values, row_bias, own_k, own_v)
        out = out.view(sequences, key_heads, count, group, slots, size).permute(0, 2, 4, 1, 3, 5)
        return out.reshape(sequences * count, slots, heads, size)

    return attend


def draft_hidden(drafter: DSparkDrafter, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
    """h of all blocks, equal to what `DSparkDrafter.backbone` gives for each of them.

    Args:
        features: [S, L, H] fused features of all positions.
        tokens: [S, L]; anchors: [S, A] positions, each at least 1.

    Returns:
        [S, A, g, H] float32.
    """
    sequences, length = tokens.shape
    slots = drafter.config.block_size
    visible = context_visibility(anchors, length, drafter.config.sliding_window)
    context = drafter.context_kv(features, torch.arange(length).expand(sequences, -1))
    attends = [attend_shared(keys, values, visible, slots) for keys, values in context]
    hidden = drafter.run_layers(tokens.gather(1, anchors).flatten(), anchors.flatten(), attends)
    return hidden.view(sequences, anchors.shape[1], slots, -1)
