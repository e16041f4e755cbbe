"""The controller without Ray: costs are kept, read again, and end up in the policy."""

from __future__ import annotations

from pathlib import Path

from deployments.controller import Controller
from deployments.settings import AppSettings
from scheduler.policy import VerifyPolicy
from scheduler.report import VerifierReport

VERIFY = {1: [0.02, 0.03, 0.02], 2: [0.021] * 3, 8: [0.05] * 3}
DRAFT = {1: [0.004], 8: [0.01]}


async def test_a_profile_is_measured_once_and_reloaded(tmp_path: Path) -> None:
    settings = AppSettings(cache=tmp_path)
    first = await Controller(settings).register("key", 2, [1.0, 1.2])
    assert first["profile"]
    assert VerifyPolicy.model_validate(first["policy"]).costs is None
    controller = Controller(settings)
    await controller.register("key", 2, [1.0, 1.2])
    published = VerifyPolicy.model_validate(await controller.submit_profile("key", VERIFY, DRAFT))
    assert published.costs is not None and published.costs.verify_seconds(1) == 0.02
    assert published.temperatures == (1.0, 1.2)
    assert set(published.weights) == {"priority", "default", "flex"}

    again = await Controller(settings).register("key", 2, [1.0, 1.2])
    assert not again["profile"]
    assert VerifyPolicy.model_validate(again["policy"]).costs == published.costs
    other = await Controller(settings).register("another machine", 2, [1.0, 1.2])
    assert other["profile"]


async def test_a_broken_profile_is_measured_again(tmp_path: Path) -> None:
    controller = Controller(AppSettings(cache=tmp_path))
    (tmp_path / "step_costs").mkdir()
    (tmp_path / "step_costs" / "key.json").write_text("{")
    assert (await controller.register("key", 2, [1.0, 1.0]))["profile"]


async def test_a_report_is_answered_with_a_fresh_policy_of_the_same_version(tmp_path: Path) -> None:
    controller = Controller(AppSettings(cache=tmp_path))
    report = VerifierReport(replica_id="r", policy_version=0, free_pages=3).model_dump(mode="json")
    assert await controller.report(report) == {}, "a controller that has just started asks to be registered with"
    registered = VerifyPolicy.model_validate((await controller.register("key", 2, [1.0, 1.0]))["policy"])
    answered = VerifyPolicy.model_validate(await controller.report(report))
    assert answered.version == registered.version
    assert answered.issued_at >= registered.issued_at
    assert (await controller.state())["reports"]["r"]["free_pages"] == 3
