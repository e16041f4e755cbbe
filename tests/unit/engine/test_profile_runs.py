"""What is measured at start leaves nothing behind and says what it measured."""

from __future__ import annotations

import pytest
from tiny_models import TinyDrafter, WatchedLink, greedy_params, tiny_drafter, tiny_engine, tiny_llama, tiny_target

from engine.engine import DraftSide
from engine.pages import PagePool
from engine.profile import DRAFT_REQUESTS, VERIFY_TOKENS, profile_draft, profile_verify
from engine.target import TargetRunner
from scheduler.costs import StepCosts


@pytest.fixture(scope="module")
def runner() -> TargetRunner:
    return tiny_target(tiny_llama(vocabulary=60, layers=2), (0,)).runner


def side(drafter: TinyDrafter, link: WatchedLink) -> DraftSide:
    return DraftSide(drafter.fusion, "tiny", drafter.config.block_size, drafter.config.sliding_window, link)


def test_steps_are_measured_as_far_as_the_pages_go(runner: TargetRunner) -> None:
    pool = PagePool(runner.kv_shape, 17 * 8)
    said: list[str] = []
    seconds = profile_verify(runner, pool, said.append)
    assert list(seconds) == [n for n in VERIFY_TOKENS if n <= 32]  # 8 requests of 4 tokens and 256 before them
    assert all(len(runs) >= 3 and min(runs) > 0 for runs in seconds.values())
    assert len(said) == len(seconds) and pool.free == pool.pages


def test_drafts_are_measured_with_contexts_of_a_whole_window_and_those_are_closed(runner: TargetRunner) -> None:
    drafter = tiny_drafter(runner)
    link = WatchedLink(drafter.engine())
    seconds = profile_draft(side(drafter, link), runner.hidden_size, lambda line: None)
    assert list(seconds) == list(DRAFT_REQUESTS)
    assert all(len(reply.sequence) in DRAFT_REQUESTS and not reply.resync.size for reply in link.replies)
    assert link._drafter is not None and link._drafter.contexts == 0
    costs = StepCosts.from_profile({1: [0.01], 2: [0.02]}, seconds)
    assert 0 < costs.draft(1) <= costs.draft(32)


def test_without_an_answer_there_is_no_measurement(runner: TargetRunner) -> None:
    drafter = tiny_drafter(runner)
    link = WatchedLink(drafter.engine(), lambda reply: None)
    assert profile_draft(side(drafter, link), runner.hidden_size, lambda line: None) == {}


def test_an_engine_works_as_before_once_it_was_measured(runner: TargetRunner) -> None:
    drafter = tiny_drafter(runner)
    link = WatchedLink(drafter.engine(max_contexts=40))
    engine = tiny_engine(runner, drafter, link, verify_length=2)
    before = engine.generate([[5, 6, 7]], greedy_params(8))
    profile_verify(runner, engine.pool, lambda line: None)
    profile_draft(side(drafter, link), runner.hidden_size, lambda line: None)
    assert engine.generate([[5, 6, 7]], greedy_params(8)) == before
