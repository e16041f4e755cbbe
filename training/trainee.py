"""A drafter while it is trained: fusion and drafter together, and how they start."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from engine.drafters.config import DSparkConfig
from engine.drafters.dspark import DSparkDrafter, FeatureFusion
from engine.token_tables import TokenTables
from training.blocks import draft_hidden
from training.dataset import SequenceData

PROJECTION_STD = 0.02


class Trainee(nn.Module):
    """Fusion and drafter as one module.

    Raw hidden states differ a hundredfold in size from one dimension to the next. `fc` is trained on features
    divided by the mean size of their dimension, so that every weight matters about as much and one step size
    suits all; `folded_fusion` moves the division into `fc` for serving.

    Args:
        config: shape of the drafter.
        tables: the target's.
        draft_ids: [Vd] int64, rising.
        feature_size: [m*H] mean absolute value of each raw feature dimension.
    """

    feature_size: Tensor

    def __init__(self, config: DSparkConfig, tables: TokenTables, draft_ids: Tensor, feature_size: Tensor) -> None:
        super().__init__()
        self.fusion = FeatureFusion(config)
        self.drafter = DSparkDrafter(config, tables.embedding, tables.head_rows(draft_ids), draft_ids)
        self.register_buffer("feature_size", feature_size)

    def start(self, generator: torch.Generator) -> None:
        """Fill the weights: projections small and random, norms one, Markov bias and confidence zero.

        W1 is random and W2 zero, so the draft starts as the backbone's alone and W2 gets a gradient at once.
        """
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if not weight.requires_grad or name.endswith("norm.weight"):
                    continue
                if name.endswith(("markov_w2.weight", "confidence_head.proj.weight", "confidence_head.proj.bias")):
                    weight.zero_()
                elif name.endswith("markov_w1.weight"):
                    weight.normal_(0.0, weight.shape[1] ** -0.5, generator=generator)
                elif weight.dim() == 2:
                    weight.normal_(0.0, PROJECTION_STD, generator=generator)

    def forward(self, features: Tensor, tokens: Tensor, anchors: Tensor) -> Tensor:
        """Raw features [S, L, m*H], tokens [S, L], anchors [S, A] -> h [S, A, g, H]."""
        return draft_hidden(self.drafter, self.fusion(features / self.feature_size), tokens, anchors)

    def folded_fusion(self) -> FeatureFusion:
        """The fusion that takes raw features."""
        folded = FeatureFusion(self.drafter.config)
        with torch.no_grad():
            folded.fc.weight.copy_(self.fusion.fc.weight / self.feature_size)
            folded.hidden_norm.weight.copy_(self.fusion.hidden_norm.weight)
        return folded

    def draft_index(self) -> Tensor:
        """[V] int64 draft id of each target id, -1 where there is none."""
        index = torch.full((self.drafter.config.vocab_size,), -1)
        index[self.drafter.draft_ids] = torch.arange(self.drafter.config.draft_vocab_size)
        return index


def measure_feature_size(data: SequenceData, sequences: int = 16) -> Tensor:
    """[m*H] mean absolute value of each raw feature dimension, over the first training sequences.

    A mean of absolute values, not of squares: a few positions (the first token above all) have values a
    thousand times the usual, which would hide the dimension everywhere else.
    """
    features = data.load(data.training_rows()[:sequences]).features
    return features.abs().mean(dim=(0, 1)).clamp(min=1e-4)
