"""The shape of a DSpark drafter: what its config.json says."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class DSparkConfig(BaseModel):
    """Shape of a semi-autoregressive drafter, with the field names that DeepSpec checkpoints use.

    Anchor-first: slot 0 of a block is the anchor's embedding at the anchor's own position and predicts the
    first draft token, so `block_size` slots give `block_size` drafts (the paper's gamma).

    Attributes:
        hidden_size: H, width of the drafter and of the target.
        num_hidden_layers: draft layers.
        num_attention_heads, num_key_value_heads, head_dim: grouped-query attention of a draft layer.
        intermediate_size: width of the gated MLP.
        vocab_size: V, the target's vocabulary.
        draft_vocab_size: Vd, tokens that the drafter can propose.
        target_layer_ids: m layers of the target (0-based) whose *outputs* are the context features. The last
            layer is not allowed: what is usually returned for it has gone through the final norm.
        num_target_layers: layers of the target.
        block_size: gamma, draft tokens of a block.
        mask_token_id: token whose frozen embedding fills the slots after the anchor. It should be one that
            ordinary text never holds.
        markov_rank: r, rank of the Markov head; 0 leaves it out (DFlash).
        markov_head_type: only the plain Markov head so far.
        enable_confidence_head: whether survival is predicted.
        confidence_head_with_markov: whether the confidence head also reads W1[x_{k-1}].
        rms_norm_eps: epsilon of every norm.
        rope_theta: base of the rotary embedding.
        sliding_window: context positions that a block sees: the last ones before the anchor.

    Raises:
        pydantic.ValidationError: naming the field that does not fit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    hidden_size: int = Field(gt=0)
    num_hidden_layers: int = Field(default=2, gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    draft_vocab_size: int = Field(default=8192, gt=0)
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    num_target_layers: int = Field(gt=0)
    block_size: int = Field(default=5, gt=0)
    mask_token_id: int = Field(ge=0)
    markov_rank: int = Field(default=64, ge=0)
    markov_head_type: Literal["vanilla"] = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    rms_norm_eps: float = Field(default=1e-6, gt=0)
    rope_theta: float = Field(default=10_000.0, gt=0)
    sliding_window: int = Field(default=256, gt=0)

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim {self.head_dim} is odd: rotary embeddings turn pairs")
        if self.draft_vocab_size > self.vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} is above vocab_size {self.vocab_size}")
        if self.mask_token_id >= self.vocab_size:
            raise ValueError(f"mask_token_id {self.mask_token_id} is not below vocab_size {self.vocab_size}")
        ids = self.target_layer_ids
        if list(ids) != sorted(set(ids)) or ids[0] < 0:
            raise ValueError(f"target_layer_ids {list(ids)} must rise and not be negative")
        if ids[-1] >= self.num_target_layers - 1:
            raise ValueError(f"target_layer_ids {list(ids)} must be below the last layer {self.num_target_layers - 1}")
        if self.confidence_head_with_markov and self.enable_confidence_head and not self.markov_rank:
            raise ValueError("confidence_head_with_markov needs markov_rank above 0")
        return self

    @property
    def feature_size(self) -> int:
        """m * H, width of the raw context features of one position."""
        return len(self.target_layer_ids) * self.hidden_size
