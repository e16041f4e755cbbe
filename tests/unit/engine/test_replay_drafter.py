"""The replay drafter around a real drafter: how often it is right, what it says about it, what it does not know."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import rankdata

from engine.drafters.config import DSparkConfig
from engine.drafters.dspark import DSparkDrafter
from engine.drafters.replay import WRONG, ReplayDrafter
from engine.drafting import DraftEngine
from engine.rounds import DraftBatch, DraftReply

VOCABULARY, DRAFTED, GAMMA, HIDDEN, K = 40, 20, 7, 16, 8
ROWS, BATCHES = 500, 60  # 30,000 blocks
WEIGHTS = "tiny"


def small_drafter() -> DraftEngine:
    torch.manual_seed(0)
    config = DSparkConfig(
        hidden_size=HIDDEN,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        intermediate_size=24,
        vocab_size=VOCABULARY,
        draft_vocab_size=DRAFTED,
        target_layer_ids=(1, 3),
        num_target_layers=6,
        block_size=GAMMA,
        mask_token_id=0,
        markov_rank=4,
        sliding_window=32,
    )
    ids = torch.arange(DRAFTED) * 2
    table = torch.randn(VOCABULARY, HIDDEN)
    return DraftEngine(DSparkDrafter(config, table, table[ids], ids), WEIGHTS, candidates=K, max_contexts=ROWS)


def batch_of(prefixes: list[int], round: int = 1) -> DraftBatch:
    """A first round: every sequence has two committed tokens, and the features of the first."""
    count = len(prefixes)
    return DraftBatch(
        round=round,
        weights=WEIGHTS,
        closed=np.arange(count, dtype=np.int64),
        sequence=np.arange(count, dtype=np.int64),
        epoch=np.zeros(count, np.int32),
        committed=np.full(count, 2, np.int32),
        prefix=np.array(prefixes, np.uint64),
        anchor=np.ones(count, np.int32),
        draft=np.ones(count, np.bool_),
        temperature=np.zeros(count, np.float32),
        coupled=np.zeros(count, np.bool_),
        key=np.zeros(count, np.uint64),
        feature_start=np.zeros(count, np.int32),
        feature_count=np.ones(count, np.int32),
        features=np.ones((count, HIDDEN), np.float16),
    )


RNG = np.random.default_rng(5)
# What follows each of ROWS prefixes; the ends of the vocabulary are among the tokens.
TRUE = RNG.integers(0, VOCABULARY, (ROWS, GAMMA + 2))
TRUE[0], TRUE[1] = 0, VOCABULARY - 1
RECORDING = {i: row.tolist() for i, row in enumerate(TRUE)}


def drawn(mean: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, whether each is the recorded one, and confidences in 0..1, all [blocks, gamma]."""
    drafter = ReplayDrafter(small_drafter(), RECORDING, mean, seed=11)
    replies = [drafter.draft("verifier", batch_of(list(range(ROWS)), round)) for round in range(BATCHES)]
    assert drafter.missed == 0
    tokens = np.concatenate([reply.tokens for reply in replies])
    confidence = np.concatenate([1 / (1 + np.exp(-reply.confidence.astype(np.float64))) for reply in replies])
    return tokens, tokens == np.tile(TRUE[:, :GAMMA], (BATCHES, 1)), confidence


@pytest.fixture(scope="module")
def at_85() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return drawn(0.85)


def test_acceptance_at_each_position_given_those_before_is_the_stated_mean(at_85: tuple[np.ndarray, ...]) -> None:
    _, right, _ = at_85
    reached = np.ones(len(right), np.bool_)
    for k in range(GAMMA):
        # 30,000 trials at the first position, 11,000 at the last: standard errors of 0.2 % and 0.34 %.
        assert right[reached, k].mean() == pytest.approx(0.85, abs=0.01)
        reached &= right[:, k]
    accepted = np.cumprod(right, axis=1).sum(axis=1)
    assert accepted.mean() == pytest.approx(sum(0.85**k for k in range(1, GAMMA + 1)), rel=0.01)


