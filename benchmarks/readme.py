"""The measured section of benchmarks/README.md."""

from __future__ import annotations

BEGIN = "<!-- measured: begin (filled by `python -m benchmarks.served --write-readme`) -->"
END = "<!-- measured: end -->"


def with_measured(readme: str, measured: str) -> str:
    """The README with what stands between the two marks replaced.

    Raises:
        ValueError: a mark is missing, or they are in the wrong order.
    """
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"README must hold the lines {BEGIN!r} and, after it, {END!r}")
    return f"{before}{BEGIN}\n{measured.strip()}\n{END}{after}"
