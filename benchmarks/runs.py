"""One run of the benchmark and its figures; runs written as CSV and read back."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from statistics import median

from loadtest.stream import StreamTimes

GENERATE = "generate"
SERVED = "served"


@dataclass(frozen=True)
class Answer:
    """One finished stream.

    Attributes:
        times: when its tokens came, and how many.
        end: reading of the same clock when the stream was complete, in seconds.
        text: all of it.
    """

    times: StreamTimes
    end: float
    text: str


@dataclass(frozen=True)
class Run:
    """The same requests once, in one mode.

    Attributes:
        system: "generate" (transformers) or "served".
        drafter: of the served system, "shipped" or "REPLAY ...", also where this run decodes plainly; "" for generate.
        speculation: whether the requests may be drafted.
        streams: how many are in flight at once.
        pair: number of the pair of runs it belongs to, from 0.
        requests, tokens: how many, and their completion tokens together.
        seconds: from the first request to the end of the last answer.
        tokens_per_s: all tokens by all seconds.
        tokens_per_s_per_user: median over requests of (tokens after the first) / (seconds after the first).
        first_token_s: median seconds from a request to its first text.
        accepted, rejected: draft tokens, from `usage`.
        accepted_per_step: accepted draft tokens by decoding steps of a request, drafted or not.
        differing: answers that are not, character by character, those of the plain run of the same pair.
        unrecorded: answers that are not the recorded continuation of their prompt; a REPLAY drafter had nothing to
            replay from where they left it.
    """

    system: str
    drafter: str
    speculation: bool
    streams: int
    pair: int
    requests: int
    tokens: int
    seconds: float
    tokens_per_s: float
    tokens_per_s_per_user: float
    first_token_s: float
    accepted: int = 0
    rejected: int = 0
    accepted_per_step: float = 0.0
    differing: int = 0
    unrecorded: int = 0


def run_of(
    answers: Sequence[Answer],
    *,
    system: str,
    streams: int,
    pair: int = 0,
    drafter: str = "",
    speculation: bool = False,
    differing: int = 0,
    unrecorded: int = 0,
) -> Run:
    """The figures of one run.

    Raises:
        ValueError: no answers, or one of fewer than two pieces of text, which has no rate.
    """
    if not answers:
        raise ValueError("answers must not be empty")
    rates = [answer.times.rate for answer in answers]
    firsts = [answer.times.first_token_seconds for answer in answers]
    if None in rates or None in firsts:
        raise ValueError("answers must each come in at least two pieces of text")
    tokens = sum(answer.times.tokens for answer in answers)
    accepted = sum(answer.times.accepted for answer in answers)
    # The first token comes out of the prompt; then every step gives one token beside those it accepts.
    steps = tokens - len(answers) - accepted
    seconds = max(answer.end for answer in answers) - min(answer.times.start for answer in answers)
    return Run(
        system=system,
        drafter=drafter,
        speculation=speculation,
        streams=streams,
        pair=pair,
        requests=len(answers),
        tokens=tokens,
        seconds=seconds,
        tokens_per_s=tokens / seconds,
        tokens_per_s_per_user=median(rate for rate in rates if rate is not None),
        first_token_s=median(first for first in firsts if first is not None),
        accepted=accepted,
        rejected=sum(answer.times.rejected for answer in answers),
        accepted_per_step=accepted / steps if steps > 0 else 0.0,
        differing=differing,
        unrecorded=unrecorded,
    )


def differing_texts(answers: Sequence[Answer], others: Sequence[Answer]) -> int:
    """How many of the same requests' answers are not the same text."""
    return sum(a.text != b.text for a, b in zip(answers, others, strict=True))


def to_csv(runs: Sequence[Run], conditions: Mapping[str, str]) -> str:
    """Comment lines `# name: value` of the conditions, then a line per run."""
    out = io.StringIO()
    for name, value in conditions.items():
        out.write(f"# {name}: {' '.join(value.split())}\n")
    writer = csv.DictWriter(out, [field.name for field in fields(Run)], lineterminator="\n")
    writer.writeheader()
    for run in runs:
        row = {name: f"{value:.6g}" if isinstance(value, float) else value for name, value in asdict(run).items()}
        writer.writerow(row | {"speculation": int(run.speculation)})
    return out.getvalue()


def from_csv(text: str) -> tuple[list[Run], dict[str, str]]:
    """What `to_csv` wrote: runs and conditions.

    Raises:
        ValueError: a column is missing, or a value is not of its column's type.
    """
    lines = text.splitlines()
    comments = [line.removeprefix("#").strip() for line in lines if line.startswith("#")]
    conditions = {name: value.strip() for name, _, value in (comment.partition(":") for comment in comments)}
    runs = []
    for row in csv.DictReader(line for line in lines if not line.startswith("#")):
        values: dict[str, object] = {}
        for field in fields(Run):
            if row.get(field.name) is None:
                raise ValueError(f"the table of runs lacks a value of {field.name}")
            values[field.name] = _PARSERS[str(field.type)](row[field.name])
        runs.append(Run(**values))  # type: ignore[arg-type]
    return runs, conditions


_PARSERS = {"str": str, "int": int, "float": float, "bool": lambda text: bool(int(text))}
