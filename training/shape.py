"""Which drafter suits a target: the shape is the target's own layer, a few times."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from engine.checkpoint import CheckpointError
from engine.drafters.config import DSparkConfig


def drafter_shape(target: Path, target_layer_ids: tuple[int, ...], **chosen: Any) -> DSparkConfig:
    """Take heads, widths, epsilon and rotary base from the target's config.json.

    Args:
        target: folder of the target.
        target_layer_ids: the feature layers that the data was made with.
        chosen: the other fields of `DSparkConfig`.

    Raises:
        CheckpointError: if the target's config cannot be read or the fields do not fit together.
    """
    path = target / "config.json"
    try:
        stated = json.loads(path.read_text())
        rope = stated.get("rope_parameters") or {}
        heads = stated["num_attention_heads"]
        return DSparkConfig(
            hidden_size=stated["hidden_size"],
            num_attention_heads=heads,
            num_key_value_heads=stated.get("num_key_value_heads", heads),
            head_dim=stated.get("head_dim") or stated["hidden_size"] // heads,
            intermediate_size=stated["intermediate_size"],
            vocab_size=stated["vocab_size"],
            num_target_layers=stated["num_hidden_layers"],
            target_layer_ids=target_layer_ids,
            rms_norm_eps=stated["rms_norm_eps"],
            rope_theta=stated["rope_theta"] if "rope_theta" in stated else rope["rope_theta"],
            **chosen,
        )
    except (OSError, json.JSONDecodeError, KeyError) as error:
        raise CheckpointError(f"{path}: {error!r}") from error
    except ValidationError as error:
        raise CheckpointError(f"{path}: {error}") from error
