"""All layers of a Llama-like model as one compiled call, with weights packed for it.

At a few tokens a step, half of the time of a small model goes into the calls between its matrix products. Families
whose layers have the one shape that `decoder.h` knows run there; all others keep their own modules.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from engine.kernels.attention import RaggedPlaces
from engine.kernels.build import CompiledDecoder, CompiledKernels
from engine.kernels.linear import packed_weight


@dataclass(frozen=True)
class DecoderShape:
    """Sizes shared by all layers of a decoder."""

    hidden: int
    inner: int
    heads: int
    key_heads: int
    head_dim: int
    norm_eps: float
    scale: float

    def fits(self, lanes: int = 16) -> bool:
        """Whether the compiled attention can take heads of this size (a vector holds 8 or 16 numbers)."""
        return self.head_dim % lanes == 0


@dataclass(frozen=True)
class LayerWeights:
    """One layer. Matrices [outputs, inputs]; gains and biases one-dimensional, None where there is none."""

    input_norm: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    out: torch.Tensor
    post_norm: torch.Tensor
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    query_norm: torch.Tensor | None = None
    key_norm: torch.Tensor | None = None
    qkv_bias: torch.Tensor | None = None
    out_bias: torch.Tensor | None = None
    window: int = 0

    def packed(self, kernels: CompiledKernels) -> dict[str, torch.Tensor]:
        """As `decoder.h` takes them: projections of one input side by side."""
        plain = {
            "input_norm": self.input_norm,
            "post_norm": self.post_norm,
            "q_norm": self.query_norm,
            "k_norm": self.key_norm,
            "qkv_bias": self.qkv_bias,
            "out_bias": self.out_bias,
        }
        matrices = {
            "qkv": torch.cat((self.query, self.key, self.value)),
            "out": self.out,
            "gate_up": torch.cat((self.gate, self.up)),
            "down": self.down,
        }
        weights = {name: w.detach().float().contiguous() for name, w in plain.items() if w is not None}
        return weights | {name: packed_weight(kernels, w.detach()) for name, w in matrices.items()}


class FusedDecoder:
    """Layers in one compiled call. float32 on a CPU."""

    def __init__(self, kernels: CompiledKernels, shape: DecoderShape, layers: Iterable[LayerWeights]) -> None:
        s = shape
        self._decoder: CompiledDecoder = kernels.Decoder(
            s.hidden, s.inner, s.heads, s.key_heads, s.head_dim, s.norm_eps, s.scale
        )
        for layer in layers:
            self._decoder.add_layer(layer.packed(kernels), layer.window)

    def run(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        pools: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        places: RaggedPlaces,
        wanted: Sequence[int] = (),
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run x [T, H] through all layers, in place.

        Args:
            x: [T, H] float32; holds the last layer's output afterwards.
            angles: cosines and sines [T, D / 2] of the tokens' positions.
            pools: keys and values of each layer, as in `PagePool`.
            places: where the tokens live.
            wanted: layers whose outputs are returned.
            last: [T] int32 last position that each token sees; None: its own.

        Returns:
            [T, len(wanted) * H] outputs of the wanted layers, side by side.
        """
        cosine, sine = angles
        keys, values = pools
        return self._decoder.run(
            x,
            cosine,
            sine,
            list(keys),
            list(values),
            places.pages,
            places.owner,
            places.position,
            places.position if last is None else last,
            list(wanted),
        )

    def write_context(
        self,
        x: torch.Tensor,
        angles: tuple[torch.Tensor, torch.Tensor],
        pools: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
        places: RaggedPlaces,
    ) -> None:
        """Write keys and values that inputs x [T, H], already normed, have in every layer, and nothing else."""
        keys, values = pools
        self._decoder.write_context(x, *angles, list(keys), list(values), places.pages, places.owner, places.position)


def fused_decoder(kernels: CompiledKernels, model: Any) -> FusedDecoder | None:
    """The layers of a transformers causal language model, if they are of the known shape; the model's own are removed.

    Llama, Mistral, Qwen2 and Qwen3, with silu and without biases in the MLP. None for everything else.
    """
    config = model.config.get_text_config()
    layers = model.get_decoder().layers
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    shape = DecoderShape(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        head_dim=head_dim,
        norm_eps=getattr(config, "rms_norm_eps", 0.0),
        scale=head_dim**-0.5,
    )
    known = type(model).__name__ in ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
    if not known or config.hidden_act != "silu" or layers[0].mlp.up_proj.bias is not None or not shape.fits():
        return None
    model.get_decoder().layers = torch.nn.ModuleList()
    return FusedDecoder(kernels, shape, _taken(list(layers), config))


def _taken(layers: list[Any], config: Any) -> Iterator[LayerWeights]:
    """Weights of each layer, which leaves the list, so that memory never holds them all twice."""
    while layers:
        layer = layers.pop(0)
        a, m = layer.self_attn, layer.mlp
        biases = [p.bias for p in (a.q_proj, a.k_proj, a.v_proj)]
        norms = [getattr(a, name, None) for name in ("q_norm", "k_norm")]
        window = getattr(a, "sliding_window", None)
        if type(a).__name__ == "MistralAttention":
            window = config.sliding_window
        yield LayerWeights(
            input_norm=layer.input_layernorm.weight,
            query=a.q_proj.weight,
            key=a.k_proj.weight,
            value=a.v_proj.weight,
            out=a.o_proj.weight,
            post_norm=layer.post_attention_layernorm.weight,
            gate=m.gate_proj.weight,
            up=m.up_proj.weight,
            down=m.down_proj.weight,
            query_norm=None if norms[0] is None else norms[0].weight,
            key_norm=None if norms[1] is None else norms[1].weight,
            qkv_bias=None if biases[0] is None else torch.cat(biases),
            out_bias=a.o_proj.bias,
            window=window or 0,
        )
