"""The shipped Serve configs hold: Ray's schema, our settings, and keys wherever others can reach the port."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from pydantic import ValidationError
from ray.serve.schema import ServeDeploySchema

from cluster.app import build
from cluster.bring_up import CPU_CONFIG, load_config
from cluster.settings import with_environment
from deployments.errors import SettingsError
from deployments.gateway_settings import GatewaySettings
from deployments.settings import AppSettings

CONFIGS = sorted(CPU_CONFIG.parent.glob("*.yaml"))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_configs_keep_to_rays_schema_and_ours(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    ServeDeploySchema.model_validate(config)
    (application,) = config["applications"]
    settings = AppSettings.model_validate(application["args"])
    assert config["http_options"]["host"] == settings.host, "the check for keys would guard another address"


def test_the_application_has_four_deployments() -> None:
    config = load_config(CPU_CONFIG, None, None, 1234)
    assert config["http_options"] == {"host": "127.0.0.1", "port": 1234, "request_timeout_s": 3600}
    application = build(config["applications"][0]["args"])
    names: set[str] = set()
    seen = [application]
    while seen:
        bound = seen.pop()._bound_deployment
        names.add(bound.name)
        seen += [a for a in bound.init_args if hasattr(a, "_bound_deployment")]
    assert names == {"Gateway", "Verifier", "Drafter", "Controller"}


def test_an_open_interface_without_keys_is_refused() -> None:
    args = yaml.safe_load((CPU_CONFIG.parent / "gpu.yaml").read_text())["applications"][0]["args"]
    settings = AppSettings.model_validate(args)
    with pytest.raises(SettingsError, match="keys"):
        GatewaySettings(host=settings.host, model_name="m", max_context=99, keys=settings.keys)


def test_an_unknown_setting_is_refused_by_name() -> None:
    with pytest.raises(ValidationError, match="verify_lenght"):
        AppSettings.model_validate({"engine": {"verify_lenght": 3}})


def test_the_environment_lies_over_the_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DSPARK_CACHE", str(tmp_path))
    monkeypatch.setenv("DSPARK_KEYS", '{"' + "0" * 64 + '": ["default"]}')
    settings = with_environment(AppSettings())
    assert settings.cache == tmp_path
    assert settings.keys == {"0" * 64: ("default",)}


def test_a_named_model_is_served_under_its_folders_name() -> None:
    config = load_config(CPU_CONFIG, "/models/My-Llama", "/drafters/mine", None)
    args = config["applications"][0]["args"]
    assert args["model_name"] == "My-Llama"
    assert args["engine"]["target"] == "/models/My-Llama"
    assert args["drafting"]["checkpoint"] == "/drafters/mine"
