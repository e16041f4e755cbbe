"""The step loop and its drafter: whatever happens to drafts costs speed at most, and never a token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_models import (
    ForcedDrafter,
    TinyDrafter,
    TinyTarget,
    WatchedLink,
    continuations,
    greedy_params,
    random_prompts,
    tiny_drafter,
    tiny_engine,
    tiny_llama,
    tiny_target,
)

from engine.engine import Engine
from engine.request import GenerationRequest, SamplingParams
from engine.rounds import DraftReply
from scheduler.costs import StepCosts

VOCABULARY = 16  # small, so that a random drafter is right now and then
TOKENS = 30
FREE_STEPS = StepCosts(tokens=(1, 100), seconds=(1.0, 1.0))
DEAR_TOKENS = StepCosts(tokens=(1, 100), seconds=(1.0, 300.0))


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return tiny_target(tiny_llama(vocabulary=VOCABULARY))


@pytest.fixture(scope="module")
def drafter(target: TinyTarget) -> TinyDrafter:
    return tiny_drafter(target.runner, draft_vocabulary=VOCABULARY)


PROMPTS = random_prompts(5, vocabulary=VOCABULARY)
PARAMS = [greedy_params(TOKENS)] * 3 + [SamplingParams(max_tokens=TOKENS, seed=s, ignore_eos=True) for s in (1, 2)]


@pytest.fixture(scope="module")
def plain(target: TinyTarget) -> list[list[int]]:
    """What the requests give without any drafter."""
    tokens = tiny_engine(target).generate(PROMPTS, PARAMS)
    assert tokens[0] == target.greedy(PROMPTS[0], TOKENS)
    return tokens


def begin(engine: Engine, count: int = len(PROMPTS), **changes: Any) -> None:
    for i in range(count):
        engine.add(GenerationRequest(f"r{i}", tuple(PROMPTS[i]), PARAMS[i], **changes))


def drain(engine: Engine, at_step: Callable[[int], None] = lambda step: None) -> list[list[int]]:
    """All tokens; `at_step` is called before each step with its number."""
    out: list[list[int]] = [[] for _ in PROMPTS]
    step = 0
    while engine.has_work:
        at_step(step)
        step += 1
        for chunk in engine.step():
            assert chunk.error is None
            out[int(chunk.request_id[1:])] += chunk.token_ids
    return out


@pytest.mark.parametrize("length", [1, 4, None])
def test_drafts_change_no_token_and_some_are_accepted(
    target: TinyTarget, drafter: TinyDrafter, plain: list[list[int]], length: int | None
) -> None:
    link = WatchedLink(drafter.engine())
    engine = tiny_engine(target, drafter, link, verify_length=length, costs=FREE_STEPS)
    begin(engine)
    assert drain(engine) == plain
    assert engine.log.total.accepted > 5
    assert link._drafter is not None and link._drafter.contexts == 0


def test_a_drafter_replaced_lost_and_back_again_loses_nothing(
    target: TinyTarget, drafter: TinyDrafter, plain: list[list[int]]
) -> None:
    link = WatchedLink(drafter.engine())
    other = tiny_drafter(target.runner, 5, draft_vocabulary=VOCABULARY)
    engine = tiny_engine(target, drafter, link, verify_length=3)
    begin(engine)
    drafted_at: dict[int, int] = {}

    def happen(step: int) -> None:
        drafted_at[step] = len(link.batches)
        if step == 4:
            link.replace(drafter.engine())
        elif step == 8:
            link.replace(None)
        elif step == 12:
            link.replace(other.engine())

    assert drain(engine, happen) == plain
    assert drafted_at[12] == drafted_at[8]  # nobody is there to be asked
    assert drafted_at[14] == drafted_at[12] + 2
    rounds = {reply.round for reply in link.replies if reply.sequence.size}
    # What the old ones had drafted is lost; the first round with a new one has drafts again.
    assert {1, 2, 3, 5, 6, 7, 13, 14} <= rounds and not {4, 8, 9, 10, 11, 12} & rounds
    # The new drafter was given all it needs: the whole text, or a window of it.
    window = drafter.config.sliding_window
    for batch in link.batches:
        if batch.round in (5, 13):
            assert (batch.feature_count == np.minimum(batch.committed - 1, window)).all()
    assert link._drafter is not None and link._drafter.contexts == 0


def test_fewer_contexts_than_requests(target: TinyTarget, drafter: TinyDrafter, plain: list[list[int]]) -> None:
    link = WatchedLink(drafter.engine(max_contexts=2))
    engine = tiny_engine(target, drafter, link, verify_length=4)
    begin(engine)
    assert drain(engine) == plain
    served = {int(n) for reply in link.replies for n in reply.sequence}
    assert max(len(reply.sequence) for reply in link.replies) == 2 and len(served) > 2
    assert any(reply.resync.size for reply in link.replies)
    assert link._drafter is not None and link._drafter.contexts == 0


def test_requests_that_opt_out_are_never_drafted(
    target: TinyTarget, drafter: TinyDrafter, plain: list[list[int]]
) -> None:
    link = WatchedLink(drafter.engine())
    engine = tiny_engine(target, drafter, link, verify_length=4)
    for i, prompt in enumerate(PROMPTS):
        engine.add(GenerationRequest(f"r{i}", tuple(prompt), PARAMS[i], speculation=i % 2 == 0))
    assert drain(engine) == plain
    assert link.drafted == {0, 2, 4}


def test_verify_length_0_sends_nothing(target: TinyTarget, drafter: TinyDrafter, plain: list[list[int]]) -> None:
    link = WatchedLink(drafter.engine())
    engine = tiny_engine(target, drafter, link, verify_length=0)
    begin(engine)
    assert drain(engine) == plain
    assert link.batches == [] and engine.log.total.verified == 0


def test_a_drafter_that_does_not_pay_is_only_probed(
    target: TinyTarget, drafter: TinyDrafter, plain: list[list[int]]
) -> None:
    link = WatchedLink(drafter.engine())
    engine = tiny_engine(target, drafter, link, costs=DEAR_TOKENS)
    engine.policy = engine.policy.model_copy(update={"probe_interval_steps": 8})
    begin(engine)
    assert drain(engine) == plain
    # While prompts are read, a step is long anyway and drafts are nearly free.
    asked = [batch for batch in link.batches if len(batch.sequence) and batch.round > 8]
    assert 2 <= len(asked) <= TOKENS // 8
    assert all(len(batch.sequence) == 1 for batch in asked)


CHANGES: dict[str, Callable[[DraftReply], DraftReply | None]] = {
    "late": lambda reply: None,
    "epoch": lambda reply: replace(reply, epoch=reply.epoch + 1),
    "committed": lambda reply: replace(reply, committed=reply.committed - 1),
    "sequence": lambda reply: replace(reply, sequence=reply.sequence + 100),
    "weights": lambda reply: replace(reply, weights="other"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_reply_that_does_not_fit_is_dropped(
    target: TinyTarget, drafter: TinyDrafter, plain: list[list[int]], name: str
) -> None:
    link = WatchedLink(drafter.engine(), CHANGES[name])
    engine = tiny_engine(target, drafter, link, verify_length=4)
    begin(engine)
    assert drain(engine) == plain
    total = engine.log.total
    asked = sum(batch.draft.any() for batch in link.batches)
    assert asked > TOKENS // 2
    assert total.verified == total.accepted == total.rounds == 0
    assert total.late == (asked if name == "late" else 0)
    assert total.mismatched == (asked if name == "weights" else 0)


def test_every_other_reply_is_late(target: TinyTarget, drafter: TinyDrafter, plain: list[list[int]]) -> None:
    """What was sent with a lost round is there all the same: the next round needs no resync."""
    link = WatchedLink(drafter.engine(), lambda reply: reply if reply.round % 2 else None)
    engine = tiny_engine(target, drafter, link, verify_length=4)
    begin(engine)
    assert drain(engine) == plain
    assert engine.log.total.late > 3 and engine.log.total.accepted > 3
    assert not any(reply.resync.size for reply in link.replies)


@pytest.mark.parametrize("shift", [VOCABULARY, -VOCABULARY, 10_000])
def test_drafts_outside_the_vocabulary_are_refused(
    target: TinyTarget, drafter: TinyDrafter, plain: list[list[int]], shift: int
) -> None:
    def outside(reply: DraftReply) -> DraftReply:
        return replace(reply, tokens=reply.tokens + np.int32(shift), q_ids=reply.q_ids + np.int32(shift))

    link = WatchedLink(drafter.engine(), outside)
    engine = tiny_engine(target, drafter, link, verify_length=4)
    begin(engine)
    assert drain(engine) == plain
    assert engine.log.total.verified > 100 and engine.log.total.accepted == 0
    sampled = engine.generate(PROMPTS, SamplingParams(max_tokens=10, ignore_eos=True))
    assert all(0 <= token < VOCABULARY for tokens in sampled for token in tokens)
    assert engine.log.total.accepted == 0


def test_a_wrong_token_in_a_block_drops_what_follows_it(target: TinyTarget, drafter: TinyDrafter) -> None:
    """Right, right, wrong, right: three tokens come of it, whatever the last one is."""
    known = continuations(target, PROMPTS[:1], 22, 4)

    def propose(digest: int) -> list[int]:
        right = known[digest]
        return [*right[:2], (right[2] + 1) % VOCABULARY, right[3]]

    engine = tiny_engine(target, drafter, WatchedLink(ForcedDrafter(drafter.engine(), propose)), verify_length=4)
    engine.add(GenerationRequest("r", tuple(PROMPTS[0]), greedy_params(22)))
    chunks = list(engine.run())
    assert [(len(c.token_ids), c.accepted, c.rejected) for c in chunks] == [(1, 0, 0)] + [(3, 2, 2)] * 6 + [(3, 2, 0)]
    assert [token for c in chunks for token in c.token_ids] == target.greedy(PROMPTS[0], 22)


def test_an_aborted_request_is_gone_within_one_step(target: TinyTarget, drafter: TinyDrafter) -> None:
    link = WatchedLink(drafter.engine())
    engine = tiny_engine(target, drafter, link, verify_length=4)
    begin(engine)
    for _ in range(4):
        engine.step()
    assert link._drafter is not None and link._drafter.contexts == 5
    free = engine.pool.free
    assert engine.abort("r1")
    assert engine.pool.free > free and engine.load()["default"] == (4, 0)
    assert "r1" not in {chunk.request_id for chunk in engine.step()}
    assert link._drafter.contexts == 4 and 1 not in link.batches[-1].sequence
    for i in (0, 2, 3, 4):
        engine.abort(f"r{i}")
    assert not engine.has_work and engine.pool.free == engine.pool.pages
    assert link._drafter.contexts == 0  # though no step is left to carry the news


def test_a_request_that_ends_while_its_context_is_to_be_sent_again_is_closed_too(
    target: TinyTarget, drafter: TinyDrafter
) -> None:
    """The drafter has begun a context for it when it noticed the gap."""
    link = WatchedLink(drafter.engine())
    engine = tiny_engine(target, drafter, link, verify_length=4)
    begin(engine, 2)
    engine.step()
    engine.step()
    assert link._drafter is not None
    link._drafter.forget("local")
    engine.step()  # sends three features or so: a gap
    assert link._drafter.contexts == 2
    sent = len(link.batches)
    engine._collect()  # the reply says resync
    engine._awaited = None
    engine.abort("r0")
    engine.abort("r1")
    assert len(link.batches) > sent and link._drafter.contexts == 0
