"""The target model behind one call: a ragged step of tokens in, logits and features out.

Any transformers causal language model whose attention goes through the attention interface can be run: its own
modules do the work, with linear layers packed for the compiled kernels and attention reading the page pool. The
layers of the most common families run as one compiled call instead (`engine.kernels.decoder`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from engine.kernels.attention import RaggedPlaces, write_and_attend
from engine.kernels.build import CompiledKernels, load_kernels
from engine.kernels.decoder import FusedDecoder, fused_decoder
from engine.kernels.linear import pack_linears
from engine.pages import PAGE, KVShape, PagePool

ATTENTION = "dspark_paged"


@dataclass(frozen=True)
class StepInput:
    """One forward pass over T tokens of S sequences, flattened without padding.

    Attributes:
        tokens: [T] int64 token ids.
        places: where the tokens live.
        pool: the page pool.
        logit_rows: [L] int64 rows of `tokens` whose logits are wanted.
    """

    tokens: torch.Tensor
    places: RaggedPlaces
    pool: PagePool
    logit_rows: torch.Tensor


@dataclass(frozen=True)
class StepOutput:
    """What a forward pass gives.

    Attributes:
        logits: [L, V] float32 at the wanted rows.
        hidden: [L, H] float32 final hidden states at those rows, after the final norm.
        features: [T, m * H] hidden states after the m feature layers, concatenated in the layers' order;
            m = 0 gives [T, 0].
    """

    logits: torch.Tensor
    hidden: torch.Tensor
    features: torch.Tensor


def _paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    step: StepInput | None = None,
    kernels: CompiledKernels | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, Hq, T, D], key and value [1, Hk, T, D] -> [1, T, Hq, D]."""
    assert step is not None, "the paged attention runs inside TargetRunner.forward only"
    if s_aux is not None:
        raise ValueError("attention sinks are not supported")
    layer = module.layer_idx
    assert isinstance(layer, int)
    out = write_and_attend(
        kernels,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        step.pool.keys[layer],
        step.pool.values[layer],
        step.places,
        scaling if scaling is not None else query.shape[-1] ** -0.5,
        sliding_window or 0,
        softcap or 0.0,
    )
    return out[None], None


