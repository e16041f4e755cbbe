"""Says what is being waited for, once a wait has lasted two seconds."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

QUIET_SECONDS = 2.0
REPEAT_SECONDS = 5.0


@contextmanager
def announced(label: str, stream: TextIO | None = None, quiet: float = QUIET_SECONDS) -> Iterator[None]:
    """Run the body; print `label` and the elapsed seconds if it takes longer than `quiet` seconds.

    On a terminal one line is rewritten; elsewhere a line is added every few seconds. A quick body prints
    nothing.

    Args:
        label: what is happening, e.g. "downloading the model".
        stream: where to print; standard error if None.
        quiet: seconds before the first line.
    """
    out = stream if stream is not None else sys.stderr
    rewrite = out.isatty()
    done = threading.Event()
    begin = time.monotonic()

    def tick() -> None:
        wait = quiet
        while not done.wait(wait):
            end = "" if rewrite else "\n"
            print(f"{label} ... {time.monotonic() - begin:.0f} s", end=end, file=out, flush=True)
            if rewrite:
                print("\r", end="", file=out)
            wait = 1.0 if rewrite else REPEAT_SECONDS

    ticker = threading.Thread(target=tick, name="announced", daemon=True)
    ticker.start()
    outcome = "failed after"
    try:
        yield
        outcome = "done in"
    finally:
        done.set()
        ticker.join()
        seconds = time.monotonic() - begin
        if seconds > quiet:
            print(f"{label} ... {outcome} {seconds:.1f} s", file=out, flush=True)
