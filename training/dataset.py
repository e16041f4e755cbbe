"""Reading what the target wrote: shards of tokens, hidden states and teacher statistics.

A data folder holds `meta.json` and shards `shard-00000.safetensors`, ... with, for N sequences of L tokens,

    tokens   [N, L]      int32    token ids
    mask     [N, L]      uint8    1 where the assistant generated the token: it may be supervised
    features [N, L, m*H] float16  raw outputs of the feature layers, concatenated in layer order
    hidden   [N, L, H]   float16  the LM head's input at i, which predicts token i + 1
    lse      [N, L]      float32  logsumexp of the target's full logits at i, temperature 1

Rows are read one by one through a memory map, so a folder may be far larger than memory, and may grow while
it is read: call `scan` again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import SafetensorError, safe_open
from torch import Tensor

COLUMNS = ("tokens", "mask", "features", "hidden", "lse")


class DataError(ValueError):
    """A data folder that cannot be trained on; the message names the file and the field."""


class DataMeta(BaseModel):
    """What `meta.json` says of a data folder; further fields are the generator's own."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    sequence_length: int = Field(gt=1)
    hidden_size: int = Field(gt=0)
    vocab_size: int = Field(gt=0)
    target_layer_ids: tuple[int, ...] = Field(min_length=1)
    target: str


@dataclass(frozen=True)
class Row:
    """Where a sequence lies."""

    shard: str
    index: int


@dataclass(frozen=True)
class Batch:
    """S whole sequences, with everything in the type it is computed in.

    Attributes:
        tokens: [S, L] int64.
        mask: [S, L] bool.
        features: [S, L, m*H] float32.
        hidden: [S, L, H] float32.
        lse: [S, L] float32.
    """

    tokens: Tensor
    mask: Tensor
    features: Tensor
    hidden: Tensor
    lse: Tensor


def eligible_anchors(mask: Tensor) -> Tensor:
    """[S, L] generated tokens -> [S, L] bool: generated positions that a generated one follows."""
    follows = torch.zeros_like(mask)
    follows[:, :-1] = mask[:, 1:]
    eligible = mask & follows
    eligible[:, 0] = False  # there must be context
    return eligible


