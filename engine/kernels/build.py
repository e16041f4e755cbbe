"""Builds the C++ extension once a machine and hands it out; without a compiler, says so and returns None."""

from __future__ import annotations

import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import platform
import shutil
import subprocess
import sysconfig
from functools import cache
from pathlib import Path
from typing import Protocol, cast

import torch

from engine.progress import announced

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("kernels.cpp")
FOLDER = Path("~/.cache/dspark-serve/kernels").expanduser()
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-fopenmp", "-std=c++20", "-fPIC", "-shared")


class CompiledDecoder(Protocol):
    """Layers in one call; see `decoder.h`."""

    def add_layer(self, weights: dict[str, torch.Tensor], window: int) -> None: ...

    def run(
        self,
        x: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        pages: torch.Tensor,
        owner: torch.Tensor,
        position: torch.Tensor,
        last: torch.Tensor,
        wanted: list[int],
    ) -> torch.Tensor: ...

    def write_context(
        self,
        x: torch.Tensor,
        cosine: torch.Tensor,
        sine: torch.Tensor,
        keys: list[torch.Tensor],
        values: list[torch.Tensor],
        pages: torch.Tensor,
        owner: torch.Tensor,
        position: torch.Tensor,
    ) -> None: ...


class CompiledKernels(Protocol):
    """What the extension offers; shapes and layouts are stated in its sources."""

    def pack(self, weight: torch.Tensor) -> torch.Tensor: ...

    def linear(self, x: torch.Tensor, packed: torch.Tensor, n: int, bias: torch.Tensor | None) -> torch.Tensor: ...

    def write_and_attend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        pages: torch.Tensor,
        owner: torch.Tensor,
        position: torch.Tensor,
        scale: float,
        window: int,
    ) -> torch.Tensor: ...

    def Decoder(
        self, hidden: int, inner: int, heads: int, key_heads: int, size: int, eps: float, scale: float
    ) -> CompiledDecoder: ...


def processor() -> str:
    """Name and abilities of the processor: a build or a measurement on one must not be used on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags"))}))


def _build(compiler: str, name: str, library: Path) -> None:
    """Compile to `library`. Several processes may do so at once: the last one in wins, with the same content.

    Raises:
        subprocess.CalledProcessError: the compiler failed; its words are in `stderr`.
    """
    from torch.utils import cpp_extension

    library.parent.mkdir(parents=True, exist_ok=True)
    part = library.with_suffix(f".{os.getpid()}.part")
    headers = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    libraries = cpp_extension.library_paths()
    command = [
        compiler,
        *FLAGS,
        f"-DTORCH_EXTENSION_NAME={name}",
        *(f"-isystem{path}" for path in headers),
        str(SOURCE),
        *(f"-L{path}" for path in libraries),
        *(f"-Wl,-rpath,{path}" for path in libraries),
        *("-ltorch", "-ltorch_cpu", "-ltorch_python", "-lc10"),
        *("-o", str(part)),
    ]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
        part.replace(library)
    finally:
        part.unlink(missing_ok=True)


@cache
def load_kernels() -> CompiledKernels | None:
    """The compiled kernels, built at the first call on this machine (about a minute) and cached after it.

    Returns None, with a warning, where there is no C++ compiler or the build fails: plain torch then does the
    work, slower and without batch invariance.
    """
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        logger.warning("no C++ compiler found: steps run on plain torch, several times slower at small batches")
        return None
    sources = [path.read_text() for path in sorted((SOURCE, *SOURCE.parent.glob("*.h")))]
    parts = (*sources, *FLAGS, torch.__version__, sysconfig.get_config_var("SOABI") or "", processor())
    name = f"dspark_kernels_{hashlib.sha256(chr(10).join(parts).encode()).hexdigest()[:12]}"
    library = FOLDER / f"{name}.so"
    try:
        if not library.exists():
            with announced("building the CPU kernels for this machine (once)"):
                _build(compiler, name, library)
        loader = importlib.machinery.ExtensionFileLoader(name, str(library))
        spec = importlib.util.spec_from_file_location(name, library, loader=loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except subprocess.CalledProcessError as error:
        logger.warning("the CPU kernels could not be built, plain torch is used instead:\n%s", error.stderr[-2000:])
        return None
    except (OSError, ImportError) as error:
        logger.warning("the CPU kernels could not be loaded, plain torch is used instead: %s", error)
        return None
    return cast(CompiledKernels, module)
