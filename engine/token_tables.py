"""The target's token embedding and LM head, read straight from its folder without building the model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


@dataclass(frozen=True)
class TokenTables:
    """What a drafter borrows from its target.

    Attributes:
        embedding: [V, H] float32.
        head: [V, H] float32; the same tensor as `embedding` if the target ties them.
    """

    embedding: Tensor
    head: Tensor

    def head_rows(self, draft_ids: Tensor) -> Tensor:
        """[Vd, H] rows of the LM head of these tokens."""
        return self.head[draft_ids]


def load_token_tables(folder: Path) -> TokenTables:
    """Read both tables from a Hugging Face folder (one safetensors file or an index of several).

    Raises:
        CheckpointError: if the folder has no safetensors weights or no embedding.
    """
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    try:
        if index.is_file():
            files = {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
        elif single.is_file():
            with safe_open(single, framework="pt") as weights:
                files = dict.fromkeys(weights.keys(), single)
        else:
            raise CheckpointError(f"{folder} has neither {single.name} nor {index.name}")
        if EMBEDDING not in files:
            raise CheckpointError(f"{folder} has no tensor {EMBEDDING}")
        embedding = _read(files[EMBEDDING], EMBEDDING)
        head = _read(files[HEAD], HEAD) if HEAD in files else embedding
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(f"{folder}: the target's token tables cannot be read: {error}") from error
    if head.shape != embedding.shape:
        raise CheckpointError(f"{HEAD} has shape {tuple(head.shape)}, {EMBEDDING} {tuple(embedding.shape)}")
    return TokenTables(embedding, head)


def _read(file: Path, name: str) -> Tensor:
    with safe_open(file, framework="pt") as weights:
        tensor: Tensor = weights.get_tensor(name)
    return tensor.to(torch.float32)
