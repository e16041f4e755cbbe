"""The target's own greedy continuations, as the file that a replay drafter reads (`engine/drafters/replay.py`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.text import TextStream

Ids = tuple[int, ...]


class RecordingError(ValueError):
    """A recording that does not hold what this run needs."""


@dataclass(frozen=True)
class Recorded:
    """One prompt and one continuation of it, as token ids.

    Batches of other sizes round differently, and where the two best tokens are nearly equal that changes the text:
    a prompt may have several continuations.
    """

    prompt: Ids
    continuation: Ids


def write_recording(path: Path, recorded: Sequence[Recorded]) -> None:
    """Write each distinct entry once. The file appears whole or not at all."""
    entries = [{"prompt": r.prompt, "continuation": r.continuation} for r in dict.fromkeys(recorded)]
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(entries))
    part.replace(path)


def load_recording(path: Path, prompts: Sequence[Ids], tokens: int) -> list[Recorded]:
    """What `write_recording` wrote.

    Raises:
        RecordingError: there is none, or it lacks one of `prompts`, or has less than `tokens` tokens of it.
    """
    try:
        entries = json.loads(path.read_text())
    except FileNotFoundError:
        raise RecordingError(f"there is no recording {path}: run once without --skip-transformers") from None
    recorded = [Recorded(tuple(entry["prompt"]), tuple(entry["continuation"])) for entry in entries]
    long = {r.prompt for r in recorded if len(r.continuation) >= tokens}
    lacking = sum(prompt not in long for prompt in prompts)
    if lacking:
        raise RecordingError(
            f"the recording {path} lacks {lacking} of {len(prompts)} prompts at {tokens} tokens: run once without "
            "--skip-transformers"
        )
    return recorded


def texts_of(recorded: Sequence[Recorded], tokens: int, tokenizer: Any) -> dict[Ids, set[str]]:
    """The text that the first `tokens` tokens of each continuation give, as a gateway streams it, by prompt."""
    texts: dict[Ids, set[str]] = {}
    for entry in recorded:
        stream = TextStream(tokenizer, ())
        text = "".join(stream.push(token) for token in entry.continuation[:tokens]) + stream.finish()
        texts.setdefault(entry.prompt, set()).add(text)
    return texts
