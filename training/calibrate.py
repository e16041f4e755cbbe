"""Fit the confidence temperatures (STS) of an exported drafter on rounds drafted over held-out text.

Each generated position of the held-out text is the anchor of one round. Every slot draws a token from the
drafter's truncated distribution and puts it to the rejection test against the target's, given the text's own
tokens before it. So outcomes are real draws, but what stands before a slot is the target's text and not the
round's own draft: the target's distribution after other tokens is not in the data. In service the controller
refits on the rounds that really happen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from engine.checkpoint import load_drafter, load_fusion, save_temperatures
from engine.drafters.dspark import DSparkDrafter, FeatureFusion
from engine.token_tables import TokenTables
from scheduler.calibration import (
    apply_temperatures,
    auc,
    ece_noise_floor,
    expected_calibration_error,
    fit_sts,
)
from training.blocks import draft_hidden, supervise
from training.dataset import SequenceData, eligible_anchors


@dataclass(frozen=True)
class Rounds:
    """N drafted rounds.

    Attributes:
        logits: [N, g] raw confidence logits.
        accepted: [N] draft tokens that passed the test before the first that did not.
        verified: [N] draft tokens that could be tested: the rest of the block is not generated text.
        sequence: [N] held-out sequence that the round is from.
    """

    logits: Tensor
    accepted: Tensor
    verified: Tensor
    sequence: Tensor


@torch.no_grad()
def draft_rounds(
    data: SequenceData, fusion: FeatureFusion, drafter: DSparkDrafter, candidates: int, seed: int
) -> Rounds:
    """Draft and test one round at every eligible position of the held-out sequences, at temperature 1.

    Args:
        candidates: K, tokens kept of each draft distribution, as in service.
        seed: of the drafted tokens and the tests.
    """
    generator = torch.Generator().manual_seed(seed)
    slots = drafter.config.block_size
    found: list[tuple[Tensor, ...]] = []
    for number, row in enumerate(tqdm(data.held_out_rows(), unit="sequence", desc="rounds", mininterval=2)):
        batch = data.load([row])
        anchors = eligible_anchors(batch.mask)[0].nonzero().T
        blocks = supervise(batch.tokens, batch.mask, anchors, slots)
        hidden = draft_hidden(drafter, fusion(batch.features), batch.tokens, anchors)[0]
        previous, positions = blocks.previous[0], blocks.positions[0]
        passed = torch.cat(
            [
                _test(drafter, h, before, batch.hidden[0, at], batch.lse[0, at], candidates, generator)
                for h, before, at in zip(hidden.split(128), previous.split(128), positions.split(128), strict=True)
            ]
        )
        verified = blocks.valid[0].sum(-1)
        accepted = (passed & blocks.valid[0]).long().cumprod(-1).sum(-1)
        logits = drafter.confidence_logits(hidden, previous)
        found.append((logits, accepted, verified, torch.full_like(verified, number)))
    logits, accepted, verified, sequence = (torch.cat(parts) for parts in zip(*found, strict=True))
    return Rounds(logits, accepted, verified, sequence)


def _test(
    drafter: DSparkDrafter,
    hidden: Tensor,
    previous: Tensor,
    teacher_hidden: Tensor,
    teacher_lse: Tensor,
    candidates: int,
    generator: torch.Generator,
) -> Tensor:
    """Draw a token of each slot [n, g] and accept it with probability min(1, p / q): [n, g] bool."""
    logits = drafter.base_logits(hidden) + drafter.markov_bias(previous)
    kept, ids = logits.topk(min(candidates, logits.shape[-1]), dim=-1)
    q = kept.softmax(-1)
    drawn = torch.multinomial(q.flatten(0, -2), 1, generator=generator).view(*q.shape[:-1], 1)
    token = ids.gather(-1, drawn).squeeze(-1)
    chance = (torch.linalg.vecdot(teacher_hidden, drafter.lm_head.weight[token]) - teacher_lse).exp()
    drafted = q.gather(-1, drawn).squeeze(-1)
    return torch.rand(chance.shape, generator=generator) * drafted < chance


def calibrate(data: SequenceData, tables: TokenTables, folder: Path, candidates: int, seed: int) -> str:
    """Fit temperatures on all held-out rounds, write sts.json, and report how well such a fit carries over.

    The report's errors are from a fit on every second held-out sequence, measured on the others; each is the
    expected calibration error of the *product* of confidences up to a position, which is what a planner uses.

    Returns:
        the report, for people.
    """
    drafter = load_drafter(folder, tables.embedding, tables.head)
    rounds = draft_rounds(data, load_fusion(folder), drafter, candidates, seed)
    logits = rounds.logits.double().numpy()
    accepted, verified = rounds.accepted.numpy(), rounds.verified.numpy()
    fit = (rounds.sequence % 2 == 0).numpy()
    half = fit_sts(logits[fit], accepted[fit], verified[fit])
    whole = fit_sts(logits, accepted, verified)
    lines = [
        f"{len(logits)} rounds of {int(rounds.sequence.max()) + 1} held-out sequences, "
        f"mean accepted length {1 + accepted[verified == logits.shape[1]].mean():.3f} (bonus included)",
        "position  temperature  survival  ECE before  after  noise floor    AUC",
    ]
    before, after, ranking = [], [], []
    raw = apply_temperatures(logits, np.ones(logits.shape[1])).cumprod(-1)
    fitted = apply_temperatures(logits, half).cumprod(-1)
    for k in range(logits.shape[1]):
        judged = ~fit & (verified > k)
        outcome = accepted[judged] > k
        before.append(expected_calibration_error(raw[judged, k], outcome))
        after.append(expected_calibration_error(fitted[judged, k], outcome))
        ranking.append(auc(fitted[judged, k], outcome))
        floor = ece_noise_floor(float(outcome.mean()), int(judged.sum()))
        lines.append(
            f"{k + 1:>8}  {whole[k]:>11.3f}  {outcome.mean():>8.3f}  {before[-1]:>10.2%}  {after[-1]:>5.2%}  "
            f"{floor:>11.2%}  {ranking[-1]:>5.3f}"
        )
    lines.append(f"mean ECE {np.mean(before):.2%} before, {np.mean(after):.2%} after")
    about = {
        "rounds": len(logits),
        "candidates": candidates,
        "ece_before": [round(value, 5) for value in before],
        "ece_after": [round(value, 5) for value in after],
        "auc": [None if math.isnan(value) else round(value, 4) for value in ranking],
    }
    save_temperatures(folder, [float(value) for value in whole], about)
    return "\n".join(lines)
