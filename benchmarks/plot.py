"""The plot: throughput against the speed that each user sees, a line per system, a point per number of streams."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.runs import Run
from benchmarks.summary import Row, rows_of

COLOURS = ("#0072b2", "#d55e00", "#888888", "#009e73", "#bbbbbb", "#cc79a7")
MARKERS = ("s", "o", "v", "D", "^", "P")


def draw(runs: Sequence[Run], conditions: Mapping[str, str], path: Path) -> None:
    """Write the plot as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines: dict[str, list[Row]] = {}
    for row in rows_of(runs):
        lines.setdefault(row.system, []).append(row)
    figure, axes = pyplot.subplots(figsize=(8, 5.5))
    for i, (system, rows) in enumerate(lines.items()):
        style = {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)]}
        x, y = [row.tokens_per_s_per_user for row in rows], [row.tokens_per_s for row in rows]
        axes.plot(x, y, label=system, linestyle="--" if system.startswith("plain") else "-", **style)
        for row, at in zip(rows, zip(x, y, strict=True), strict=True):
            axes.annotate(str(row.streams), at, xytext=(5, 5), textcoords="offset points", fontsize=8)
    axes.set_xlabel("tokens/s of each user")
    axes.set_ylabel("tokens/s of all users")
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.set_title(f"Numbers at the points: streams at once. {conditions.get('machine', '')}", fontsize=9)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, bbox_inches="tight")
    pyplot.close(figure)
