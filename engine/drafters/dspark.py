"""The DSpark drafter: a parallel backbone with injected context, a Markov head and a confidence head.

Shapes: R blocks, g = gamma slots a block, C context positions, T tokens, H hidden size, m feature layers,
Hq/Hkv query and key heads of size D, V the target's vocabulary and Vd the part of it that can be drafted.

A block is (anchor embedding, g - 1 mask embeddings) at positions anchor, anchor + 1, ...; it attends to
itself in both directions and to context positions strictly before the anchor. Keys are rotated by their
absolute position when they are made, so the order in which context keys lie in memory does not matter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.drafters.config import DSparkConfig
from engine.drafters.sequential_head import ConfidenceHead, MarkovHead

# (q [R, g, Hq, D], k [R, g, Hkv, D], v [R, g, Hkv, D] of the blocks themselves) -> [R, g, Hq, D]; what else
# a block sees is up to the callable.
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class RMSNorm(nn.Module):
    """x / rms(x) * weight, over the last dimension, in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight.float(), self.eps)


class FeatureFusion(nn.Module):
    """H_ctx = RMSNorm(W_c [H^(l1); ...; H^(lm)]): what the verifier sends of each committed token.

    It belongs to the drafter's checkpoint (`fc.weight`, `hidden_norm.weight`) but runs beside the verifier,
    so that 1/m of the raw hidden states travels.
    """

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.fc = nn.Linear(config.feature_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., m*H] hidden states of the feature layers, concatenated in layer order -> [..., H]."""
        fused: Tensor = self.hidden_norm(self.fc(hidden))
        return fused


def rotary(positions: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosines and sines [..., 1, D/2] float32 of the rotary embedding at integer positions [...]."""
    exponents = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float32) / head_dim
    angles = positions.float()[..., None, None] * theta**-exponents
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate [..., heads, D] by [..., 1, D/2] (first half against second half, as Llama and Qwen do)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class DraftAttention(nn.Module):
    """Projections of one draft layer's attention; queries and keys are normed a head (as in Qwen3)."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.heads = config.num_attention_heads
        self.key_heads = config.num_key_value_heads
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, self.heads * self.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, self.key_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, self.key_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(self.heads * self.head_dim, config.hidden_size, bias=False)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
        """[..., H] -> keys (normed, rotated) and values [..., Hkv, D]."""
        keys = self.k_proj(x).unflatten(-1, (self.key_heads, self.head_dim))
        values: Tensor = self.v_proj(x).unflatten(-1, (self.key_heads, self.head_dim))
        return rotate(self.k_norm(keys), cosine, sine), values

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, attend: Attend) -> Tensor:
        """[R, g, H] -> [R, g, H]."""
        queries = self.q_norm(self.q_proj(x).unflatten(-1, (self.heads, self.head_dim)))
        keys, values = self.keys_values(x, cosine, sine)
        output: Tensor = self.o_proj(attend(rotate(queries, cosine, sine), keys, values).flatten(-2))
        return output


class DraftMLP(nn.Module):
    """down(silu(gate(x)) * up(x))."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return output


