"""The only place that reads or writes environment variables."""

from __future__ import annotations

import json
import os
from pathlib import Path

from deployments.settings import AppSettings

PREFIX = "DSPARK_"


def with_environment(settings: AppSettings) -> AppSettings:
    """Settings with DSPARK_CACHE, DSPARK_MODEL_NAME, DSPARK_HOST and DSPARK_KEYS (JSON) laid over them."""
    update: dict[str, object] = {}
    for name in ("cache", "model_name", "host", "keys"):
        value = os.environ.get(PREFIX + name.upper())
        if value is not None:
            update[name] = json.loads(value) if name == "keys" else value
    return AppSettings.model_validate({**settings.model_dump(), **update}) if update else settings


def process_environment(threads: int) -> dict[str, str]:
    """Variables of a replica's process.

    Ray gives an actor one OpenMP thread unless told otherwise. How long a waiting thread spins stays at OpenMP's
    default, about a millisecond: shorter makes every step up to twice as long (benchmarks/README.md), and longer
    would take the cores from the process whose turn it is.
    """
    return {
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }


def set_serve_environment() -> None:
    """Set what Ray itself must find when it starts on one machine; what the user has set stays."""
    os.environ.setdefault("RAY_SERVE_LOG_TO_STDERR", "0")
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S", "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def python_path(first: Path) -> str:
    """PYTHONPATH with a folder put in front."""
    return os.pathsep.join([str(first), *filter(None, [os.environ.get("PYTHONPATH")])])
