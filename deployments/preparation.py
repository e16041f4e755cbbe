"""What a machine needs before its replicas start: made once, with progress, instead of inside a replica."""

from __future__ import annotations

from deployments.settings import AppSettings
from engine.embedded import resolve_target
from engine.kernels import load_kernels
from engine.progress import announced

__all__ = ["announced", "prepare_kernels", "prepare_target"]


def prepare_target(settings: AppSettings) -> None:
    """Fetch and convert the embedded target, or check that the named folder is there.

    Raises:
        TargetError: the target is not there and cannot be fetched.
    """
    resolve_target(settings.engine.target, settings.cache_root)


def prepare_kernels(settings: AppSettings) -> None:
    """Build the CPU kernels where they will be used."""
    if "cpu" in (settings.engine.device, settings.drafting.device):
        load_kernels()
