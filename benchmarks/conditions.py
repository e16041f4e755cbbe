"""What a measurement was made on and with: the lines above its table."""

from __future__ import annotations

import os
import platform
import time
from importlib.metadata import version

from engine.kernels.build import processor
from engine.settings import usable_cores


def conditions_of(tokens: int, pairs: int) -> dict[str, str]:
    """Machine, versions, load and size of the run, as names and values on one line each."""
    names = [line.partition(":")[2].strip() for line in processor().splitlines() if line.startswith("model name")]
    minutes = os.getloadavg()[0]
    return {
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": f"{names[0] if names else platform.processor() or platform.machine()}, {usable_cores()} cores",
        "versions": f"Python {platform.python_version()}, torch {version('torch')}, "
        f"transformers {version('transformers')}, Ray {version('ray')}",
        "load of the machine before it": f"{minutes:.2f} (1 minute)",
        "requests": f"greedy, float32, {tokens} tokens each, {pairs} pairs of runs with speculation and plain",
    }
