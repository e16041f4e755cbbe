"""A drafter on disk: config.json, model.safetensors (bf16) and sts.json.

Tensor names are those of DeepSpec and speculators checkpoints: `fc.weight`, `hidden_norm.weight`,
`layers.{i}.*`, `norm.weight`, `markov_head.markov_w1.weight` [V, r], `markov_head.markov_w2.weight` [Vd, r],
`confidence_head.proj.{weight,bias}`, `d2t` (int64 *offsets*: target id = draft id + d2t[draft id]) and `t2d`
(bool [V]). The target's embedding and LM head are not stored.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from engine.drafters.config import DSparkConfig
from engine.drafters.dspark import DSparkDrafter, FeatureFusion

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
TEMPERATURES_FILE = "sts.json"

# Said about the checkpoint rather than about the shape of the drafter.
_DESCRIPTION: dict[str, object] = {
    "architectures": ["DSparkDraftModel"],
    "model_type": "dspark",
    "dtype": "bfloat16",
    "sample_from_anchor": True,
}
_FUSION = ("fc.", "hidden_norm.")
_BORROWED = ("lm_head.",)


class CheckpointError(ValueError):
    """A checkpoint that is broken or does not fit; the message names the file or field and both values."""


def read_config(folder: Path) -> DSparkConfig:
    """The shape that a drafter folder states.

    Raises:
        CheckpointError: if config.json is missing, holds unknown fields, or is of another kind of drafter.
    """
    path = folder / CONFIG_FILE
    try:
        stated = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    if not isinstance(stated, dict):
        raise CheckpointError(f"{path}: the top level is a {type(stated).__name__}, an object is wanted")
    for field, value in _DESCRIPTION.items():
        if stated.pop(field, None) != value:
            found = json.loads(path.read_text()).get(field)
            raise CheckpointError(f"{path}: {field} is {json.dumps(found)}, this loader reads {json.dumps(value)}")
    try:
        return DSparkConfig.model_validate(stated)
    except ValidationError as error:
        raise CheckpointError(f"{path}: {error}") from error


def check_fits_target(config: DSparkConfig, hidden_size: int, vocab_size: int, num_layers: int) -> None:
    """Refuse a drafter that was made for a target of another shape.

    Raises:
        CheckpointError: naming the field, the drafter's value and the target's.
    """
    for field, drafter, target in (
        ("hidden_size", config.hidden_size, hidden_size),
        ("vocab_size", config.vocab_size, vocab_size),
        ("num_target_layers", config.num_target_layers, num_layers),
    ):
        if drafter != target:
            raise CheckpointError(f"{field}: the drafter was made for {drafter}, the target has {target}")


def save_drafter(folder: Path, fusion: FeatureFusion, drafter: DSparkDrafter) -> None:
    """Write config.json and model.safetensors; floating-point tensors are rounded to bf16.

    Both files appear whole or not at all; temperatures of earlier weights are removed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {**_stored(fusion), **_stored(drafter)}
    rounded = {
        name: (tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor).contiguous()
        for name, tensor in sorted(tensors.items())
    }
    (folder / TEMPERATURES_FILE).unlink(missing_ok=True)
    with _replacing(folder / WEIGHTS_FILE) as path:
        save_file(rounded, path, metadata={"format": "pt"})
    stated = {**_DESCRIPTION, **drafter.config.model_dump(mode="json")}
    with _replacing(folder / CONFIG_FILE) as path:
        path.write_text(json.dumps(stated, indent=2) + "\n")


def load_fusion(folder: Path) -> FeatureFusion:
    """The verifier's part of a drafter, float32: `fc` and `hidden_norm`.

    Raises:
        CheckpointError: on a missing file or tensor, or a shape that differs from the config's.
    """
    fusion = FeatureFusion(read_config(folder))
    _fill(fusion, {name: t for name, t in _read(folder).items() if name.startswith(_FUSION)}, folder)
    return fusion.eval()


