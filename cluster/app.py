"""The application builder: four deployments, decorated here and nowhere else."""

from __future__ import annotations

from typing import Any

from ray import serve

from cluster.settings import process_environment, with_environment
from deployments.controller import Controller
from deployments.drafter import Drafter
from deployments.gateway import gateway_class
from deployments.settings import AppSettings, DeploymentSettings
from deployments.verifier import Verifier

# A dead drafter or verifier has to be noticed within two seconds; a busy one may take a while to answer.
HEALTH = {"health_check_period_s": 1.0, "health_check_timeout_s": 15.0}
# Sessions end by themselves; a replica that is taken away waits for its streams.
SHUTDOWN = {"graceful_shutdown_wait_loop_s": 0.2, "graceful_shutdown_timeout_s": 10.0}


def deployment_options(settings: DeploymentSettings, threads: int) -> dict[str, Any]:
    """Serve's options of a deployment whose process runs `threads` torch threads."""
    actor = dict(settings.ray_actor_options)
    environment = dict(actor.pop("runtime_env", {}))
    environment["env_vars"] = {**process_environment(threads), **environment.get("env_vars", {})}
    return {
        "num_replicas": settings.num_replicas,
        "max_ongoing_requests": 1_000_000,  # queues are bounded per tier in the gateway, not per replica
        "ray_actor_options": {**actor, "runtime_env": environment},
        **HEALTH,
        **SHUTDOWN,
    }


def build(args: dict[str, Any]) -> serve.Application:
    """`import_path: cluster.app:build` of a Serve config; `args` are `AppSettings`.

    Raises:
        pydantic.ValidationError: a setting is unknown or out of range.
    """
    settings = with_environment(AppSettings.model_validate(args))
    engine, drafting = settings.engine, settings.drafting
    controller = serve.deployment(Controller).options(**deployment_options(settings.controller, 1)).bind(settings)
    drafter = serve.deployment(Drafter).options(**deployment_options(settings.drafter, drafting.threads)).bind(settings)
    verifier = (
        serve.deployment(Verifier)
        .options(**deployment_options(settings.verifier, engine.threads))
        .bind(settings, drafter, controller)
    )
    gateway = serve.deployment(gateway_class(settings)).options(
        name="Gateway", **deployment_options(settings.gateway, 1)
    )
    return gateway.bind(verifier)
