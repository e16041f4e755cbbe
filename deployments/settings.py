"""The configuration tree of the application: one pydantic model with defaults that work on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from engine.settings import DrafterSettings, EngineSettings
from scheduler.tiers import DEFAULT_TIERS, Tier

DEFAULT_CACHE = Path("~/.cache/dspark-serve")


class DeploymentSettings(BaseModel):
    """Serve's options of one deployment.

    Attributes:
        num_replicas: how many.
        ray_actor_options: resources, as Ray names them.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    num_replicas: int = Field(default=1, ge=1)
    ray_actor_options: dict[str, Any] = Field(default_factory=lambda: {"num_cpus": 0})


class AppSettings(BaseModel):
    """Everything the application builder needs; `args` of a Serve config.

    Attributes:
        model_name: under which the API serves the target.
        host: interface that Serve's proxy listens on (it must say the same as `http_options.host`).
        keys: SHA-256 of API keys -> tiers they may ask for; needed unless `host` is loopback.
        cache: folder for the converted target and measured cost tables.
        link_host: address the direct links bind to; loopback on one machine, "node" for the node's own.
        tiers: service tiers.
        engine, drafting: of verifiers and drafters.
        gateway, verifier, drafter, controller: Serve's options of the four deployments.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    model_name: str = "SmolLM2-135M-Instruct"
    host: str = "127.0.0.1"
    keys: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    cache: Path = DEFAULT_CACHE
    link_host: str = "127.0.0.1"
    tiers: tuple[Tier, ...] = DEFAULT_TIERS
    engine: EngineSettings = EngineSettings()
    drafting: DrafterSettings = DrafterSettings()
    gateway: DeploymentSettings = DeploymentSettings()
    verifier: DeploymentSettings = DeploymentSettings()
    drafter: DeploymentSettings = DeploymentSettings()
    controller: DeploymentSettings = DeploymentSettings()

    @property
    def cache_root(self) -> Path:
        """`cache` with ~ expanded."""
        return self.cache.expanduser()