class DraftLayer(nn.Module):
    """One pre-norm transformer layer of the backbone."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.self_attn = DraftAttention(config)
        self.mlp = DraftMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, cosine: Tensor, sine: Tensor, attend: Attend) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cosine, sine, attend)
        output: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return output


def attend_to_context(keys: Tensor, values: Tensor, mask: Tensor) -> Attend:
    """Attention of blocks to their own slots and to a context of their own.

    Args:
        keys, values: [R, C, Hkv, D] of the context, in any order (C may be 0).
        mask: [R, C] bool, True where a context position exists and may be seen.
    """
    context_keys, context_values = keys.transpose(1, 2), values.transpose(1, 2)
    blocked = ~mask[:, None, None, :]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks, slots, heads, size = q.shape
        key_heads = k.shape[2]
        # Query heads that share a key head are laid beside each other as further query rows.
        grouped = q.view(blocks, slots, key_heads, -1, size).permute(0, 2, 3, 1, 4).flatten(2, 3)
        grouped = grouped * size**-0.5
        scores = torch.cat(
            (
                (grouped @ context_keys.transpose(2, 3)).masked_fill(blocked, -torch.inf),
                grouped @ k.permute(0, 2, 3, 1),
            ),
            dim=-1,
        )
        weights = scores.softmax(dim=-1)
        count = context_keys.shape[2]
        mixed = weights[..., :count] @ context_values + weights[..., count:] @ v.transpose(1, 2)
        mixed = mixed.view(blocks, key_heads, -1, slots, size)
        return mixed.permute(0, 3, 1, 2, 4).reshape(blocks, slots, heads, size)

    return attend


class DSparkDrafter(nn.Module):
    """Everything of the drafter but the fusion, which lives at the verifier.

    The target's token embedding and the rows of its LM head for the draft vocabulary are frozen and given
    here; they are not part of the drafter's checkpoint.

    Args:
        config: the shape.
        embedding: [V, H] the target's token embedding (kept by reference, not copied).
        head_rows: [Vd, H] rows of the target's LM head of the tokens in `draft_ids`, in that order.
        draft_ids: [Vd] int64 target token ids that can be drafted, rising.

    Raises:
        ValueError: naming the argument whose shape or order does not fit the config.
    """

    d2t: Tensor
    t2d: Tensor
    embedding: Tensor

    def __init__(self, config: DSparkConfig, embedding: Tensor, head_rows: Tensor, draft_ids: Tensor) -> None:
        super().__init__()
        for name, tensor, shape in (
            ("embedding", embedding, (config.vocab_size, config.hidden_size)),
            ("head_rows", head_rows, (config.draft_vocab_size, config.hidden_size)),
            ("draft_ids", draft_ids, (config.draft_vocab_size,)),
        ):
            if tuple(tensor.shape) != shape:
                raise ValueError(f"{name} has shape {tuple(tensor.shape)}, the config wants {shape}")
        if bool((draft_ids.diff() <= 0).any()) or int(draft_ids[0]) < 0 or int(draft_ids[-1]) >= config.vocab_size:
            raise ValueError("draft_ids must rise and lie inside the target's vocabulary")
        self.config = config
        self.layers = nn.ModuleList(DraftLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        rank = config.markov_rank
        self.markov_head = MarkovHead(config.vocab_size, config.draft_vocab_size, rank) if rank else None
        reads_markov = rank if config.confidence_head_with_markov else 0
        self.confidence_head = (
            ConfidenceHead(config.hidden_size, reads_markov) if config.enable_confidence_head else None
        )
        self.register_buffer("d2t", draft_ids - torch.arange(config.draft_vocab_size))
        reachable = torch.zeros(config.vocab_size, dtype=torch.bool)
        reachable[draft_ids] = True
        self.register_buffer("t2d", reachable)
        self.register_buffer("embedding", embedding, persistent=False)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False, device="meta")
        self.lm_head.weight = nn.Parameter(head_rows, requires_grad=False)

    @property
    def draft_ids(self) -> Tensor:
        """[Vd] int64 target token id of each draft token id."""
        return self.d2t + torch.arange(self.d2t.shape[0], device=self.d2t.device)

    def rotary(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [..., 1, D/2] at positions [...]."""
        return rotary(positions, self.config.head_dim, self.config.rope_theta)

    def context_kv(self, features: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Keys and values of context positions, for every layer.

        Args:
            features: [..., H] fused features (see `FeatureFusion`).
            positions: [...] absolute positions of these tokens.

        Returns:
            for each layer (keys, values), [..., Hkv, D]; keys are normed and rotated.
        """
        cosine, sine = self.rotary(positions)
        return [layer.self_attn.keys_values(features.float(), cosine, sine) for layer in self.draft_layers()]

    def backbone(
        self,
        anchor: Tensor,
        anchor_position: Tensor,
        context: Sequence[tuple[Tensor, Tensor]],
        context_mask: Tensor,
    ) -> Tensor:
        """Run R blocks, each against a context of its own.

        Args:
            anchor: [R] target token ids of the anchors.
            anchor_position: [R] their absolute positions.
            context: for each layer (keys, values) [R, C, Hkv, D], in any order.
            context_mask: [R, C] bool, True for the positions the block may see: those before the anchor and
                not more than `sliding_window` before it.

        Returns:
            h [R, g, H] float32, normed: what the LM head, the Markov and the confidence head read.
        """
        attends = [attend_to_context(keys, values, context_mask) for keys, values in context]
        return self.run_layers(anchor, anchor_position, attends)

    def run_layers(self, anchor: Tensor, anchor_position: Tensor, attends: Sequence[Attend]) -> Tensor:
        """The backbone, given the attention of each layer: so training shares contexts between blocks."""
        slots = self.config.block_size
        positions = anchor_position[:, None] + torch.arange(slots, device=anchor.device)
        cosine, sine = self.rotary(positions)
        x = self.block_inputs(anchor)
        for layer, attend in zip(self.draft_layers(), attends, strict=True):
            x = layer(x, cosine, sine, attend)
        normed: Tensor = self.norm(x)
        return normed

    def block_inputs(self, anchor: Tensor) -> Tensor:
        """[R] anchors -> [R, g, H] float32: the anchor's embedding, then the mask token's."""
        tokens = anchor[:, None].repeat(1, self.config.block_size)
        tokens[:, 1:] = self.config.mask_token_id
        return F.embedding(tokens, self.embedding).float()

    def base_logits(self, hidden: Tensor) -> Tensor:
        """U_k: h [..., H] -> [..., Vd] logits over the draft vocabulary, without the Markov bias."""
        logits: Tensor = self.lm_head(hidden)
        return logits

    def markov_bias(self, previous: Tensor) -> Tensor:
        """B(x_{k-1}, .): target ids [...] of the tokens before -> [..., Vd]; zeros without a Markov head."""
        if self.markov_head is None:
            return torch.zeros(*previous.shape, self.config.draft_vocab_size, device=previous.device)
        bias: Tensor = self.markov_head(previous)
        return bias

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """h [..., H] and target ids [...] of the tokens before -> [...] logits of c_k.

        Raises:
            ValueError: if the drafter has no confidence head.
        """
        if self.confidence_head is None:
            raise ValueError("enable_confidence_head is false: this drafter has no confidence head")
        markov = None
        if self.config.confidence_head_with_markov and self.markov_head is not None:
            markov = self.markov_head.embed(previous)
        logits: Tensor = self.confidence_head(hidden, markov)
        return logits

    def draft_layers(self) -> list[DraftLayer]:
        """The backbone's layers, in order."""
        return [layer for layer in self.layers if isinstance(layer, DraftLayer)]
