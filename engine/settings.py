"""Settings of what runs inside a verifier and a drafter replica."""

from __future__ import annotations

import os
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class EngineSettings(BaseModel):
    """Settings of one verifier's engine.

    Attributes:
        target: "embedded" or a local Hugging Face folder of a causal language model.
        device: of the target.
        dtype: type of the target's activations. float32 on a CPU: weights that bfloat16 holds exactly stay
            bfloat16 in memory all the same.
        threads: torch threads of the verifier; all cores if not said. Verifier and drafter take turns.
        kv_memory_bytes: size of the page pool.
        max_context: most tokens of a prompt and its continuation; at most what the model allows.
        max_running: most requests in a step; others wait.
        prefill_tokens: most prompt tokens in a step.
        verify_length: None lets the planner choose; a number verifies that many draft tokens of every block
            (0: no drafting at all). For tests and benchmarks.
        random_seed: None draws one at start.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    target: str = "embedded"
    device: str = "cpu"
    dtype: Literal["float32", "bfloat16"] = "float32"
    threads: int = Field(default_factory=usable_cores, ge=1)
    kv_memory_bytes: int = Field(default=1 << 30, ge=1 << 20)
    max_context: int = Field(default=2048, ge=2)
    max_running: int = Field(default=64, ge=1)
    prefill_tokens: int = Field(default=256, ge=1)
    verify_length: int | None = Field(default=None, ge=0)
    random_seed: int | None = None


class DrafterSettings(BaseModel):
    """Settings of a drafter replica.

    Attributes:
        checkpoint: "shipped" or a drafter folder.
        kind: "dspark"; or "replay", for benchmarks only: proposes recorded continuations at a chosen quality.
        recording: file of recorded continuations, for "replay".
        replay_acceptance: mean conditional acceptance, for "replay".
        block_size: draft tokens a block; None takes the checkpoint's.
        candidates: K, size of the truncated proposal.
        max_contexts: most sequences whose context is held; the least recently used one goes first.
        device: of the drafter.
        threads: torch threads of the drafter.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: str = "shipped"
    kind: Literal["dspark", "replay"] = "dspark"
    recording: str | None = None
    replay_acceptance: float = Field(default=0.85, gt=0.0, lt=1.0)
    block_size: int | None = Field(default=None, ge=1)
    candidates: int = Field(default=32, ge=1)
    max_contexts: int = Field(default=256, ge=1)
    device: str = "cpu"
    threads: int = Field(default_factory=usable_cores, ge=1)
