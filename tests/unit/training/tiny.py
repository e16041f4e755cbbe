"""A tiny target and what it wrote: random but consistent, small enough for seconds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from engine.drafters.config import DSparkConfig
from engine.token_tables import TokenTables

LENGTH = 24
VOCABULARY = 48
HIDDEN = 16
LAYERS = (1, 3)


def tiny_config(**changes: object) -> DSparkConfig:
    fields: dict[str, object] = {
        "hidden_size": HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "vocab_size": VOCABULARY,
        "draft_vocab_size": 32,
        "target_layer_ids": LAYERS,
        "num_target_layers": 6,
        "block_size": 4,
        "mask_token_id": 0,
        "markov_rank": 5,
        "sliding_window": 7,
    }
    return DSparkConfig.model_validate(fields | changes)


def tiny_tables(seed: int = 0) -> TokenTables:
    generator = torch.Generator().manual_seed(seed)
    embedding = torch.randn(VOCABULARY, HIDDEN, generator=generator)
    return TokenTables(embedding, embedding)


def write_tiny_data(folder: Path, sequences: int = 12, shard: int = 0) -> Path:
    """A "text" in which a token mostly follows from the one before (5 t + 1), and features that show it."""
    generator = torch.Generator().manual_seed(100 + shard)
    table = tiny_tables().embedding
    folder.mkdir(parents=True, exist_ok=True)
    meta = {
        "sequence_length": LENGTH,
        "hidden_size": HIDDEN,
        "vocab_size": VOCABULARY,
        "target_layer_ids": list(LAYERS),
        "target": "tiny",
    }
    (folder / "meta.json").write_text(json.dumps(meta))
    tokens = torch.randint(1, VOCABULARY, (sequences, LENGTH), generator=generator)
    for i in range(1, LENGTH):
        follows = torch.rand(sequences, generator=generator) < 0.9
        tokens[:, i] = torch.where(follows, (5 * tokens[:, i - 1] + 1) % VOCABULARY, tokens[:, i])
    mask = torch.ones(sequences, LENGTH, dtype=torch.uint8)
    mask[:, :4] = 0
    mask[::3, 15:17] = 0
    hidden = (0.6 * table[(5 * tokens + 1) % VOCABULARY]).half()
    noise = 0.1 * torch.randn(sequences, LENGTH, HIDDEN, generator=generator)
    features = torch.cat((table[tokens], 20 * (hidden + noise)), dim=-1).half()
    columns = {
        "tokens": tokens.to(torch.int32),
        "mask": mask,
        "features": features,
        "hidden": hidden,
        "lse": (hidden.float() @ table.T).logsumexp(-1),
    }
    save_file(columns, folder / f"shard-{shard:05d}.safetensors")
    return folder
