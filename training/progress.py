"""The learning curve of a run: a CSV with one line an evaluation, and a picture of it."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

CURVE_FILE = "curve.csv"
PICTURE_FILE = "curve.png"


@dataclass(frozen=True)
class CurvePoint:
    """How good the drafter is at one moment of training.

    Attributes:
        step: optimiser steps done.
        seconds: time trained so far.
        epoch: passes over the data so far.
        loss: mean training loss since the point before.
        training_acceptance: mean acceptance of position 1 on the training text since the point before.
        acceptance: [g] held-out mean of 1 - L1/2, teacher-forced, by position.
        agreement: [g] held-out share where the two most likely tokens agree, by position.
        accepted_length: held-out tokens a round at temperature 1, bonus token included, teacher-forced.
    """

    step: int
    seconds: float
    epoch: int
    loss: float
    training_acceptance: float
    acceptance: tuple[float, ...]
    agreement: tuple[float, ...]
    accepted_length: float


def write_curve(folder: Path, points: list[CurvePoint]) -> None:
    """Write curve.csv and curve.png; an empty list writes nothing."""
    if not points:
        return
    slots = range(1, len(points[0].acceptance) + 1)
    with (folder / CURVE_FILE).open("w", newline="") as file:
        writer = csv.writer(file)
        names = ["step", "seconds", "epoch", "loss", "training_acceptance_1"]
        names += [f"acceptance_{k}" for k in slots] + [f"agreement_{k}" for k in slots] + ["accepted_length"]
        writer.writerow(names)
        for p in points:
            numbers = (p.loss, p.training_acceptance, *p.acceptance, *p.agreement, p.accepted_length)
            writer.writerow([p.step, round(p.seconds, 1), p.epoch, *(f"{x:.5f}" for x in numbers)])
    _draw(folder / PICTURE_FILE, points)


def _draw(path: Path, points: list[CurvePoint]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [p.step for p in points]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4))
    left.plot(steps, [p.loss for p in points], label="training loss")
    left.set_xlabel("step")
    left.legend()
    for k in range(len(points[0].acceptance)):
        line = right.plot(steps, [p.acceptance[k] for p in points], label=f"position {k + 1}")
        right.plot(steps, [p.agreement[k] for p in points], ":", color=line[0].get_color())
    right.plot(steps, [p.training_acceptance for p in points], "--", color="grey", label="position 1, training text")
    right.set_xlabel("step")
    right.set_title("held-out acceptance (solid), greedy agreement (dotted)")
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
