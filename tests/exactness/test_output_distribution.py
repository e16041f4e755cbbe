"""At temperature 1 the emitted tokens are distributed as the target's own, whatever the load and the budgets.

Each chi-square test compares the joint frequencies of the first three tokens of many requests with the exact
probabilities, enumerated over all prefixes. Level 1e-4: so often would a right engine fail on a new seed. (Seeds
are fixed, but a step's clock is real, so plans may differ from run to run.)
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_models import TinyDrafter, TinyTarget, WatchedLink, tiny_drafter, tiny_engine, tiny_llama, tiny_target

import engine.engine
from engine.engine import Engine
from engine.request import GenerationRequest, SamplingParams
from scheduler.costs import StepCosts
from scheduler.planner import Plan, plan_prefixes

LEVEL = 1e-4
VOCABULARY = 8
GAMMA = 3
PROMPT = (3, 1, 6, 2, 5)
PARAMS = SamplingParams(max_tokens=4, ignore_eos=True)
# A jagged staircase: at some loads many drafts are free, at others the first one is dear.
STAIRS = ((1, 8, 0.010), (9, 24, 0.012), (25, 64, 0.017), (65, 128, 0.026), (129, 256, 0.045), (257, 600, 0.090))
COSTS = StepCosts(
    tokens=tuple(n for first, last, _ in STAIRS for n in (first, last)),
    seconds=tuple(t for _, _, seconds in STAIRS for t in (seconds, seconds * 1.02)),
    draft_requests=(1, 128),
    draft_seconds=(0.001, 0.010),
)
TIERS = ("priority", "default", "flex")


@pytest.fixture(scope="module")
def target() -> TinyTarget:
    return tiny_target(tiny_llama(3, vocabulary=VOCABULARY, hidden=32, layers=2, spread=0.35), (0,))


def after_pairs(target: TinyTarget) -> torch.Tensor:
    """[V, V, 3, V] float64 log-probabilities after the prompt, and after each of two tokens behind it."""
    prefixes = [(*PROMPT, *pair) for pair in product(range(VOCABULARY), repeat=2)]
    with torch.inference_mode():
        logits = target.reference(torch.tensor(prefixes)).logits.double()
    return logits[:, len(PROMPT) - 1 :].log_softmax(-1).view(VOCABULARY, VOCABULARY, 3, VOCABULARY)


@pytest.fixture(scope="module")
def exact(target: TinyTarget) -> np.ndarray:
    """[V, V, V] probability of the first three tokens behind the prompt."""
    p = after_pairs(target).exp().numpy()
    joint = p[0, 0, 0][:, None, None] * p[:, 0, 1][:, :, None] * p[:, :, 2]
    assert joint.sum() == pytest.approx(1.0, abs=1e-9)
    return joint


@pytest.fixture
def drafter(target: TinyTarget) -> TinyDrafter:
    """Knows something of which token follows which, and never proposes the last one."""
    drafter = tiny_drafter(target.runner, 4, draft_vocabulary=VOCABULARY - 1, block_size=GAMMA)
    head = drafter.model.markov_head
    assert head is not None and drafter.config.markov_rank == VOCABULARY
    with torch.no_grad():
        head.markov_w1.weight.copy_(torch.eye(VOCABULARY))
        head.markov_w2.weight.copy_(after_pairs(target)[:, :, 2].mean(0)[:, :-1].T)
        drafter.model.norm.weight.mul_(0.3)
    return drafter


@dataclass(frozen=True)
class Samples:
    """Counts [V, V, V] of first tokens, and how often so many of so many decoding requests were drafted."""

    counts: np.ndarray
    drafted: Counter[tuple[int, int]]


def sample(served: Engine, link: WatchedLink, count: int, most: int = 120) -> Samples:
    """`count` requests, in bursts that let the load swing between 1 and about `most`."""
    rng = np.random.default_rng(0)
    counts = np.zeros((VOCABULARY,) * 3, np.int64)
    drafted: Counter[tuple[int, int]] = Counter()
    emitted: dict[str, list[int]] = {}
    begun = 0
    while begun < count or served.has_work:
        running = sum(r + w for r, w in served.load().values())
        burst = int(rng.choice([0, 0, 1, 6, 30, most], p=[0.3, 0.2, 0.2, 0.1, 0.1, 0.1])) if running < most // 3 else 0
        for _ in range(min(burst or (running == 0), count - begun)):
            tier = TIERS[int(rng.integers(3))]
            served.add(GenerationRequest(str(begun), PROMPT, PARAMS, tier))
            begun += 1
        for chunk in served.step():
            tokens = emitted.setdefault(chunk.request_id, [])
            tokens += chunk.token_ids
            if chunk.finish_reason is not None:
                counts[tuple(emitted.pop(chunk.request_id)[:3])] += 1
        decoding = sum(r for r, _ in served.load().values())
        for batch in link.batches:
            drafted[len(batch.sequence), decoding] += 1
        link.batches.clear()
        link.replies.clear()
    assert counts.sum() == count
    return Samples(counts, drafted)


def p_value(counts: np.ndarray, exact: np.ndarray) -> float:
    """Chi-square over cells that expect at least 10; the others together are one more."""
    expected = exact.ravel() * counts.sum()
    large = expected >= 10
    observed = np.append(counts.ravel()[large], counts.ravel()[~large].sum())
    return float(stats.chisquare(observed, np.append(expected[large], expected[~large].sum())).pvalue)


def check_load_dependent(target: TinyTarget, drafter: TinyDrafter, exact: np.ndarray, count: int) -> None:
    link = WatchedLink(drafter.engine(max_contexts=128))
    served = tiny_engine(target, drafter, link, costs=COSTS, max_running=128, prefill_tokens=512, random_seed=7)
    served.policy = served.policy.model_copy(update={"probe_interval_steps": 4})
    samples = sample(served, link, count)
    total = served.log.total
    # The conditions under which this says something: budgets between nothing and everything, and real refusals.
    assert 0.1 * GAMMA * total.rounds < total.verified < 0.6 * GAMMA * total.rounds
    assert 0.2 * total.verified < total.accepted < 0.9 * total.verified
    assert total.trials_at[1] > 0.01 * count
    some = sum(n for (asked, decoding), n in samples.drafted.items() if 0 < asked < decoding)
    everyone = sum(n for (asked, decoding), n in samples.drafted.items() if 0 < asked == decoding)
    assert min(some, everyone, total.steps - some - everyone) > 0.02 * total.steps
    assert p_value(samples.counts, exact) > LEVEL


def test_under_load_dependent_budgets_tokens_follow_the_target(
    target: TinyTarget, drafter: TinyDrafter, exact: np.ndarray
) -> None:
    check_load_dependent(target, drafter, exact, 12_000)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_200000_samples(target: TinyTarget, drafter: TinyDrafter, exact: np.ndarray) -> None:
    check_load_dependent(target, drafter, exact, 200_000)


def plant_confidences(drafter: TinyDrafter) -> None:
    """c_k is 0.9 if the token before is even and 0.0003 if it is odd, nothing else."""
    head = drafter.model.confidence_head
    assert head is not None
    even = torch.arange(VOCABULARY) % 2 == 0
    with torch.no_grad():  # the Markov embedding of a token is its unit vector
        head.proj.weight.zero_()
        head.proj.weight[0, drafter.config.hidden_size :] = torch.where(even, 2.2, -8.1)
        head.proj.bias.zero_()


def each_at_its_own_best(survival: np.ndarray, *_: object, limits: np.ndarray, **__: object) -> Plan:
    """Faulty: each request's length of the highest throughput, by confidences that read the drafted tokens.

    Steps of 1, 2, 3 tokens at 1.0, 0.5, 0.45 steps a second, as in the worked example: no first token pays for
    itself, but two do where the second one is likely.
    """
    value = 1.0 + np.concatenate((np.zeros((len(survival), 1)), np.cumsum(survival, axis=1)), axis=1)
    theta = value * np.array([1.0, 0.5, 0.45, 0.2])
    theta[np.arange(GAMMA + 1)[None, :] > limits[:, None]] = 0.0
    return Plan(theta.argmax(axis=1).astype(np.int64), 0.0, None)


@pytest.mark.parametrize("planner", [plan_prefixes, each_at_its_own_best])
def test_a_planner_that_looks_ahead_is_caught(
    target: TinyTarget, drafter: TinyDrafter, exact: np.ndarray, monkeypatch: pytest.MonkeyPatch, planner: object
) -> None:
    """The same drafts under the real planner pass, so it is the planner that fails."""
    plant_confidences(drafter)
    monkeypatch.setattr(engine.engine, "plan_prefixes", planner)
    link = WatchedLink(drafter.engine(max_contexts=128))
    served = tiny_engine(target, drafter, link, max_running=128, prefill_tokens=512, random_seed=7)
    counts = sample(served, link, 3000).counts
    assert served.log.total.verified > 500
    p = p_value(counts, exact)
    if planner is plan_prefixes:
        assert p > LEVEL
    else:
        assert p < LEVEL
        # By much: whole tokens are off by more than seven standard deviations.
        second, right = counts.sum(axis=(0, 2)), exact.sum(axis=(0, 2))
        worst = max(abs(n - 3000 * q) / math.sqrt(3000 * q * (1 - q)) for n, q in zip(second, right, strict=True))
        assert worst > 7
