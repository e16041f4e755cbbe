"""Greedy output with speculation is the target's own greedy output, at every verify length and with the scheduler.

A first difference fails, unless the reference's two best logits there are closer than 1e-3; at most 1 prompt in 64
may have such a near-tie.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from pathlib import Path

import pytest
import torch
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
from transformers import AutoModelForCausalLM

from engine.engine import DraftSide, Engine
from engine.loading import SHIPPED, load_draft_engine, load_target_side
from engine.local_link import LocalLink
from engine.settings import DrafterSettings, EngineSettings
from scheduler.costs import StepCosts
from scheduler.policy import safe_default
from scheduler.tiers import DEFAULT_TIERS

Tokens = list[list[int]]
NEAR = 1e-3
GAMMA = 4
SCHEDULER = None
# Stairs on which some drafts are free and others are not worth their step.
COSTS = StepCosts(
    tokens=(1, 16, 17, 40, 41, 64, 65, 160, 161, 400),
    seconds=(0.040, 0.042, 0.050, 0.052, 0.060, 0.064, 0.090, 0.110, 0.180, 0.300),
    draft_requests=(1, 64),
    draft_seconds=(0.003, 0.020),
)


def check_same(logits: Callable[[list[int]], torch.Tensor], prompts: Tokens, right: Tokens, ours: Tokens) -> None:
    """`logits` gives [T, V] of the reference after each token of a text."""
    ties = 0
    for prompt, a, b in zip(prompts, right, ours, strict=True):
        assert len(a) == len(b)
        at = next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)
        if at is None:
            continue
        first, second = logits([*prompt, *a[:at]])[-1].float().topk(2).values.tolist()
        assert first - second < NEAR, f"token {at} behind {prompt[-5:]} is {b[at]} and not {a[at]}"
        ties += 1
    assert ties * 64 <= len(prompts), f"{ties} near-ties in {len(prompts)} prompts"


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return tiny_target(tiny_llama(vocabulary=300))


@pytest.fixture(scope="module")
def drafter(target: TinyTarget) -> TinyDrafter:
    return tiny_drafter(target.runner, block_size=GAMMA)


PROMPTS = random_prompts(16, vocabulary=300)
LENGTH = 24


@pytest.fixture(scope="module")
def right(target: TinyTarget) -> Tokens:
    return [target.greedy(prompt, LENGTH) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def known(target: TinyTarget) -> dict[int, list[int]]:
    return continuations(target, PROMPTS, LENGTH, GAMMA)


@pytest.mark.parametrize("length", [*range(GAMMA + 1), SCHEDULER])
def test_tiny_target_with_drafts_that_are_often_right(
    target: TinyTarget, drafter: TinyDrafter, right: Tokens, known: dict[int, list[int]], length: int | None
) -> None:
    def propose(digest: int) -> list[int]:
        """The right tokens, but for one position in most blocks; at times one outside the vocabulary."""
        block, wrong = list(known[digest]), digest % (GAMMA + 2)
        if wrong < GAMMA:
            block[wrong] = (block[wrong] + 1 + digest % 7) % 305
        return block

    link = WatchedLink(ForcedDrafter(drafter.engine(), propose))
    engine = tiny_engine(target, drafter, link, verify_length=length, costs=COSTS)
    check_same(target.logits, PROMPTS, right, engine.generate(PROMPTS, greedy_params(LENGTH)))
    total = engine.log.total
    if length == SCHEDULER:
        assert 0.1 * GAMMA * total.rounds < total.verified < 0.9 * GAMMA * total.rounds
    if length != 0:
        assert total.accepted > 0.3 * total.verified > 0


@pytest.mark.parametrize("length", [GAMMA, SCHEDULER])
def test_tiny_target_with_its_random_drafter(
    target: TinyTarget, drafter: TinyDrafter, right: Tokens, length: int | None
) -> None:
    engine = tiny_engine(target, drafter, verify_length=length, costs=COSTS)
    check_same(target.logits, PROMPTS, right, engine.generate(PROMPTS, greedy_params(LENGTH)))
    assert engine.log.total.verified > 0


ASKED = (
    "What is {}?",
    "Explain {} to a child in two sentences.",
    "Write a short poem about {}.",
    "Give me three facts about {}.",
    "Write a Python function that has something to do with {}.",
    "Why should anybody care about {}?",
    "Continue the story: On a cold morning we came upon {}, and",
    "If one costs 3 dollars and I buy 7, what do I pay? It is about {}. Think step by step.",
)
ABOUT = ("the tides", "prime numbers", "a bicycle", "photosynthesis", "an old bridge", "sorting", "bread", "the moon")
REAL_LENGTH = 48


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_embedded_target_with_the_shipped_drafter(target_path: Path) -> None:
    """64 prompts of 48 tokens each, float32."""
    drafter_settings = DrafterSettings(checkpoint=str(SHIPPED))
    settings = EngineSettings(target=str(target_path), kv_memory_bytes=1 << 29, max_context=512, max_running=64)
    side = load_target_side(settings, drafter_settings, target_path.parent)
    drafting = load_draft_engine(settings, drafter_settings, target_path.parent)
    chats = [[{"role": "user", "content": ask.format(what)}] for ask, what in product(ASKED, ABOUT)]
    prompts = [
        side.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats
    ]
    assert len(prompts) == 64

    reference = AutoModelForCausalLM.from_pretrained(target_path, dtype=torch.float32).eval()
    own = TinyTarget(side.target, reference)
    right = [own.greedy(prompt, REAL_LENGTH) for prompt in prompts]

    gamma = side.drafter.block_size
    for length in (*range(gamma + 1), SCHEDULER):
        policy = safe_default(DEFAULT_TIERS, gamma, temperatures=side.temperatures, costs=COSTS)
        chosen = settings.model_copy(update={"verify_length": length})
        link = LocalLink(drafting)
        draft = DraftSide(side.fusion, side.weights, gamma, side.drafter.sliding_window, link)
        engine = Engine(side.target, side.tokenizer, chosen, DEFAULT_TIERS, policy, draft)
        check_same(own.logits, prompts, right, engine.generate(prompts, greedy_params(REAL_LENGTH)))
        total = engine.log.total
        if length != 0:
            assert total.accepted > 0.1 * total.rounds
        if length == SCHEDULER:
            assert 0 < total.verified < gamma * total.rounds