class TargetRunner:
    """Holds the target's weights and runs ragged steps. Owns no request state.

    Args:
        model: a transformers causal language model in evaluation mode.
        feature_layers: 0-based layers whose outputs the drafter reads.

    Raises:
        ValueError: a feature layer does not exist, or is the last one (whose output the model returns only after
            its final norm); or the model's rotary scaling depends on the longest text of a batch, so that requests
            would change each other's output.
    """

    def __init__(self, model: Any, feature_layers: Seq[int] = ()) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION, _paged_attention)
        config = model.config.get_text_config()
        last = config.num_hidden_layers - 1
        for layer in feature_layers:
            if not 0 <= layer < last:
                raise ValueError(f"feature layer {layer} is not below the target's last layer {last}")
        _refuse_batch_dependent_rotary(config)
        self.config = config
        self.vocab_size = int(config.vocab_size)
        self.hidden_size = int(config.hidden_size)
        self.feature_layers = tuple(feature_layers)
        self._model = model.eval()
        self._model.set_attn_implementation(ATTENTION)
        self._device = next(model.parameters()).device
        self._kernels = load_kernels() if self._device.type == "cpu" else None
        self.head_weight: torch.Tensor = model.get_output_embeddings().weight.detach()
        self.embedding: torch.Tensor = model.get_input_embeddings().weight.detach()
        self._fused = None
        if self._kernels is not None and self.dtype == torch.float32:
            self._fused = fused_decoder(self._kernels, self._model)
            pack_linears(self._model)
        self._captured: list[torch.Tensor] = []
        for layer in self.feature_layers if self._fused is None else ():
            self._model.get_decoder().layers[layer].register_forward_hook(self._capture)

    @classmethod
    def load(
        cls,
        folder: Path,
        feature_layers: Seq[int] = (),
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> TargetRunner:
        """The model in a Hugging Face folder, with weights in `dtype`."""
        from transformers import AutoModelForCausalLM

        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        model.to(device)
        return cls(model, feature_layers)

    @property
    def dtype(self) -> torch.dtype:
        """Type of the activations."""
        return self.embedding.dtype

    @property
    def compiled(self) -> bool:
        """Whether steps run on the compiled CPU kernels."""
        return self._kernels is not None and self.dtype == torch.float32

    @property
    def fused(self) -> bool:
        """Whether all layers run as one compiled call."""
        return self._fused is not None

    @property
    def kv_shape(self) -> KVShape:
        """What a page pool for this model must hold."""
        c = self.config
        head_dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
        return KVShape(c.num_hidden_layers, c.num_key_value_heads, head_dim, self.dtype)

    def _capture(self, module: nn.Module, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        self._captured.append(hidden[0])

    @torch.inference_mode()
    def forward(self, step: StepInput) -> StepOutput:
        """Run one step: writes keys and values of its tokens into the pool; shapes as in the dataclasses."""
        hidden, features = self._run_fused(self._fused, step) if self._fused is not None else self._run_modules(step)
        logits = self._model.lm_head(hidden).float()
        soft_cap = getattr(self.config, "final_logit_softcapping", None)
        if soft_cap is not None:
            logits = torch.tanh(logits / soft_cap) * soft_cap
        return StepOutput(logits, hidden.float(), features)

    def _run_fused(self, fused: FusedDecoder, step: StepInput) -> tuple[torch.Tensor, torch.Tensor]:
        """Hidden states [L, H] at the wanted rows and features [T, m * H], by the compiled layers."""
        decoder = self._model.get_decoder()
        rotary = decoder.rotary_emb
        angles = step.places.position[:, None].float() * rotary.inv_freq.float()
        x = torch.embedding(self.embedding, step.tokens)
        features = fused.run(
            x,
            (angles.cos() * rotary.attention_scaling, angles.sin() * rotary.attention_scaling),
            (step.pool.keys, step.pool.values),
            step.places,
            self.feature_layers,
        )
        return decoder.norm(x[step.logit_rows]), features

    def _run_modules(self, step: StepInput) -> tuple[torch.Tensor, torch.Tensor]:
        """The same by the model's own modules."""
        self._captured = []
        out = self._model.get_decoder()(
            input_ids=step.tokens[None].to(self._device),
            position_ids=step.places.position[None].long(),
            use_cache=False,
            step=step,
            kernels=self._kernels,
        )
        hidden = out.last_hidden_state[0]
        features = torch.cat(self._captured, dim=-1) if self._captured else hidden.new_empty(len(step.tokens), 0)
        self._captured = []
        return hidden[step.logit_rows.to(self._device)], features


def _refuse_batch_dependent_rotary(config: Any) -> None:
    """Raise ValueError for rotary scaling that looks at the longest text of a batch (dynamic NTK, LongRoPE)."""
    parameters = getattr(config, "rope_parameters", None) or {}
    for part in (parameters, *(value for value in parameters.values() if isinstance(value, dict))):
        if part.get("rope_type") in ("dynamic", "longrope"):
            raise ValueError(
                f"rotary scaling {part['rope_type']!r} depends on the longest text of a batch: requests would change "
                f"each other's output, so it is not supported"
            )


def places_of(tables: Seq[Seq[int]], starts: Seq[int], counts: Seq[int], device: str = "cpu") -> RaggedPlaces:
    """Places of a step in which sequence s runs positions starts[s] .. starts[s] + counts[s] - 1."""
    columns = max((PagePool.pages_for(a + n) for a, n in zip(starts, counts, strict=True)), default=0)
    pages = torch.zeros(len(tables), max(columns, 1), dtype=torch.int32)
    for s, table in enumerate(tables):
        used = min(columns, len(table))
        pages[s, :used] = torch.tensor(table[:used], dtype=torch.int32)
    count = torch.tensor(counts, dtype=torch.int64)
    owner = torch.repeat_interleave(torch.arange(len(tables)), count)
    first = torch.repeat_interleave(torch.tensor(starts) - torch.cumsum(count, 0) + count, count)
    position = torch.arange(len(owner)) + first
    return RaggedPlaces(pages.to(device), owner.int().to(device), position.int().to(device))


__all__ = ["PAGE", "StepInput", "StepOutput", "TargetRunner", "places_of"]
