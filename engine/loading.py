"""From settings to the objects of a verifier or a drafter."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from engine.checkpoint import check_fits_target, load_drafter, load_fusion, read_config, read_temperatures, weights_hash
from engine.drafters.config import DSparkConfig
from engine.drafting import DraftEngine, Drafter
from engine.embedded import resolve_target
from engine.kernels.build import processor
from engine.kernels.linear import pack_linears
from engine.settings import DrafterSettings, EngineSettings
from engine.target import TargetRunner
from engine.token_tables import load_token_tables

SHIPPED = Path(__file__).parent / "drafters" / "smollm2_135m_dspark"


def drafter_folder(settings: DrafterSettings) -> Path:
    """Where the drafter's checkpoint lies."""
    return SHIPPED if settings.checkpoint == "shipped" else Path(settings.checkpoint).expanduser()


def block_size(settings: DrafterSettings) -> int:
    """gamma of the drafter that these settings describe."""
    return settings.block_size or read_config(drafter_folder(settings)).block_size


@dataclass(frozen=True)
class TargetSide:
    """What a verifier loads.

    Attributes:
        target: the target model, capturing the drafter's feature layers.
        tokenizer: of the target.
        fusion: the drafter's `fc`, packed.
        drafter: shape of the drafter.
        weights: hash of the drafter's checkpoint.
        temperatures: [gamma] STS temperatures, 1 for a replay drafter, whose confidences are calibrated.
    """

    target: TargetRunner
    tokenizer: Any
    fusion: Any
    drafter: DSparkConfig
    weights: str
    temperatures: tuple[float, ...]


def load_target_side(engine: EngineSettings, drafter: DrafterSettings, cache: Path) -> TargetSide:
    """Load everything a verifier needs.

    Raises:
        CheckpointError: the drafter does not fit the target, or its files are broken.
        ValueError: the target's folder is not there or holds no model.
    """
    from transformers import AutoTokenizer

    torch.set_num_threads(engine.threads)
    folder = drafter_folder(drafter)
    config = read_config(folder)
    path = resolve_target(engine.target, cache)
    target = TargetRunner.load(path, config.target_layer_ids, getattr(torch, engine.dtype), engine.device)
    check_fits_target(config, target.hidden_size, target.vocab_size, target.config.num_hidden_layers)
    fusion = load_fusion(folder)
    fusion.to(engine.device)
    if target.compiled:
        pack_linears(fusion)
    gamma = block_size(drafter)
    temperatures = tuple(read_temperatures(folder))
    if drafter.kind == "replay":
        temperatures = (1.0,) * gamma
    temperatures = (temperatures + temperatures[-1:] * gamma)[:gamma]
    tokenizer = AutoTokenizer.from_pretrained(path)
    return TargetSide(target, tokenizer, fusion, config, weights_hash(folder), temperatures)


def load_draft_engine(engine: EngineSettings, drafter: DrafterSettings, cache: Path) -> Drafter:
    """Load what a drafter replica runs. Does not import transformers, so that a new drafter is there soon.

    Raises:
        CheckpointError: as `load_target_side`.
    """
    torch.set_num_threads(drafter.threads)
    folder = drafter_folder(drafter)
    tables = load_token_tables(resolve_target(engine.target, cache))
    model = load_drafter(folder, tables.embedding, tables.head)
    if drafter.block_size is not None:
        # Slots differ only in their position: a model trained on blocks of one size runs on others.
        model.config = model.config.model_copy(update={"block_size": drafter.block_size})
    model.to(drafter.device)
    drafting = DraftEngine(model, weights_hash(folder), drafter.candidates, drafter.max_contexts)
    pack_linears(model)
    if drafter.kind != "replay":
        return drafting
    from engine.drafters.replay import ReplayDrafter, read_recording

    if drafter.recording is None:
        raise ValueError("recording must name a file for a drafter of kind 'replay'")
    recording = read_recording(Path(drafter.recording))
    return ReplayDrafter(drafting, recording, drafter.replay_acceptance)


def profile_key(engine: EngineSettings, drafter: DrafterSettings, weights: str) -> str:
    """Under which name a measured cost table is kept: model, drafter, device, dtype, threads, processor."""
    parts = (
        engine.target,
        engine.device,
        engine.dtype,
        str(engine.threads),
        weights,
        drafter.kind,
        str(block_size(drafter)),
        str(drafter.threads),
        processor(),
        torch.__version__,
    )
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
