"""Which folder may import what, and who may read the environment: the table of the design, held by a test."""

from __future__ import annotations

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROJECT = {"scheduler", "engine", "training", "deployments", "cluster", "loadtest", "benchmarks", "tests"}


@dataclass(frozen=True)
class Rule:
    """What a folder may import beside itself and the standard library.

    Attributes:
        project: the project's folders it may import.
        only: the third-party packages it may import, or None if `never` alone restricts them.
        never: third-party modules it may not import.
        unless: exceptions from `never`, more specific.
    """

    project: frozenset[str]
    only: frozenset[str] | None = None
    never: frozenset[str] = frozenset()
    unless: frozenset[str] = frozenset()


SERVING = frozenset({"ray", "fastapi", "starlette", "uvicorn", "zmq", "msgspec", "prometheus_client"})
TENSORS = frozenset({"torch", "safetensors", "accelerate"})

RULES: dict[str, Rule] = {
    "scheduler": Rule(frozenset(), only=frozenset({"numpy", "pydantic"})),
    "engine": Rule(frozenset({"scheduler"}), never=SERVING),
    "training": Rule(frozenset({"engine", "scheduler"}), never=SERVING, unless=frozenset({"ray.train", "ray.data"})),
    # Ray is met without ever seeing a tensor shape.
    "deployments": Rule(frozenset({"engine", "scheduler"}), never=TENSORS),
    "cluster": Rule(frozenset({"deployments"}), never=TENSORS),
    "loadtest": Rule(frozenset()),
}
READS_NO_ENVIRONMENT = ("scheduler", "engine", "deployments", "training")


def imported_modules(source: str) -> list[tuple[int, str]]:
    """(line, full name) of everything a module imports, inside functions and by literal name too.

    `from ray import serve` counts as `ray.serve`. Relative imports stay in their folder and are left out.
    """
    found: list[tuple[int, str]] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        elif (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in ("__import__", "import_module", "importlib.import_module")
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            found.append((node.lineno, node.args[0].value))
    return found


def forbidden_imports(folder: str, source: str) -> list[str]:
    """The imports of `source`, as a file of `folder`, that its rule does not allow."""
    rule = RULES[folder]
    return [f"line {line}: {name}" for line, name in imported_modules(source) if not _allowed(folder, rule, name)]


def _allowed(folder: str, rule: Rule, name: str) -> bool:
    top = name.partition(".")[0]
    if top == folder or top in sys.stdlib_module_names:
        return True
    if top in PROJECT:
        return top in rule.project
    if rule.only is not None and top not in rule.only:
        return False
    return not _below(name, rule.never) or _below(name, rule.unless)


def _below(name: str, modules: frozenset[str]) -> bool:
    return any(name == module or name.startswith(module + ".") for module in modules)


def environment_reads(source: str) -> list[str]:
    """Where `source` reads environment variables. Setting or deleting one by name is not reading."""
    tree = ast.parse(source)
    names = {"os"} | {
        alias.asname or alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.Import)
        for alias in node.names
        if alias.name == "os"
    }
    written = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store | ast.Del)
    }
    readers = {"environ", "environb", "getenv", "getenvb"}
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            found += [f"line {node.lineno}: os.{a.name}" for a in node.names if a.name in readers]
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in names
            and node.attr in readers
            and id(node) not in written
        ):
            found.append(f"line {node.lineno}: os.{node.attr}")
    return found


def sources(folder: str) -> list[Path]:
    return sorted((ROOT / folder).rglob("*.py"))


@pytest.mark.parametrize("folder", RULES)
def test_folders_import_in_one_direction(folder: str) -> None:
    assert sources(folder)
    offences = {
        str(path.relative_to(ROOT)): offending
        for path in sources(folder)
        if (offending := forbidden_imports(folder, path.read_text()))
    }
    assert not offences


@pytest.mark.parametrize("folder", READS_NO_ENVIRONMENT)
def test_the_environment_is_read_in_settings_only(folder: str) -> None:
    offences = {
        str(path.relative_to(ROOT)): reads for path in sources(folder) if (reads := environment_reads(path.read_text()))
    }
    assert not offences


def test_in_cluster_only_settings_reads_the_environment() -> None:
    readers = [path.name for path in sources("cluster") if environment_reads(path.read_text())]
    assert set(readers) <= {"settings.py"}


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("scheduler", "import torch"),
        ("scheduler", "import scipy.stats"),
        ("scheduler", "from engine.request import SamplingParams"),
        ("scheduler", "def plan():\n    import ray"),
        ("engine", "import ray"),
        ("engine", "from ray import serve"),
        ("engine", "from deployments import wire"),
        ("engine", "import training.loss as loss"),
        ("engine", "import importlib\nimportlib.import_module('cluster.settings')"),
        ("engine", "if TYPE_CHECKING:\n    import zmq"),
        ("training", "from deployments.wire import Message"),
        ("training", "from ray import serve"),
        ("training", "import ray"),
        ("deployments", "from cluster import settings"),
        ("deployments", "import training"),
        ("deployments", "import torch.nn.functional as F"),
        ("cluster", "from torch import Tensor"),
        ("cluster", "import engine.target"),
        ("loadtest", "from scheduler.tiers import Tier"),
        ("loadtest", "import engine"),
        ("loadtest", "import benchmarks"),
    ],
)
def test_a_planted_import_is_caught(folder: str, source: str) -> None:
    assert forbidden_imports(folder, source)


@pytest.mark.parametrize(
    ("folder", "source"),
    [
        ("scheduler", "import numpy as np\nfrom pydantic import BaseModel\nfrom scheduler.tiers import Tier"),
        ("engine", "import torch\nfrom scheduler.planner import plan\nimport transformers"),
        ("training", "import ray.train\nfrom ray.train import ScalingConfig\nfrom engine import target"),
        ("deployments", "from ray import serve\nimport zmq\nfrom engine.request import SamplingParams"),
        ("cluster", "import ray\nfrom deployments import gateway"),
        ("loadtest", "from locust import FastHttpUser\nfrom loadtest.tiers import Promise"),
        ("engine", "from . import request\nfrom .rounds import DraftBatch"),
    ],
)
def test_a_rightful_import_is_let_through(folder: str, source: str) -> None:
    assert forbidden_imports(folder, source) == []


@pytest.mark.parametrize(
    "source",
    [
        "import os\nos.environ['HOME']",
        "import os\nos.environ.get('HOME')",
        "import os\n'HOME' in os.environ",
        "import os\nos.getenv('HOME')",
        "import os as system\nsystem.environ.copy()",
        "from os import environ",
        "from os import getenv as ask",
        "import os\nos.environ['A'] = os.environ['B']",
    ],
)
def test_a_planted_read_of_the_environment_is_caught(source: str) -> None:
    assert environment_reads(source)


def test_setting_a_variable_is_not_reading_it() -> None:
    assert environment_reads("import os\nos.environ['A'] = '1'\ndel os.environ['A']\nos.path.join('a', 'b')") == []
