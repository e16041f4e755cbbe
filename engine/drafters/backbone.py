"""The drafter's backbone over bounded contexts: rings of keys and values in slots, and blocks that read them.

A slot holds the last `window` context positions, position p at place p % window; its first `count` places are in
use. Keys are rotated by their absolute position, so their order in the ring does not matter.
"""

from __future__ import annotations

from typing import Protocol

import torch

from engine.drafters.dspark import DSparkDrafter, attend_to_context
from engine.kernels.attention import RaggedPlaces
from engine.kernels.build import CompiledKernels, load_kernels
from engine.kernels.decoder import DecoderShape, FusedDecoder, LayerWeights
from engine.pages import KVShape, PagePool


class Backbone(Protocol):
    """Runs blocks against contexts that it holds."""

    def write(self, slots: torch.Tensor, positions: torch.Tensor, features: torch.Tensor) -> None:
        """Take context positions in: slots [T], absolute positions [T], fused features [T, H] float32."""
        ...

    def run(
        self, anchor: torch.Tensor, position: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """[R, g, H] of blocks with anchors [R] at positions [R], over the first `counts` [R] places of their slots."""
        ...


def backbone_of(model: DSparkDrafter, slots: int) -> Backbone:
    """The fastest backbone for the model's device, with room for `slots` contexts."""
    kernels = load_kernels() if model.embedding.device.type == "cpu" else None
    if kernels is not None and _shape(model).fits():
        return CompiledBackbone(kernels, model, slots)
    return TorchBackbone(model, slots)


class TorchBackbone:
    """The model's own modules over gathered rings: any device."""

    def __init__(self, model: DSparkDrafter, slots: int) -> None:
        c = model.config
        shape = (slots, c.sliding_window, c.num_key_value_heads, c.head_dim)
        device = model.embedding.device
        self._model = model
        self._window = c.sliding_window
        self._keys = [torch.zeros(shape, device=device) for _ in range(c.num_hidden_layers)]
        self._values = [torch.zeros(shape, device=device) for _ in range(c.num_hidden_layers)]

    def write(self, slots: torch.Tensor, positions: torch.Tensor, features: torch.Tensor) -> None:
        """As `Backbone.write`."""
        for layer, (k, v) in enumerate(self._model.context_kv(features, positions)):
            self._keys[layer][slots, positions % self._window] = k
            self._values[layer][slots, positions % self._window] = v

    def run(
        self, anchor: torch.Tensor, position: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """As `Backbone.run`."""
        columns = min(self._window, -(-int(counts.max()) // 32) * 32)
        mask = torch.arange(columns, device=counts.device) < counts[:, None]
        attends = [
            attend_to_context(k[slots, :columns], v[slots, :columns], mask)
            for k, v in zip(self._keys, self._values, strict=True)
        ]
        return self._model.run_layers(anchor, position, attends)


class CompiledBackbone:
    """All layers in one compiled call over paged rings: a CPU.

    A slot's pages hold its ring and, behind the places in use, the keys and values of the block being drafted,
    which the next block or context positions overwrite.
    """

    def __init__(self, kernels: CompiledKernels, model: DSparkDrafter, slots: int) -> None:
        c = model.config
        self._model = model
        self._window = c.sliding_window
        self._columns = PagePool.pages_for(c.sliding_window + c.block_size)
        pool = PagePool(KVShape(c.num_hidden_layers, c.num_key_value_heads, c.head_dim), slots * self._columns)
        self._pools = (pool.keys, pool.values)
        self._decoder = FusedDecoder(kernels, _shape(model), _layers(model))

    def write(self, slots: torch.Tensor, positions: torch.Tensor, features: torch.Tensor) -> None:
        """As `Backbone.write`."""
        owner = torch.arange(len(slots), dtype=torch.int32)
        places = RaggedPlaces(self._pages(slots), owner, (positions % self._window).int())
        self._decoder.write_context(features, self._angles(positions), self._pools, places)

    def run(
        self, anchor: torch.Tensor, position: torch.Tensor, slots: torch.Tensor, counts: torch.Tensor
    ) -> torch.Tensor:
        """As `Backbone.run`."""
        size, blocks = self._model.config.block_size, len(anchor)
        slot = torch.arange(size)
        owner = torch.arange(blocks, dtype=torch.int32).repeat_interleave(size)
        place = (counts[:, None] + slot).int().flatten()
        last = (counts + size - 1).int().repeat_interleave(size)
        x = self._model.block_inputs(anchor).flatten(0, 1)
        angles = self._angles((position[:, None] + slot).flatten())
        self._decoder.run(x, angles, self._pools, RaggedPlaces(self._pages(slots), owner, place), last=last)
        normed: torch.Tensor = self._model.norm(x)
        return normed.view(blocks, size, -1)

    def _pages(self, slots: torch.Tensor) -> torch.Tensor:
        return (slots[:, None] * self._columns + torch.arange(self._columns)).int()

    def _angles(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        cosine, sine = self._model.rotary(positions)
        return cosine[:, 0].contiguous(), sine[:, 0].contiguous()


def _shape(model: DSparkDrafter) -> DecoderShape:
    c = model.config
    return DecoderShape(
        hidden=c.hidden_size,
        inner=c.intermediate_size,
        heads=c.num_attention_heads,
        key_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        norm_eps=c.rms_norm_eps,
        scale=c.head_dim**-0.5,
    )


def _layers(model: DSparkDrafter) -> list[LayerWeights]:
    return [
        LayerWeights(
            input_norm=layer.input_layernorm.weight,
            query=layer.self_attn.q_proj.weight,
            key=layer.self_attn.k_proj.weight,
            value=layer.self_attn.v_proj.weight,
            out=layer.self_attn.o_proj.weight,
            post_norm=layer.post_attention_layernorm.weight,
            gate=layer.mlp.gate_proj.weight,
            up=layer.mlp.up_proj.weight,
            down=layer.mlp.down_proj.weight,
            query_norm=layer.self_attn.q_norm.weight,
            key_norm=layer.self_attn.k_norm.weight,
        )
        for layer in model.draft_layers()
    ]


__all__ = ["Backbone", "CompiledBackbone", "TorchBackbone", "backbone_of"]
