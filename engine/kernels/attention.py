"""Ragged attention over paged keys and values: the compiled kernel on a CPU, gathered pages and torch elsewhere."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kernels.build import CompiledKernels


@dataclass(frozen=True)
class RaggedPlaces:
    """Where the T tokens of a step live: S sequences, C page-table columns.

    Attributes:
        pages: [S, C] int32 page numbers; columns past a sequence's end are never read.
        owner: [T] int32 row of `pages` of each token.
        position: [T] int32 position of each token in its sequence.
    """

    pages: torch.Tensor
    owner: torch.Tensor
    position: torch.Tensor


def write_and_attend(
    kernels: CompiledKernels | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: RaggedPlaces,
    scale: float,
    window: int,
    soft_cap: float = 0.0,
) -> torch.Tensor:
    """Store k, v [T, Hk, D] of the step's tokens, then let q [T, Hq, D] attend: [T, Hq, D].

    keys [pages, Hk, D, page], values [pages, Hk, page, D]: one layer's pools, written in place. A token sees
    positions max(0, position - window + 1) .. position of its own sequence; window 0 means all. A soft cap c above 0
    (Gemma 2) turns scores s into c * tanh(s / c); the compiled kernel does not know it.
    """
    if kernels is not None and q.device.type == "cpu" and q.dtype == torch.float32 and not soft_cap:
        at = (places.pages, places.owner, places.position)
        return kernels.write_and_attend(q, k, v, keys, values, *at, scale, window)
    return _torch_write_and_attend(q, k, v, keys, values, places, scale, window, soft_cap)


def _torch_write_and_attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    places: RaggedPlaces,
    scale: float,
    window: int,
    soft_cap: float,
) -> torch.Tensor:
    page = keys.shape[3]
    owner, position = places.owner.long(), places.position.long()
    where, offset = places.pages[owner, position // page].long(), position % page
    keys[where, :, :, offset] = k
    values[where, :, offset, :] = v
    columns = int(position.max()) // page + 1
    groups = q.shape[1] // keys.shape[1]
    out = torch.empty_like(q)
    for s in torch.unique(owner).tolist():
        rows = (owner == s).nonzero()[:, 0]
        table = places.pages[s, :columns].long()
        ks = keys[table].permute(1, 0, 3, 2).flatten(1, 2)  # [Hk, C * page, D]
        vs = values[table].permute(1, 0, 2, 3).flatten(1, 2)
        at = torch.arange(ks.shape[1], device=q.device)
        p = position[rows, None]
        seen = (at <= p) & (at > p - window) if window > 0 else at <= p
        # An unwritten place may hold anything, even NaN, and 0 * NaN is NaN.
        vs = torch.where((at <= p.max())[:, None], vs, torch.zeros((), dtype=vs.dtype, device=vs.device))
        heads = q[rows].transpose(0, 1)  # [Hq, n, D]
        scores = heads @ ks.repeat_interleave(groups, 0).transpose(1, 2) * scale
        if soft_cap:
            scores = soft_cap * torch.tanh(scores / soft_cap)
        weights = scores.float().masked_fill(~seen, -torch.inf).softmax(-1).to(vs.dtype)
        out[rows] = (weights @ vs.repeat_interleave(groups, 0)).transpose(0, 1)
    return out
