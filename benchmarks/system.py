"""The served system under test: a local Ray with the application of cluster/serve/cpu.yaml, and its end."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.bring_up import CPU_CONFIG, deploy, load_config, local_ray, wait_until_healthy
from deployments.settings import AppSettings

READY_S = 300.0


@dataclass(frozen=True)
class System:
    """A running application.

    Attributes:
        url: of its gateway, on loopback.
        model: name to ask for.
        compiled_kernels: whether the verifier runs on the compiled kernels.
    """

    url: str
    model: str
    compiled_kernels: bool


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def config_of(target: Path, cache: Path, drafting: dict[str, Any], port: int) -> dict[str, Any]:
    """The CPU configuration with this target, cache and port, and with `drafting` laid over its drafter's settings.

    Raises:
        pydantic.ValidationError: a setting does not hold.
    """
    config = load_config(CPU_CONFIG, None, None, port)
    args = config["applications"][0]["args"]
    args["engine"]["target"] = str(target)
    args["cache"] = str(cache)
    args["drafting"].update(drafting)
    config["applications"][0]["args"] = AppSettings.model_validate(args).model_dump(mode="json")
    return config


@contextmanager
def running_system(target: Path, drafting: dict[str, Any]) -> Iterator[System]:
    """The system from nothing, and nothing of it afterwards.

    Its cache is new, so that the costs which its planner goes by are measured now, on the machine as it is.

    Raises:
        RuntimeError, TimeoutError: it did not come up.
    """
    with tempfile.TemporaryDirectory(prefix="dspark-benchmark-") as cache, local_ray():
        config = config_of(target, Path(cache), drafting, free_port())
        deploy(config)
        application, http = config["applications"][0], config["http_options"]
        url = f"http://{http['host']}:{http['port']}"
        wait_until_healthy(url, READY_S)
        from ray import serve

        state = serve.get_deployment_handle("Verifier", application["name"]).state.remote().result(timeout_s=60)
        if state["unprofiled"]:
            raise RuntimeError("the verifier has not measured its costs: its planner would not choose anything")
        yield System(url, application["args"]["model_name"], state["compiled_kernels"])
