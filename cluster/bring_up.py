"""Bringing the application up on one machine, and down again without leaving a process behind."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from cluster.settings import python_path, set_serve_environment, with_environment
from deployments.preparation import announced, prepare_kernels, prepare_target
from deployments.settings import AppSettings

CPU_CONFIG = Path(__file__).parent / "serve" / "cpu.yaml"
READY_TIMEOUT_S = 600.0


def load_config(path: Path, model: str | None, drafter: str | None, port: int | None) -> dict[str, Any]:
    """A Serve config with what the command line says laid over it.

    Raises:
        ValueError: the file has not exactly one application, or its settings do not hold.
    """
    config: dict[str, Any] = yaml.safe_load(path.read_text())
    if len(config.get("applications", [])) != 1:
        raise ValueError(f"{path} must have exactly one application")
    args = config["applications"][0].setdefault("args", {})
    if model is not None:
        args.setdefault("engine", {})["target"] = model
        args["model_name"] = Path(model).name
    if drafter is not None:
        args.setdefault("drafting", {})["checkpoint"] = drafter
    if port is not None:
        config.setdefault("http_options", {})["port"] = port
    settings = with_environment(AppSettings.model_validate(args))
    config["applications"][0]["args"] = settings.model_dump(mode="json")
    config.setdefault("http_options", {})["host"] = settings.host
    return config


@contextlib.contextmanager
def local_ray(cpus: int | None = None) -> Iterator[None]:
    """A Ray of our own on this machine, with nothing left behind."""
    set_serve_environment()
    import ray

    ray.init(
        address="local",
        num_cpus=cpus or max(4, os.cpu_count() or 1),
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
        # Replicas import the project from where this process did.
        runtime_env={"env_vars": {"PYTHONPATH": python_path(Path(__file__).resolve().parent.parent)}},
    )
    try:
        yield
    finally:
        from ray import serve

        with contextlib.suppress(Exception):  # a Ray that has died already has nothing left to shut down
            serve.shutdown()
        ray.shutdown()


def deploy(config: dict[str, Any]) -> None:
    """Run the application of a Serve config on the running Ray, until Serve calls it running.

    Raises:
        RuntimeError: a deployment could not be started; says which and why.
    """
    from ray import serve

    from cluster.app import build

    (application,) = config["applications"]
    serve.start(
        proxy_location=config.get("proxy_location", "HeadOnly"),
        http_options=config["http_options"],
        logging_config=config.get("logging_config"),
    )
    serve.run(
        build(application["args"]),
        name=application["name"],
        route_prefix=application["route_prefix"],
    )


def wait_until_healthy(url: str, timeout: float) -> None:
    """Poll /health until it answers 200.

    Raises:
        TimeoutError: it did not within `timeout` seconds.
    """
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5.0) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            pass
        time.sleep(0.25)
    raise TimeoutError(f"{url}/health does not answer 200 after {timeout:.0f} s")


def serve_until_interrupted(path: Path, model: str | None, drafter: str | None, port: int | None) -> int:
    """`python -m cluster serve`: up, a line to try, wait for Ctrl-C (or SIGTERM), down."""
    began = time.monotonic()
    config = load_config(path, model, drafter, port)
    settings = AppSettings.model_validate(config["applications"][0]["args"])
    # A terminal's Ctrl-C goes to every process in the foreground group: keep Ray's out of it.
    interrupted = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: interrupted.set())
    with announced("target model"):
        prepare_target(settings)
    with announced("CPU kernels"):
        prepare_kernels(settings)
    url = f"http://{settings.host}:{config['http_options']['port']}"
    with contextlib.ExitStack() as stack:
        with announced("local Ray"):
            stack.enter_context(local_ray())
        with announced("gateway, verifier, drafter, controller"):
            deploy(config)
            wait_until_healthy(url, READY_TIMEOUT_S)
        print(
            f"\nReady after {time.monotonic() - began:.0f} s: {url}/v1   (Ctrl-C stops everything)\n\n"
            f"  curl -N {url}/v1/chat/completions -H 'content-type: application/json' -d '"
            f'{{"model": "{settings.model_name}", "stream": true, "messages": '
            '[{"role": "user", "content": "What is the capital of France?"}]}\'\n',
            flush=True,
        )
        interrupted.wait()
        print("\nstopping ...", flush=True)
    print("stopped.", flush=True)
    return 0
