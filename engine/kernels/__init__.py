"""Matrix products and attention of a step: a C++ extension on a CPU, plain torch everywhere else."""

from engine.kernels.build import CompiledKernels, load_kernels
from engine.kernels.linear import PackedLinear, pack_linears

__all__ = ["CompiledKernels", "PackedLinear", "load_kernels", "pack_linears"]
