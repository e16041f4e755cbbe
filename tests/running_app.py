"""A running application on a local Ray, shared by the tests that need one."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cluster.bring_up import CPU_CONFIG, deploy, load_config, local_ray, wait_until_healthy

READY_S = 240.0


def free_port() -> int:
    """A TCP port nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class RunningApp:
    """What a test needs of the application."""

    url: str
    model: str

    def handle(self, deployment: str) -> Any:
        """Serve's handle of a deployment."""
        from ray import serve

        return serve.get_deployment_handle(deployment, "dspark")

    def verifier_state(self) -> dict[str, Any]:
        """`Verifier.state`."""
        state: dict[str, Any] = self.handle("Verifier").state.remote().result(timeout_s=60)
        return state

    def drafter_pid(self) -> int:
        """Process of the drafter replica that Serve would pick now."""

        async def pick() -> int:
            async with self.handle("Drafter").open_link.choose_replica("-") as replica:
                return int(replica.replica_metadata["pid"])

        return asyncio.run(pick())


@pytest.fixture(scope="module")
def running_app(request: pytest.FixtureRequest, target_path: Path) -> Iterator[RunningApp]:
    """The application of cluster/serve/cpu.yaml on a free port; a module's ENGINE overrides engine settings."""
    port = free_port()
    config = load_config(CPU_CONFIG, None, None, port)
    config["applications"][0]["args"]["engine"].update(getattr(request.module, "ENGINE", {}))
    with local_ray():
        deploy(config)
        url = f"http://127.0.0.1:{port}"
        wait_until_healthy(url, READY_S)
        yield RunningApp(url, config["applications"][0]["args"]["model_name"])
