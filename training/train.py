"""Train a DSpark drafter on what its target wrote; stop and resume at any step."""

from __future__ import annotations

import math
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from engine.drafters.config import DSparkConfig
from engine.token_tables import TokenTables
from training.blocks import sample_anchors, supervise
from training.dataset import DataError, RowSampler, SequenceData
from training.evaluate import HeldOut
from training.loss import LossParts, LossWeights, draft_loss, supervised_rows
from training.progress import CurvePoint, write_curve
from training.trainee import Trainee

STATE_FILE = "train_state.pt"


@dataclass(frozen=True)
class TrainOptions:
    """How to train.

    Attributes:
        minutes: time to train for, all resumed parts together; the learning rate follows the time.
        steps: optimiser steps to train for; the learning rate follows the steps. Either this or `minutes`.
        sequences, anchors: S sequences a step with A blocks each.
        learning_rate: peak; warmup: share of the run over which it rises; it then falls to 0 along a cosine.
        weight_decay: of matrices, not of norms and biases.
        gradient_norm: clip.
        evaluate_every, save_every: steps.
        held_out_anchors: blocks a held-out sequence in an evaluation.
        chunk: rows of the loss in memory at once.
        seed: of weights, rows and anchors.
        loss: weights of the terms.
    """

    minutes: float | None = None
    steps: int | None = None
    sequences: int = 6
    anchors: int = 128
    learning_rate: float = 2e-3
    warmup: float = 0.04
    weight_decay: float = 0.01
    gradient_norm: float = 1.0
    evaluate_every: int = 50
    save_every: int = 50
    held_out_anchors: int = 16
    chunk: int = 512
    seed: int = 0
    loss: LossWeights = field(default_factory=LossWeights)

    def __post_init__(self) -> None:
        if (self.minutes is None) == (self.steps is None):
            raise ValueError("exactly one of minutes and steps must be given")
        for name in (
            "minutes",
            "steps",
            "sequences",
            "anchors",
            "learning_rate",
            "evaluate_every",
            "save_every",
        ):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ValueError(f"{name} is {value}, it must be above 0")


def schedule(fraction: float, warmup: float) -> float:
    """Factor of the learning rate after this fraction of the run: a linear rise, then half a cosine to 0."""
    if fraction < warmup:
        return fraction / warmup
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (fraction - warmup) / (1 - warmup))))


