"""From runs to one row per system and number of streams, and the table of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from benchmarks.runs import GENERATE, SERVED, Run

HEADER = (
    "streams",
    "system",
    "tokens/s",
    "tokens/s/user",
    "first token",
    "accepted a step",
    "speculation / plain, tokens/s",
    "speculation / plain, tokens/s/user",
    "tokens/s over generate",
)


@dataclass(frozen=True)
class Ratio:
    """Median of ratios with the smallest and the largest."""

    median: float
    least: float
    most: float

    def __str__(self) -> str:
        return f"{self.median:.2f} ({self.least:.2f} to {self.most:.2f})"


@dataclass(frozen=True)
class Row:
    """Medians over the runs of one system at one number of streams.

    Attributes:
        system: in words; says REPLAY where its drafter, or the pair's other run's, replays.
        tokens_per_s, tokens_per_s_per_user, first_token_s, accepted_per_step: as in `Run`; the last is None where
            nothing is drafted.
        total, user: speculation over plain decoding of the same pair, in tokens/s and tokens/s/user; None where this
            row is not speculation.
        over_generate: tokens/s over those of transformers' generate; None if that was not measured.
    """

    streams: int
    system: str
    tokens_per_s: float
    tokens_per_s_per_user: float
    first_token_s: float
    accepted_per_step: float | None
    total: Ratio | None
    user: Ratio | None
    over_generate: float | None


def label_of(run: Run) -> str:
    """The mode of a run in words."""
    if run.system == GENERATE:
        return "transformers generate"
    if run.speculation:
        return f"speculation, {run.drafter} drafter"
    return f"plain, beside {run.drafter}"


def pairs_of(runs: Sequence[Run]) -> list[tuple[Run, Run]]:
    """(with speculation, plain) of each pair that is complete, in the order they were run."""
    plain = {(r.drafter, r.streams, r.pair): r for r in runs if r.system == SERVED and not r.speculation}
    fast = [r for r in runs if r.system == SERVED and r.speculation]
    return [(r, plain[key]) for r in fast if (key := (r.drafter, r.streams, r.pair)) in plain]


def ratio_of(values: Sequence[float]) -> Ratio | None:
    """Median, least and most; None of nothing."""
    return Ratio(median(values), min(values), max(values)) if values else None


def rows_of(runs: Sequence[Run]) -> list[Row]:
    """A row for each mode at each number of streams, by streams, modes in the order they were run."""
    groups: dict[tuple[int, str], list[Run]] = {}
    for streams in sorted({run.streams for run in runs}):
        for run in runs:
            if run.streams == streams:
                groups.setdefault((streams, label_of(run)), []).append(run)
    pairs = pairs_of(runs)
    baseline = {run.streams: run.tokens_per_s for run in runs if run.system == GENERATE}
    rows = []
    for (streams, label), group in groups.items():
        mine = [(fast, plain) for fast, plain in pairs if fast.streams == streams and label_of(fast) == label]
        speed = median(run.tokens_per_s for run in group)
        rows.append(
            Row(
                streams=streams,
                system=label,
                tokens_per_s=speed,
                tokens_per_s_per_user=median(run.tokens_per_s_per_user for run in group),
                first_token_s=median(run.first_token_s for run in group),
                accepted_per_step=median(r.accepted_per_step for r in group) if group[0].speculation else None,
                total=ratio_of([fast.tokens_per_s / plain.tokens_per_s for fast, plain in mine]),
                user=ratio_of([fast.tokens_per_s_per_user / plain.tokens_per_s_per_user for fast, plain in mine]),
                over_generate=speed / baseline[streams] if streams in baseline else None,
            )
        )
    return rows


def table(rows: Sequence[Row]) -> str:
    """The rows as a Markdown table with aligned columns."""
    cells = [HEADER, *(_cells(row) for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(HEADER))]
    lines = ["| " + " | ".join(_padded(line, widths)) + " |" for line in cells]
    rule = "|" + "|".join(f" {'-' * width} " if i == 1 else f" {'-' * (width - 1)}: " for i, width in enumerate(widths))
    return "\n".join([lines[0], rule + "|", *lines[1:]])


def _cells(row: Row) -> tuple[str, ...]:
    return (
        str(row.streams),
        row.system,
        f"{row.tokens_per_s:.1f}",
        f"{row.tokens_per_s_per_user:.1f}",
        f"{row.first_token_s:.2f} s",
        "" if row.accepted_per_step is None else f"{row.accepted_per_step:.2f}",
        "" if row.total is None else str(row.total),
        "" if row.user is None else str(row.user),
        "" if row.over_generate is None else f"{row.over_generate:.2f}",
    )


def _padded(line: Sequence[str], widths: Sequence[int]) -> list[str]:
    return [cell.ljust(w) if i == 1 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True))]


def checks(runs: Sequence[Run]) -> list[str]:
    """What was compared besides speed, in a sentence for each drafter."""
    said = []
    for drafter in dict.fromkeys(run.drafter for run in runs if run.system == SERVED):
        fast = [run for run in runs if run.drafter == drafter and run.speculation]
        count = sum(run.requests for run in fast)
        differing = sum(run.differing for run in fast)
        line = f"{drafter}: {differing} of {count} answers with speculation differ from plain decoding's"
        if drafter.startswith("REPLAY"):
            unrecorded = sum(run.unrecorded for run in fast)
            line += f"; {unrecorded} of {count} left the recording, so that nothing was replayed from there on"
        said.append(line + ".")
    return said


def report(runs: Sequence[Run], conditions: Mapping[str, str]) -> str:
    """The table with what it was measured on and what was checked, in Markdown."""
    measured = "\n".join(f"* {name}: {value}" for name, value in conditions.items())
    checked = "\n".join(f"* {line}" for line in checks(runs))
    return f"{measured}\n\n{table(rows_of(runs))}\n\n{checked}"
