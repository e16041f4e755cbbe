"""What every folder of tests shares: the real embedded target, in the user's own cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from running_app import running_app

from engine.embedded import embedded_target

__all__ = ["running_app"]

CACHE = Path("~/.cache/dspark-serve").expanduser()


@pytest.fixture(scope="session")
def target_path() -> Path:
    """The folder of the embedded target; the first run on a machine downloads and converts it (35 s)."""
    return embedded_target(CACHE)
