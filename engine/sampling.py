"""From logits to the distribution that is really sampled, and from a distribution to a token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from engine.noise import gumbel
from engine.request import SamplingParams


def allowed_logits(logits: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Logits divided by the temperature, -inf where top-k or top-p forbids a token.

    The order is temperature, top-k, top-p. Ties at the border of top-k or top-p are cut by token id.

    Args:
        logits: [L, V] float32.
        params: of each row; none of them greedy.
    """
    device = logits.device
    temperature = torch.tensor([p.temperature for p in params], dtype=torch.float32, device=device)
    scaled = logits / temperature[:, None]
    cut = [i for i, p in enumerate(params) if p.top_p < 1.0 or 0 < p.top_k < logits.shape[1]]
    if not cut:
        return scaled
    order = scaled[cut].argsort(dim=-1, descending=True, stable=True)
    ranked = scaled[cut].gather(1, order)
    rank = torch.arange(ranked.shape[1], device=device)
    top_k = torch.tensor([params[i].top_k if params[i].top_k > 0 else ranked.shape[1] for i in cut], device=device)
    ranked = ranked.masked_fill(rank >= top_k[:, None], -torch.inf)
    mass = ranked.double().softmax(-1).cumsum(-1)
    top_p = torch.tensor([params[i].top_p for i in cut], dtype=torch.float64, device=device)
    # A token stays while the mass before it is below top-p; the first one always stays.
    before = torch.cat((torch.zeros_like(mass[:, :1]), mass[:, :-1]), dim=1)
    ranked = ranked.masked_fill((before >= top_p[:, None]) & (top_p < 1.0)[:, None], -torch.inf)
    scaled[cut] = torch.empty_like(ranked).scatter_(1, order, ranked)
    return scaled


def sample_weights(weights: Tensor, u: float) -> int:
    """The token at quantile `u` in (0, 1) of non-negative weights [V] (not all 0)."""
    cumulative = weights.double().cumsum(0)
    at = int(torch.searchsorted(cumulative, u * float(cumulative[-1]), right=True))
    if at < len(weights) and weights[at] > 0:
        return at
    return int(weights.nonzero()[-1])  # rounding at the upper end


def coupled_token(scaled: Tensor, seed: int, position: int) -> int:
    """argmax(log p + Gumbel noise) of one row of `allowed_logits` [V]: the token at an absolute position."""
    noise = torch.from_numpy(gumbel(seed, position, np.arange(len(scaled)))).to(scaled.device)
    return int((scaled.double() + noise).argmax())
