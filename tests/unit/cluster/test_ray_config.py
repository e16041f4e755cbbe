"""The description for `ray up` passes Ray's own check, and a broken copy does not."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from ray._private.label_utils import validate_node_labels
from ray.autoscaler._private.util import prepare_config, validate_config

ROOT = Path(__file__).parents[3]
Config = dict[str, Any]


@pytest.fixture(scope="module")
def config() -> Config:
    return yaml.safe_load((ROOT / "ray_config.yaml").read_text())


def check(config: Config) -> None:
    """What `ray up` does before it talks to a provider: fill in defaults, then validate."""
    validate_config(prepare_config(copy.deepcopy(config)))


def test_ray_accepts_it(config: Config) -> None:
    check(config)


def _unknown_key(config: Config) -> None:
    config["autoscaling"] = True


def _unknown_key_of_a_node_type(config: Config) -> None:
    config["available_node_types"]["drafter"]["label"] = {"dspark-role": "drafter"}


def _resources_in_words(config: Config) -> None:
    config["available_node_types"]["verifier"]["resources"]["GPU"] = "one"


def _labels_that_are_no_strings(config: Config) -> None:
    config["available_node_types"]["verifier"]["labels"]["dspark-role"] = 1


def _node_type_without_a_machine(config: Config) -> None:
    del config["available_node_types"]["drafter"]["node_config"]


def _no_provider(config: Config) -> None:
    config["provider"] = {"region": "us-west-2"}


def _head_of_an_unknown_type(config: Config) -> None:
    config["head_node_type"] = "leader"


def _fewer_nodes_than_are_needed(config: Config) -> None:
    config["max_workers"] = 1


@pytest.mark.parametrize(
    "break_it",
    [
        _unknown_key,
        _unknown_key_of_a_node_type,
        _resources_in_words,
        _labels_that_are_no_strings,
        _node_type_without_a_machine,
        _no_provider,
        _head_of_an_unknown_type,
        _fewer_nodes_than_are_needed,
    ],
)
def test_ray_refuses_a_broken_copy(config: Config, break_it: Callable[[Config], None]) -> None:
    broken = copy.deepcopy(config)
    break_it(broken)
    with pytest.raises((jsonschema.ValidationError, ValueError, KeyError)):
        check(broken)


def test_drafters_and_verifiers_are_kept_apart(config: Config) -> None:
    types = config["available_node_types"]
    roles = {name: node["labels"]["dspark-role"] for name, node in types.items()}
    assert roles == {"head": "head", "verifier": "verifier", "drafter": "drafter"}
    for node in types.values():
        validate_node_labels(node["labels"])
    assert types["verifier"]["resources"]["GPU"] >= 1
    assert types["drafter"]["resources"]["GPU"] >= 1
    assert types["head"]["resources"] == {"CPU": 0}


@pytest.mark.parametrize("commands", ["head_start_ray_commands", "worker_start_ray_commands"])
def test_serve_variables_are_exported_before_ray_starts(config: Config, commands: str) -> None:
    start = next(command for command in config[commands] if "ray start" in command)
    exports = [match.start() for match in re.finditer(r"export RAY_SERVE_\w+=", start)]
    assert exports and max(exports) < start.index("ray start")


def test_every_node_exports_the_same_serve_variables(config: Config) -> None:
    head, worker = (
        set(re.findall(r"export (RAY_SERVE_\w+=\S+?);", " ".join(config[key])))
        for key in ("head_start_ray_commands", "worker_start_ray_commands")
    )
    assert head == worker


def test_the_head_scales_the_cluster(config: Config) -> None:
    start = next(command for command in config["head_start_ray_commands"] if "ray start" in command)
    assert "--autoscaling-config=~/ray_bootstrap_config.yaml" in start


def test_nodes_install_this_project_with_its_constraints(config: Config) -> None:
    (folder,) = config["file_mounts"]
    assert config["file_mounts"][folder] == "."
    assert any(f"-c {folder}/constraints.txt -e {folder}" in command for command in config["setup_commands"])
    assert (ROOT / "constraints.txt").is_file()


def test_the_image_is_the_pinned_ray(config: Config) -> None:
    pinned = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    assert f":{pinned['ray']}-py311" in config["docker"]["image"]
