"""A seed makes two identical requests give identical tokens, whatever else is being served (float32)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tiny_models import (
    WEIGHTS,
    TinyDrafter,
    TinyTarget,
    WatchedLink,
    random_prompts,
    tiny_drafter,
    tiny_engine,
    tiny_llama,
    tiny_target,
)

from engine.drafting import DraftEngine
from engine.engine import Engine
from engine.request import GenerationRequest, SamplingParams
from engine.rounds import DraftBatch, DraftReply
from scheduler.costs import StepCosts

VOCABULARY = 16
TOKENS = 24
PROMPTS = random_prompts(4, 3, vocabulary=VOCABULARY)
COSTS = StepCosts(tokens=(1, 8, 9, 24, 25, 100), seconds=(1.0, 1.01, 1.5, 1.52, 2.4, 5.0))


def seeded(**changes: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": TOKENS, "ignore_eos": True, "seed": 1, **changes})


WANTED = [
    seeded(),
    seeded(seed=2, temperature=0.7),
    seeded(seed=2**64 - 1, top_p=0.8),
    seeded(seed=-3, top_k=4, temperature=1.3),
]


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return tiny_target(tiny_llama(vocabulary=VOCABULARY))


@pytest.fixture(scope="module")
def drafter(target: TinyTarget) -> TinyDrafter:
    return tiny_drafter(target.runner, draft_vocabulary=VOCABULARY)


@pytest.fixture(scope="module")
def alone(target: TinyTarget) -> list[list[int]]:
    """Each request by itself, without a drafter."""
    engine = tiny_engine(target, random_seed=0)
    return [engine.generate([p], params)[0] for p, params in zip(PROMPTS, WANTED, strict=True)]


def in_a_crowd(engine: Engine, seed: int, events: dict[int, Any] | None = None) -> list[list[list[int]]]:
    """Every wanted request twice, at different times, among others that come and go at random."""
    rng = np.random.default_rng(seed)
    others = random_prompts(60, seed, vocabulary=VOCABULARY)
    out: dict[str, list[int]] = {}
    step = 0
    while engine.has_work or step < 20:
        (events or {}).get(step, lambda: None)()
        for i, (prompt, params) in enumerate(zip(PROMPTS, WANTED, strict=True)):
            if step in (2 * i, 7 + i):
                engine.add(GenerationRequest(f"wanted-{i}-{step}", tuple(prompt), params))
        for _ in range(int(rng.integers(0, 4)) if step < 20 else 0):
            other = SamplingParams(max_tokens=int(rng.integers(1, 20)), temperature=float(rng.choice([0.0, 1.0])))
            tier = str(rng.choice(["priority", "default", "flex"]))
            engine.add(GenerationRequest(f"other-{step}-{len(others)}", tuple(others.pop()), other, tier))
        for chunk in engine.step():
            out.setdefault(chunk.request_id, []).extend(chunk.token_ids)
        step += 1
    return [[tokens for name, tokens in out.items() if name.startswith(f"wanted-{i}-")] for i in range(len(WANTED))]


@pytest.mark.parametrize("length", [0, 1, 4, None])
def test_seeded_requests_do_not_depend_on_their_company(
    target: TinyTarget, drafter: TinyDrafter, alone: list[list[int]], length: int | None
) -> None:
    engine = tiny_engine(target, drafter, verify_length=length, costs=COSTS, max_running=12, random_seed=length)
    assert in_a_crowd(engine, seed=length or 9) == [[tokens, tokens] for tokens in alone]
    if length != 0:
        assert engine.log.total.accepted > 10


def test_nor_on_drafters_that_come_and_go(target: TinyTarget, drafter: TinyDrafter, alone: list[list[int]]) -> None:
    other = tiny_drafter(target.runner, 8, draft_vocabulary=VOCABULARY - 3)
    link = WatchedLink(None)
    engine = tiny_engine(target, drafter, link, verify_length=3, max_running=30)
    events = {
        3: lambda: link.replace(drafter.engine(max_contexts=3)),
        10: lambda: link.replace(None),
        13: lambda: link.replace(other.engine()),
    }
    assert in_a_crowd(engine, 5, events) == [[tokens, tokens] for tokens in alone]
    assert len(link.drafted) > 10


def test_other_seeds_and_other_positions_give_other_tokens(target: TinyTarget) -> None:
    engine = tiny_engine(target)
    texts = engine.generate([PROMPTS[0]] * 20, [seeded(seed=s) for s in range(20)])
    assert len({tuple(t) for t in texts}) == 20
    assert len({t[0] for t in texts}) > 2
    assert len(set(texts[0])) > 2


class OutOfStep(DraftEngine):
    """Draws its noise at keys that are not the verifier's."""

    def draft(self, owner: str, batch: DraftBatch) -> DraftReply:
        return super().draft(owner, replace(batch, key=batch.key + np.uint64(1000)))


def test_both_sides_draw_the_same_noise(target: TinyTarget, drafter: TinyDrafter) -> None:
    """Drafts agree far more often than independent samples of the same distributions would."""
    share = []
    for kind in (DraftEngine, OutOfStep):
        link = WatchedLink(kind(drafter.model, WEIGHTS, candidates=16))
        engine = tiny_engine(target, drafter, link, verify_length=1, max_running=32)
        engine.generate([PROMPTS[0]] * 20, [seeded(seed=s) for s in range(20)])
        share.append(engine.log.total.accepted / engine.log.total.verified)
    assert share[0] > 2 * share[1]