def test_confidences_are_calibrated(at_85: tuple[np.ndarray, ...]) -> None:
    """210,000 trials in 20 bins: a perfect predictor's expected calibration error is about 0.3 %."""
    _, right, confidence = at_85
    assert confidence.mean() == pytest.approx(0.85, abs=0.005)
    bins = np.minimum((confidence * 20).astype(int), 19).ravel()
    hits, told = right.ravel(), confidence.ravel()
    gaps = [abs(hits[bins == b].sum() - told[bins == b].sum()) for b in range(20)]
    assert sum(gaps) / hits.size < 0.006


@pytest.mark.parametrize(("mean", "expected"), [(0.5, 0.808), (0.7, 0.826), (0.85, 0.872), (0.9, 0.900)])
def test_confidence_tells_accepted_from_refused_as_well_as_a_real_head(mean: float, expected: float) -> None:
    _, right, confidence = drawn(mean)
    hit = right.ravel()
    ranks = rankdata(confidence.ravel())
    positives, negatives = hit.sum(), (~hit).sum()
    area = (ranks[hit].sum() - positives * (positives + 1) / 2) / (positives * negatives)
    assert area == pytest.approx(expected, abs=0.005)
    assert 0.80 < area < 0.905


def test_wrong_tokens_are_other_tokens_of_the_vocabulary(at_85: tuple[np.ndarray, ...]) -> None:
    tokens, right, _ = at_85
    assert tokens.min() >= 0 and tokens.max() < VOCABULARY
    # Both ends of the vocabulary were drafted wrongly somewhere, and to something else.
    blocks = np.arange(len(tokens)) % ROWS
    for row in (0, 1):
        assert (~right[blocks == row]).any()


def test_the_proposal_is_a_point_mass_on_the_token() -> None:
    reply = ReplayDrafter(small_drafter(), RECORDING, 0.6).draft("verifier", batch_of([3, 4]))
    assert reply.q_ids.shape == reply.q_probs.shape and reply.q_ids.shape[:2] == (2, GAMMA)
    assert (reply.q_ids[:, :, 0] == reply.tokens).all()
    assert (reply.q_probs[:, :, 0] == 1).all() and (reply.q_probs[:, :, 1:] == 0).all()


def reply_of_wrapped(prefixes: list[int]) -> DraftReply:
    return small_drafter().draft("verifier", batch_of(prefixes))


def test_unknown_prefixes_are_counted_and_keep_what_the_drafter_drafted() -> None:
    drafter = ReplayDrafter(small_drafter(), RECORDING, 0.85)
    prefixes = [5, 10**6, 6, 10**7]
    reply = drafter.draft("verifier", batch_of(prefixes))
    assert drafter.missed == 2
    wrapped = reply_of_wrapped(prefixes)
    assert (reply.tokens[[1, 3]] == wrapped.tokens[[1, 3]]).all()
    np.testing.assert_allclose(1 / (1 + np.exp(-reply.confidence[[1, 3]])), WRONG, rtol=1e-5)
    drafter.draft("verifier", batch_of([10**8], round=2))
    assert drafter.missed == 3


def test_behind_the_end_of_a_recording_nothing_is_replayed() -> None:
    drafter = ReplayDrafter(small_drafter(), {9: [7, 7]}, 0.85)
    reply = drafter.draft("verifier", batch_of([9]))
    assert drafter.missed == 0  # it was found, it only ends
    assert (reply.tokens[0, 2:] == reply_of_wrapped([9]).tokens[0, 2:]).all()
    np.testing.assert_allclose(1 / (1 + np.exp(-reply.confidence[0, 2:])), WRONG, rtol=1e-5)


def test_what_is_not_replayed_is_the_wrapped_drafters() -> None:
    drafter = ReplayDrafter(small_drafter(), RECORDING, 0.85)
    assert drafter.block_size == GAMMA
    batch = batch_of([1, 2, 3])
    behind = DraftBatch(
        **{**vars(batch), "feature_count": np.array([1, 0, 1], np.int32), "features": batch.features[:2]}
    )
    reply = drafter.draft("verifier", behind)
    assert reply.sequence.tolist() == [0, 2]
    assert reply.resync.tolist() == [1]
    assert (reply.round, reply.weights) == (1, WEIGHTS)
    drafter.forget("verifier")
    again = DraftBatch(**{**vars(batch), "feature_count": np.zeros(3, np.int32), "features": batch.features[:0]})
    assert drafter.draft("verifier", again).resync.tolist() == [0, 1, 2]