class Run:
    """A training run: the drafter, its optimiser, where it stands in the data.

    Args:
        data: what to train on.
        tables: embedding and LM head of the target.
        config: shape of the drafter.
        draft_ids, feature_size: see `Trainee`.
        options: how to train.
    """

    def __init__(
        self,
        data: SequenceData,
        tables: TokenTables,
        config: DSparkConfig,
        draft_ids: Tensor,
        feature_size: Tensor,
        options: TrainOptions,
    ) -> None:
        self.data, self.options, self.config = data, options, config
        self.generator = torch.Generator().manual_seed(options.seed)
        self.trainee = Trainee(config, tables, draft_ids, feature_size)
        self.trainee.start(self.generator)
        trained = [weight for weight in self.trainee.parameters() if weight.requires_grad]
        self.optimizer = torch.optim.AdamW(
            [
                {"params": [w for w in trained if w.dim() > 1], "weight_decay": options.weight_decay},
                {"params": [w for w in trained if w.dim() < 2], "weight_decay": 0.0},
            ],
            lr=options.learning_rate,
            betas=(0.9, 0.95),
            fused=True,
        )
        self._trained = trained
        self._draft_index = self.trainee.draft_index()
        self.sampler = RowSampler(data, self.generator)
        self.step = 0
        self.seconds = 0.0
        self.points: list[CurvePoint] = []

    @property
    def fraction(self) -> float:
        """How much of the run is done, 0 to 1."""
        if self.options.steps is not None:
            return min(1.0, self.step / self.options.steps)
        return min(1.0, self.seconds / (60 * (self.options.minutes or 1)))

    def advance(self) -> LossParts:
        """One optimiser step."""
        options = self.options
        batch = self.data.load(self.sampler.take(options.sequences))
        anchors = sample_anchors(batch.mask, options.anchors, self.generator)
        blocks = supervise(batch.tokens, batch.mask, anchors, self.config.block_size)
        rows = supervised_rows(blocks, batch.tokens.shape[1], self._draft_index)
        # A step's factor is that of its end, so that the first is above 0 (in time, the end is not known).
        ahead = 1 / options.steps if options.steps is not None else 1e-3
        factor = schedule(min(1.0, self.fraction + ahead), options.warmup)
        for group in self.optimizer.param_groups:
            group["lr"] = options.learning_rate * factor
        self.optimizer.zero_grad(set_to_none=True)
        hidden = self.trainee(batch.features, batch.tokens, anchors).flatten(0, 2)
        parts = draft_loss(
            self.trainee.drafter,
            hidden,
            rows,
            batch.hidden.flatten(0, 1),
            batch.lse.flatten(),
            options.loss,
            options.chunk,
        )
        parts.total.backward()
        torch.nn.utils.clip_grad_norm_(self._trained, options.gradient_norm)
        self.optimizer.step()
        self.step += 1
        return LossParts(
            total=parts.total.detach(),
            cross_entropy=parts.cross_entropy,
            distance=parts.distance,
            confidence=parts.confidence,
            acceptance=parts.acceptance[rows.slot == 0],
        )

    def save(self, folder: Path) -> None:
        """Write everything that a resumed run needs, whole or not at all."""
        folder.mkdir(parents=True, exist_ok=True)
        weights = self.trainee.state_dict()
        del weights["drafter.lm_head.weight"]  # the target's
        state = {
            "config": self.config.model_dump(mode="json"),
            "seed": self.options.seed,
            "weights": weights,
            "optimizer": self.optimizer.state_dict(),
            "generator": self.generator.get_state(),
            "sampler": self.sampler.state(),
            "step": self.step,
            "seconds": self.seconds,
            "points": [asdict(point) for point in self.points],
        }
        part = folder / (STATE_FILE + ".part")
        torch.save(state, part)
        part.replace(folder / STATE_FILE)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on where a saved run stood.

        Raises:
            DataError: if the state is of a drafter of another shape.
        """
        if state["config"] != self.config.model_dump(mode="json"):
            raise DataError(f"config: the saved run has {state['config']}, this one {self.config.model_dump()}")
        missing = self.trainee.load_state_dict(state["weights"], strict=False)
        if missing.missing_keys != ["drafter.lm_head.weight"] or missing.unexpected_keys:
            raise DataError(f"weights: {missing}")
        self.optimizer.load_state_dict(state["optimizer"])
        self.generator.set_state(state["generator"])
        self.sampler.restore(**state["sampler"])
        self.step, self.seconds = state["step"], state["seconds"]
        self.points = [CurvePoint(**point) for point in state["points"]]


def load_state(folder: Path) -> dict[str, Any]:
    """Read a saved run.

    Raises:
        DataError: if there is none.
    """
    path = folder / STATE_FILE
    if not path.is_file():
        raise DataError(f"{path} does not exist: nothing has been trained there yet")
    state: dict[str, Any] = torch.load(path, weights_only=True)
    return state


def restore_trainee(state: dict[str, Any], tables: TokenTables) -> Trainee:
    """The drafter of a saved run."""
    config = DSparkConfig.model_validate(state["config"])
    weights = state["weights"]
    draft_ids = weights["drafter.d2t"] + torch.arange(config.draft_vocab_size)
    trainee = Trainee(config, tables, draft_ids, weights["feature_size"])
    trainee.load_state_dict(weights, strict=False)
    return trainee.eval()


def train(run: Run, out: Path, head: Tensor) -> None:
    """Train to the end of the run's time or steps, evaluating and saving on the way.

    Args:
        run: fresh or restored.
        out: folder for the saved state and the learning curve.
        head: [V, H] the target's LM head, for greedy agreement.
    """
    out.mkdir(parents=True, exist_ok=True)
    options = run.options
    held_out = HeldOut(run.data, head, options.held_out_anchors, run.config.block_size)
    unit = "step" if options.steps is not None else "s"
    total = options.steps if options.steps is not None else round(60 * (options.minutes or 0))
    with tqdm(total=total, unit=unit, mininterval=5, dynamic_ncols=True) as bar:
        bar.update(_done(run) - bar.n)
        losses: list[float] = []
        accepted: list[float] = []
        clock = time.monotonic()
        while run.fraction < 1:
            parts = run.advance()
            losses.append(float(parts.total))
            accepted.append(float(parts.acceptance.mean()))
            now = time.monotonic()
            run.seconds += now - clock
            clock = now
            bar.update(min(_done(run), total) - bar.n)
            bar.set_postfix(step=run.step, loss=f"{losses[-1]:.3f}", a1=f"{accepted[-1]:.3f}", refresh=False)
            last = run.fraction >= 1
            if last or run.step % options.evaluate_every == 0:
                score = held_out.score(run.trainee)
                run.points.append(
                    CurvePoint(
                        step=run.step,
                        seconds=run.seconds,
                        epoch=run.sampler.epoch,
                        loss=sum(losses) / len(losses),
                        training_acceptance=sum(accepted) / len(accepted),
                        acceptance=score.acceptance,
                        agreement=score.agreement,
                        accepted_length=score.accepted_length,
                    )
                )
                losses, accepted = [], []
                bar.write(describe(run.points[-1]))
                write_curve(out, run.points)
            if last or run.step % options.save_every == 0:
                run.save(out)


def describe(point: CurvePoint) -> str:
    """One line about a point of the learning curve."""
    acceptance = " ".join(f"{value:.3f}" for value in point.acceptance)
    agreement = " ".join(f"{value:.3f}" for value in point.agreement)
    return (
        f"step {point.step} epoch {point.epoch} {point.seconds / 60:.1f} min: loss {point.loss:.3f}, "
        f"training a1 {point.training_acceptance:.3f}, held-out acceptance {acceptance}, "
        f"greedy agreement {agreement}, accepted length {point.accepted_length:.2f}"
    )


def _done(run: Run) -> int:
    return run.step if run.options.steps is not None else round(run.seconds)
