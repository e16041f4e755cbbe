"""Builds the C++ extension once a machine and hands it out; without a compiler, says so and returns None."""

from __future__ import annotations

import hashlib
import logging
import platform
import shutil
import sys
import time
from functools import cache
from pathlib import Path
from typing import Protocol, cast

import torch

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp")


class CompiledKernels(Protocol):
    """What the extension offers; shapes and layouts are stated in `kernels.cpp`."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor: ...

    def linear(self, x: torch.Tensor, packed: torch.Tensor, n: int, bias: torch.Tensor | None) -> torch.Tensor: ...

    def write_kv(
        self,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        pages: torch.Tensor,
        owner: torch.Tensor,
        position: torch.Tensor,
    ) -> None: ...

    def attention(
        self,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        pages: torch.Tensor,
        owner: torch.Tensor,
        position: torch.Tensor,
        scale: float,
        window: int,
    ) -> torch.Tensor: ...


def _processor() -> str:
    """Name and abilities of the processor: a build for one must not be loaded on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


@cache
def load_kernels() -> CompiledKernels | None:
    """The compiled kernels, built at the first call on this machine (about a minute) and cached after it.

    Returns None, with a warning, where there is no C++ compiler or the build fails: plain torch then does the
    work, slower and without batch invariance.
    """
    if shutil.which("g++") is None and shutil.which("c++") is None:
        logger.warning("no C++ compiler found: steps run on plain torch, several times slower at small batches")
        return None
    from torch.utils import cpp_extension

    # A virtual environment's ninja need not be on the path of whoever started this process.
    key = hashlib.sha256("\n".join([SOURCE.read_text(), *FLAGS, torch.__version__, _processor()]).encode())
    name = f"dspark_kernels_{key.hexdigest()[:12]}"
    built = Path(cpp_extension._get_build_directory(name, verbose=False)) / f"{name}.so"
    if not built.exists():
        print(
            "building the CPU kernels for this machine (once, about a minute) ...",
            file=sys.stderr,
            flush=True,
        )
    started = time.monotonic()
    try:
        module = cpp_extension.load(
            name, [str(SOURCE)], extra_cflags=list(FLAGS), extra_ldflags=["-fopenmp"], verbose=False
        )
    except (RuntimeError, OSError, ImportError) as error:
        logger.warning("the CPU kernels could not be built, plain torch is used instead: %s", error)
        return None
    logger.info("CPU kernels ready after %.1f s", time.monotonic() - started)
    return cast(CompiledKernels, module)
