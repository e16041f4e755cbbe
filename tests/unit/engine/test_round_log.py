"""Counts of rounds, and the running survival that decides who is drafted next."""

from __future__ import annotations

import numpy as np
from tiny_models import byte_tokenizer

from engine.request import GenerationRequest, SamplingParams
from engine.sequence import Sequence
from engine.statistics import RoundLog, acceptance_rule
from engine.text import TextStream


def sequence(tier: str = "default", **params: object) -> Sequence:
    request = GenerationRequest("r", (5,), SamplingParams(**params), tier)
    return Sequence(request, 0, TextStream(byte_tokenizer(), ()), None)


def test_the_three_rules_have_names() -> None:
    assert acceptance_rule(sequence()) == "rejection"
    assert acceptance_rule(sequence(seed=1)) == "coupled"
    assert acceptance_rule(sequence(seed=1, temperature=0.0)) == "greedy"


def test_a_position_counts_as_tried_only_if_those_before_it_were_accepted() -> None:
    log = RoundLog(3)
    for verified, accepted in ((3, 3), (3, 0), (2, 1), (1, 1), (0, 0)):
        log.resolved(sequence(), verified, accepted)
    assert log.total.trials_at == [4, 2, 1]
    assert log.total.accepted_at == [3, 1, 1]
    assert (log.total.rounds, log.total.verified, log.total.accepted) == (5, 9, 5)
    assert log.total.tiers["default"].drafted == 15


def test_survival_is_learnt_for_each_rule_by_itself() -> None:
    log = RoundLog(2)
    for _ in range(300):
        log.resolved(sequence(temperature=0.0), 2, 2)
        log.resolved(sequence(seed=3), 2, 0)
    fresh = RoundLog(2).mean_survival(sequence())
    np.testing.assert_array_equal(log.mean_survival(sequence()), fresh)
    assert log.mean_survival(sequence(temperature=0.0))[1] > 0.8
    assert log.mean_survival(sequence(seed=9))[0] < 0.15


def test_what_was_taken_starts_again_and_the_total_goes_on() -> None:
    now = [10.0]
    log = RoundLog(2, clock=lambda: now[0])
    log.step(7, 0.5, 0.25)
    log.emitted(sequence("flex"), 3)
    log.planned(1.5, None)
    log.planned(0.5, 0.1)
    log.missed(late=1)
    log.drafted(0.05)
    now[0] = 12.0
    taken = log.take()
    assert (taken.seconds, taken.steps, taken.tokens) == (2.0, 1, 7)
    assert (taken.step_seconds, taken.wait_seconds, taken.draft_seconds) == (0.75, 0.25, 0.05)
    assert (taken.expected_accepted, taken.predicted_seconds, taken.predicted_steps, taken.late) == (2.0, 0.1, 1, 1)
    assert taken.tiers["flex"].emitted == 3
    log.emitted(sequence("flex"), 2)
    now[0] = 13.0
    again = log.take()
    assert (again.seconds, again.steps, again.tiers["flex"].emitted) == (1.0, 0, 2)
    assert log.total.steps == 1 and log.totals()["emitted"] == 5