class SequenceData:
    """A data folder: which sequences there are, and their contents on demand.

    Args:
        folder: the data folder.
        held_out: this many sequences, the first of the first shard, are kept for evaluation.

    Raises:
        DataError: if `meta.json` or the first shard is missing or does not fit.
    """

    def __init__(self, folder: Path, held_out: int = 32) -> None:
        self.folder = folder
        try:
            self.meta = DataMeta.model_validate(json.loads((folder / "meta.json").read_text()))
        except (OSError, json.JSONDecodeError, ValidationError) as error:
            raise DataError(f"{folder / 'meta.json'}: {error}") from error
        self._counts: dict[str, int] = {}
        self._usable: dict[str, list[int]] = {}
        self._held_out_count = held_out
        self.scan()
        if not self._counts:
            raise DataError(f"{folder} holds no shard-*.safetensors yet")
        first = next(iter(self._counts))
        if not 0 < held_out <= self._counts[first]:
            raise DataError(f"{first} holds {self._counts[first]} sequences, {held_out} are to be held out")

    def scan(self) -> int:
        """Look for shards again; returns the number of training sequences now known."""
        for path in sorted(self.folder.glob("shard-*.safetensors")):
            if path.name not in self._counts:
                self._counts[path.name] = self._check(path)
                with safe_open(path, framework="pt") as shard:
                    anchors = eligible_anchors(shard.get_tensor("mask").bool())
                self._usable[path.name] = anchors.any(1).nonzero().flatten().tolist()
        return len(self.training_rows())

    def held_out_rows(self) -> list[Row]:
        """The sequences that are never trained on (those of them in which a block can be anchored)."""
        first = min(self._counts)
        return [Row(first, index) for index in self._usable[first] if index < self._held_out_count]

    def training_rows(self) -> list[Row]:
        """All other sequences in which a block can be anchored, in order of shard and index."""
        if not self._counts:
            return []
        first = min(self._counts)
        return [
            Row(shard, index)
            for shard in sorted(self._counts)
            for index in self._usable[shard]
            if shard != first or index >= self._held_out_count
        ]

    def load(self, rows: list[Row]) -> Batch:
        """Read these sequences."""
        parts: dict[str, list[Tensor]] = {name: [] for name in COLUMNS}
        for row in rows:
            with safe_open(self.folder / row.shard, framework="pt") as shard:
                for name in COLUMNS:
                    parts[name].append(shard.get_slice(name)[row.index : row.index + 1])
        whole = {name: torch.cat(tensors) for name, tensors in parts.items()}
        return Batch(
            tokens=whole["tokens"].long(),
            mask=whole["mask"].bool(),
            features=whole["features"].float(),
            hidden=whole["hidden"].float(),
            lse=whole["lse"].float(),
        )

    def token_counts(self) -> Tensor:
        """[V] int64: how often each token was generated by the assistant, in all shards."""
        counts = torch.zeros(self.meta.vocab_size, dtype=torch.int64)
        for name in sorted(self._counts):
            with safe_open(self.folder / name, framework="pt") as shard:
                tokens, mask = shard.get_tensor("tokens").long(), shard.get_tensor("mask").bool()
            counts += torch.bincount(tokens[mask], minlength=self.meta.vocab_size)
        return counts

    def _check(self, path: Path) -> int:
        length, hidden = self.meta.sequence_length, self.meta.hidden_size
        trailing = {
            "tokens": (length,),
            "mask": (length,),
            "features": (length, len(self.meta.target_layer_ids) * hidden),
            "hidden": (length, hidden),
            "lse": (length,),
        }
        counts = set()
        try:
            with safe_open(path, framework="pt") as shard:
                for name, shape in trailing.items():
                    found = tuple(shard.get_slice(name).get_shape())
                    if found[1:] != shape:
                        raise DataError(f"{path}: {name} has shape {found}, meta.json wants (N, *{shape})")
                    counts.add(found[0])
        except (OSError, SafetensorError) as error:
            raise DataError(f"{path}: {error}") from error
        if len(counts) != 1:
            raise DataError(f"{path}: the tensors hold different numbers of sequences: {sorted(counts)}")
        return counts.pop()


class RowSampler:
    """Endless batches of training rows: every epoch is a new permutation of what the folder holds by then.

    Its state is plain data, so a run that is resumed goes on with exactly the rows that were due.
    """

    def __init__(self, data: SequenceData, generator: torch.Generator) -> None:
        self._data = data
        self._generator = generator
        self._due: list[Row] = []
        self.epoch = 0

    def take(self, count: int) -> list[Row]:
        """The next `count` rows.

        Raises:
            DataError: if the folder holds no training sequence.
        """
        while len(self._due) < count:
            if not self._data.scan():
                raise DataError(f"{self._data.folder} holds only the held-out sequences")
            rows = self._data.training_rows()
            order = torch.randperm(len(rows), generator=self._generator).tolist()
            self._due += [rows[index] for index in order]
            self.epoch += 1
        taken, self._due = self._due[:count], self._due[count:]
        return taken

    def state(self) -> dict[str, object]:
        """What `restore` takes."""
        return {"due": [(row.shard, row.index) for row in self._due], "epoch": self.epoch}

    def restore(self, due: list[tuple[str, int]], epoch: int) -> None:
        """Go on from a saved state."""
        self._due = [Row(shard, index) for shard, index in due]
        self.epoch = epoch


def draft_vocabulary(counts: Tensor, size: int, always: tuple[int, ...]) -> tuple[Tensor, float]:
    """The most frequent tokens, and the share of the text they cover.

    Args:
        counts: [V] how often each token occurs.
        size: Vd, how many to choose.
        always: token ids that are in whatever their count (the end of a turn, say).

    Returns:
        ([Vd] int64 target token ids, rising; covered share of all counted tokens)
    """
    ranked = counts.clone()
    ranked[list(always)] = counts.sum() + 1
    # A stable sort makes the choice among tokens of equal count the lowest ids, on every machine.
    chosen = ranked.argsort(descending=True, stable=True)[:size].sort().values
    return chosen, float(counts[chosen].sum() / counts.sum().clamp(min=1))
