"""Linear layers whose weights are packed once, for the compiled kernels."""

from __future__ import annotations

import torch
from torch import nn

from engine.kernels.build import CompiledKernels, load_kernels


def packed_weight(kernels: CompiledKernels, weight: torch.Tensor) -> torch.Tensor:
    """W [N, K] as panels. What bfloat16 can hold exactly is held as bfloat16: half the bytes, the same numbers."""
    half = weight.to(torch.bfloat16)
    exact = bool(torch.equal(half.float(), weight.float()))
    return kernels.pack(half if exact else weight.float())


class PackedLinear(nn.Module):
    """y = x W^T + b with W [N, K] held as panels; x [..., K] float32 -> [..., N] float32."""

    packed: torch.Tensor

    def __init__(self, kernels: CompiledKernels, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        super().__init__()
        weight = weight.detach()
        self.out_features, self.in_features = weight.shape
        self._kernels = kernels
        self.register_buffer("packed", packed_weight(kernels, weight), persistent=False)
        self.bias = None if bias is None else nn.Parameter(bias.detach().float(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self._kernels.linear(x.reshape(-1, self.in_features), self.packed, self.out_features, self.bias)
        return y.view(*x.shape[:-1], self.out_features)


def pack_linears(model: nn.Module) -> int:
    """Replace every `nn.Linear` below `model` by a packed one; returns how many were replaced.

    Does nothing (0) where there are no compiled kernels or the weights are not on the CPU.
    """
    kernels = load_kernels()
    if kernels is None:
        return 0
    count = 0
    for parent in model.modules():
        for name, child in list(parent.named_children()):
            if type(child) is nn.Linear and child.weight.device.type == "cpu":
                setattr(parent, name, PackedLinear(kernels, child.weight, child.bias))
                count += 1
    return count
