"""`make serve` from outside: it becomes ready, and Ctrl-C leaves nothing behind. `serve deploy` works too."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml
from running_app import free_port

from cluster.bring_up import CPU_CONFIG, wait_until_healthy

ROOT = Path(__file__).parent.parent.parent


def processes_with(marker: str) -> list[str]:
    """Command lines of processes whose environment holds the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if marker.encode() in (entry / "environ").read_bytes():
                    found.append((entry / "cmdline").read_bytes().replace(b"\0", b" ").decode())
            except OSError:  # gone meanwhile, or not ours
                continue
    return found


def wait_for_line(process: subprocess.Popen[str], text: str, timeout: float) -> str:
    assert process.stdout is not None
    deadline, seen = time.monotonic() + timeout, ""
    for line in process.stdout:
        seen += line
        if text in line:
            return seen
        assert time.monotonic() < deadline, seen
    raise AssertionError(f"ended before {text!r}: {seen}")


def test_serve_becomes_ready_and_ctrl_c_leaves_no_process(target_path: Path) -> None:
    marker = f"DSPARK_TEST_MARKER=serve-{os.getpid()}"
    name, _, value = marker.partition("=")
    process = subprocess.Popen(
        [sys.executable, "-m", "cluster", "serve", "--port", str(free_port())],
        cwd=ROOT,
        env={**os.environ, name: value},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output = wait_for_line(process, "curl -N", 240)
        assert "Ready after" in output
        assert len(processes_with(marker)) > 4
        # As a terminal does it: the signal goes to the whole foreground group.
        os.killpg(process.pid, signal.SIGINT)
        assert process.wait(timeout=60) == 0
    finally:
        if process.poll() is None:
            process.kill()
    deadline = time.monotonic() + 20
    while (left := processes_with(marker)) and time.monotonic() < deadline:
        time.sleep(0.25)
    assert left == []


@pytest.mark.timeout(400)
def test_serve_deploy_of_the_cpu_config(target_path: Path, tmp_path: Path) -> None:
    """A local Ray of its own with a dashboard, as a cluster has, and Serve's own command line."""
    marker = f"DSPARK_TEST_MARKER=deploy-{os.getpid()}"
    name, _, value = marker.partition("=")
    config = yaml.safe_load(CPU_CONFIG.read_text())
    port, dashboard, gcs = free_port(), free_port(), free_port()
    config["http_options"]["port"] = port  # the file's 8000 may be taken on a developer's machine
    path = tmp_path / "cpu.yaml"
    path.write_text(yaml.safe_dump(config))
    tools = Path(sys.executable).parent
    short = tempfile.mkdtemp(prefix="ray-")  # Ray's sockets lie in it, and a socket's path has to be short
    # `ray start` asks everybody for a token; its clients have to be told so.
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    env = {**os.environ, **token, name: value, "PYTHONPATH": str(ROOT), "RAY_USAGE_STATS_ENABLED": "0"}
    head = subprocess.Popen(
        [
            *(str(tools / "ray"), "start", "--head", "--block", "--num-cpus=4", f"--port={gcs}"),
            *("--include-dashboard=true", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1"),
            *("--node-ip-address=127.0.0.1", f"--temp-dir={short}"),
        ],
        cwd=ROOT,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        wait_for_http(f"http://127.0.0.1:{dashboard}/api/version", 90)
        command = [str(tools / "serve"), "deploy", str(path), "--address", f"http://127.0.0.1:{dashboard}"]
        for _ in range(10):  # the dashboard answers before its Serve part does
            done = subprocess.run(command, cwd=ROOT, env=env, timeout=120, capture_output=True, text=True)
            if done.returncode == 0:
                break
            time.sleep(2)
        assert done.returncode == 0, done.stderr
        wait_until_healthy(f"http://127.0.0.1:{port}", 240)
    finally:
        head.send_signal(signal.SIGTERM)
        head.wait(timeout=60)
        shutil.rmtree(short, ignore_errors=True)
    deadline = time.monotonic() + 30
    while (left := processes_with(marker)) and time.monotonic() < deadline:
        time.sleep(0.25)
    assert left == []


def wait_for_http(url: str, timeout: float) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5):
                return
        except urllib.error.HTTPError:  # Ray asks for a token, which `serve deploy` brings: it is up
            return
        except OSError:
            assert time.monotonic() < deadline, f"{url} does not answer"
            time.sleep(0.5)