def load_drafter(folder: Path, embedding: Tensor, head: Tensor) -> DSparkDrafter:
    """The drafter's part, float32.

    Args:
        folder: of the drafter.
        embedding, head: [V, H] token embedding and LM head of the target (see `engine.token_tables`).

    Raises:
        CheckpointError: on a missing file or tensor, or a shape other than the config's or the target's.
    """
    config = read_config(folder)
    tensors = {name: tensor for name, tensor in _read(folder).items() if not name.startswith(_FUSION)}
    wanted = (config.vocab_size, config.hidden_size)
    for name, table in (("embedding", embedding), ("head", head)):
        if tuple(table.shape) != wanted:
            raise CheckpointError(f"the target's {name} has shape {tuple(table.shape)}, the drafter wants {wanted}")
    if "d2t" not in tensors or tuple(tensors["d2t"].shape) != (config.draft_vocab_size,):
        found = tuple(tensors["d2t"].shape) if "d2t" in tensors else None
        raise CheckpointError(f"{folder}: d2t has shape {found}, the config wants {(config.draft_vocab_size,)}")
    draft_ids = tensors["d2t"] + torch.arange(config.draft_vocab_size)
    try:
        drafter = DSparkDrafter(config, embedding, head[draft_ids], draft_ids)
    except (ValueError, IndexError) as error:
        raise CheckpointError(f"{folder}: d2t: {error}") from error
    built = drafter.t2d.clone()
    _fill(drafter, tensors, folder)
    if not torch.equal(built, drafter.t2d):
        raise CheckpointError(f"{folder}: t2d and d2t name different draft vocabularies")
    return drafter.eval()


def weights_hash(folder: Path) -> str:
    """First 16 hex digits of the SHA-256 of model.safetensors: what matches a drafter with its `fc`.

    Raises:
        CheckpointError: if the file cannot be read.
    """
    try:
        with (folder / WEIGHTS_FILE).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except OSError as error:
        raise CheckpointError(f"{folder / WEIGHTS_FILE}: {error}") from error


def save_temperatures(folder: Path, temperatures: list[float], about: Mapping[str, object]) -> None:
    """Write sts.json: one temperature a draft position, and for which weights they were fitted."""
    content = {"temperatures": temperatures, "weights": weights_hash(folder), **about}
    with _replacing(folder / TEMPERATURES_FILE) as path:
        path.write_text(json.dumps(content, indent=2) + "\n")


def read_temperatures(folder: Path) -> list[float]:
    """[gamma] temperatures that the raw confidence logits are divided by.

    Raises:
        CheckpointError: if the file is missing or was fitted for other weights or another block size.
    """
    path = folder / TEMPERATURES_FILE
    try:
        content = json.loads(path.read_text())
        temperatures, fitted = [float(value) for value in content["temperatures"]], str(content["weights"])
    except (OSError, json.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error!r}") from error
    slots, actual = read_config(folder).block_size, weights_hash(folder)
    if len(temperatures) != slots:
        raise CheckpointError(f"{path}: holds {len(temperatures)} temperatures, block_size is {slots}")
    if not all(math.isfinite(value) and value > 0 for value in temperatures):
        raise CheckpointError(f"{path}: temperatures {temperatures} must be finite and above 0")
    if fitted != actual:
        raise CheckpointError(f"{path}: fitted for weights {fitted}, the folder holds {actual}")
    return temperatures


def _stored(module: nn.Module) -> dict[str, Tensor]:
    state = module.state_dict()
    return {name: tensor for name, tensor in state.items() if not name.startswith(_BORROWED)}


def _read(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS_FILE
    try:
        tensors: dict[str, Tensor] = load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path}: {error}") from error
    return tensors


def _fill(module: nn.Module, tensors: Mapping[str, Tensor], folder: Path) -> None:
    wanted = _stored(module)
    if missing := sorted(set(wanted) - set(tensors)):
        raise CheckpointError(f"{folder / WEIGHTS_FILE}: tensors are missing: {', '.join(missing)}")
    if unknown := sorted(set(tensors) - set(wanted)):
        raise CheckpointError(f"{folder / WEIGHTS_FILE}: tensors are unknown: {', '.join(unknown)}")
    for name, place in wanted.items():
        if place.shape != tensors[name].shape:
            raise CheckpointError(
                f"{folder / WEIGHTS_FILE}: {name} has shape {tuple(tensors[name].shape)}, "
                f"the config wants {tuple(place.shape)}"
            )
        with torch.no_grad():
            place.copy_(tensors[name])


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """Write beside a file and move over it at the end, so that a reader never sees half of it."""
    draft = path.with_name(path.name + ".part")
    yield draft
    draft.replace(path)
