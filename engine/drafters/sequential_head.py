"""The two small heads that make a parallel draft depend on the token before: Markov and confidence."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """B(x_{k-1}, .) = W1[x_{k-1}] W2: a low-rank bias on the draft logits (DSpark, sequential head).

    W1 is indexed by *target* token ids, W2 gives logits over the *draft* vocabulary.
    """

    def __init__(self, vocab_size: int, draft_vocab_size: int, rank: int) -> None:
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)

    def embed(self, previous: Tensor) -> Tensor:
        """W1[x_{k-1}]: [...] target token ids -> [..., r]."""
        embedded: Tensor = self.markov_w1(previous)
        return embedded

    def forward(self, previous: Tensor) -> Tensor:
        """[...] target token ids of the token before -> [..., Vd] bias on the logits."""
        bias: Tensor = self.markov_w2(self.markov_w1(previous))
        return bias


class ConfidenceHead(nn.Module):
    """c_k = sigmoid(w^T [h_k ; W1[x_{k-1}]] + b): the chance that x_k survives if x_1..x_{k-1} did.

    It reads the token *before* the drafted one and never the drafted one itself, which is what allows a
    planner to use it without biasing the output.
    """

    def __init__(self, hidden_size: int, rank: int) -> None:
        super().__init__()
        self.proj = nn.Linear(hidden_size + rank, 1)

    def forward(self, hidden: Tensor, markov: Tensor | None) -> Tensor:
        """h [..., H] and W1[x_{k-1}] [..., r] (None if the head does not read it) -> logits [...]."""
        inputs = hidden if markov is None else torch.cat((hidden, markov), dim=-1)
        logits: Tensor = self.proj(inputs).squeeze(-1)
        return logits
