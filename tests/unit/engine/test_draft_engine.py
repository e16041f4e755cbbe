"""The drafter's side alone: bounded contexts, gaps, and that tokens are drawn from the distribution it reports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from tiny_models import WEIGHTS, TinyDrafter, tiny_drafter, tiny_llama

from engine.drafting import DraftEngine
from engine.noise import gumbel
from engine.rounds import DraftBatch, DraftReply
from engine.target import TargetRunner

WINDOW = 32
FEATURES = torch.randn(200, 64, generator=torch.Generator().manual_seed(0)).half().numpy()


@pytest.fixture(scope="module")
def drafter() -> TinyDrafter:
    return tiny_drafter(TargetRunner(tiny_llama(), (0, 1)), window=WINDOW)


def batch(parts: dict[int, tuple[int, int]], *, closed: tuple[int, ...] = (), **changes: Any) -> DraftBatch:
    """Entries by sequence number: features of positions [start, end) are sent, the anchor is at `end`."""
    count = len(parts)
    starts = np.array([a for a, _ in parts.values()], np.int32)
    ends = np.array([b for _, b in parts.values()], np.int32)
    fields: dict[str, Any] = {
        "round": 1,
        "weights": WEIGHTS,
        "closed": np.array(closed, np.int64),
        "sequence": np.array(list(parts), np.int64),
        "epoch": np.zeros(count, np.int32),
        "committed": ends + 1,
        "prefix": np.zeros(count, np.uint64),
        "anchor": np.full(count, 7, np.int32),
        "draft": np.ones(count, np.bool_),
        "temperature": np.ones(count, np.float32),
        "coupled": np.zeros(count, np.bool_),
        "key": np.array(list(parts), np.uint64) * 977,
        "feature_start": starts,
        "feature_count": ends - starts,
        "features": np.concatenate([FEATURES[a:b] for a, b in parts.values()] or [FEATURES[:0]]),
    }
    return DraftBatch(**(fields | changes))


def same(a: DraftReply, b: DraftReply) -> None:
    assert np.array_equal(a.tokens, b.tokens) and np.array_equal(a.q_ids, b.q_ids)
    np.testing.assert_allclose(a.q_probs, b.q_probs, atol=1e-5)
    np.testing.assert_allclose(a.confidence, b.confidence, atol=1e-4)


def test_a_context_grown_in_pieces_is_the_context_sent_at_once(drafter: TinyDrafter) -> None:
    grown = drafter.engine()
    for start, end in ((0, 5), (5, 6), (6, 31), (31, 33), (33, 90), (90, 100)):
        reply = grown.draft("v", batch({3: (start, end)}))
        assert reply.resync.size == 0 and reply.committed.tolist() == [end + 1]
    same(reply, drafter.engine().draft("v", batch({3: (100 - WINDOW, 100)})))
    same(reply, drafter.engine().draft("v", batch({3: (0, 100)})))
    before = drafter.engine().draft("v", batch({3: (0, 99)}))
    assert not np.array_equal(before.q_probs, reply.q_probs)


def test_blocks_do_not_depend_on_the_rest_of_the_batch(drafter: TinyDrafter) -> None:
    parts = {1: (0, 20), 2: (0, 60), 3: (0, 1), 4: (0, 33)}
    together = drafter.engine().draft("v", batch(parts))
    assert together.sequence.tolist() == [1, 2, 3, 4]
    for i, (number, part) in enumerate(parts.items()):
        alone = drafter.engine().draft("v", batch({number: part}))
        assert np.array_equal(alone.tokens[0], together.tokens[i])
        np.testing.assert_allclose(alone.q_probs[0], together.q_probs[i], atol=1e-5)


def test_a_gap_is_answered_by_a_call_for_the_features_and_healed_by_them(drafter: TinyDrafter) -> None:
    engine, whole = drafter.engine(), drafter.engine().draft("v", batch({1: (0, 50)}))
    engine.draft("v", batch({1: (0, 40)}))
    lost = engine.draft("v", batch({1: (45, 50)}))
    assert lost.resync.tolist() == [1] and lost.sequence.size == 0 and lost.tokens.shape == (0, 4)
    same(engine.draft("v", batch({1: (50 - WINDOW, 50)})), whole)


def test_the_least_recently_used_context_goes_first_and_can_come_back(drafter: TinyDrafter) -> None:
    engine = drafter.engine(max_contexts=2)
    engine.draft("v", batch({1: (0, 10), 2: (0, 10)}))
    engine.draft("v", batch({1: (10, 11)}))
    engine.draft("v", batch({3: (0, 10)}))  # 2 has to go
    assert engine.contexts == 2
    assert engine.draft("v", batch({1: (11, 12)})).sequence.tolist() == [1]
    assert engine.draft("v", batch({2: (10, 11)})).resync.tolist() == [2]  # and takes the place of 3
    again = engine.draft("v", batch({2: (0, 11)}))
    same(again, drafter.engine().draft("v", batch({2: (0, 11)})))


def test_a_batch_beyond_the_contexts_is_served_as_far_as_they_go(drafter: TinyDrafter) -> None:
    engine = drafter.engine(max_contexts=3)
    parts = {n: (0, 10 + n) for n in range(5)}
    reply = engine.draft("v", batch(parts))
    assert reply.sequence.tolist() == [0, 1, 2] and reply.resync.tolist() == [3, 4]
    for i in range(3):
        alone = drafter.engine().draft("v", batch({i: parts[i]}))
        assert np.array_equal(reply.tokens[i], alone.tokens[0])
    left = {0: (10, 11), 2: (12, 13), 3: (0, 14), 4: (0, 15)}
    reply = engine.draft("v", batch(left, closed=(1,)))
    assert reply.sequence.tolist() == [0, 2, 3] and reply.resync.tolist() == [4]


def test_closed_and_forgotten_contexts_are_freed_and_owners_kept_apart(drafter: TinyDrafter) -> None:
    engine = drafter.engine()
    engine.draft("a", batch({1: (0, 10), 2: (0, 12)}))
    engine.draft("b", batch({1: (0, 20)}))
    assert engine.contexts == 3
    assert engine.draft("a", batch({1: (10, 11)})).sequence.tolist() == [1]
    engine.draft("a", batch({}, closed=(1, 77)))
    assert engine.contexts == 2
    assert engine.draft("b", batch({1: (20, 21)})).sequence.tolist() == [1]
    engine.forget("a")
    assert engine.contexts == 1
    assert engine.draft("a", batch({2: (12, 13)})).resync.tolist() == [2]


def test_features_of_other_weights_are_not_taken_in(drafter: TinyDrafter) -> None:
    engine = drafter.engine()
    reply = engine.draft("v", batch({1: (0, 10)}, weights="other"))
    assert reply.weights == WEIGHTS and reply.sequence.size == 0
    assert engine.contexts == 0


def test_an_entry_that_wants_no_block_only_grows_its_context(drafter: TinyDrafter) -> None:
    engine = drafter.engine()
    reply = engine.draft("v", batch({1: (0, 10), 2: (0, 10)}, draft=np.array([False, True])))
    assert reply.sequence.tolist() == [2] and reply.resync.size == 0
    assert engine.draft("v", batch({1: (10, 11)})).sequence.tolist() == [1]


def test_greedy_blocks_are_the_first_candidates_with_certainty(drafter: TinyDrafter) -> None:
    reply = drafter.engine().draft("v", batch({1: (0, 20)}, temperature=np.zeros(1, np.float32)))
    assert np.array_equal(reply.tokens, reply.q_ids[:, :, 0])
    assert np.array_equal(reply.q_probs[:, :, 0], np.ones((1, 4))) and reply.q_probs.sum() == 4


def sampled(engine: DraftEngine, count: int, **changes: Any) -> DraftReply:
    """`count` blocks from one and the same context, each with a key of its own."""
    fields = {"temperature": np.full(count, 0.9, np.float32), "key": np.arange(1, count + 1, dtype=np.uint64) * 977}
    return engine.draft("v", batch({n: (0, 12) for n in range(count)}, **(fields | changes)))


def test_tokens_are_drawn_from_the_distributions_that_are_sent(drafter: TinyDrafter) -> None:
    """Chi-square of first tokens, and of second tokens after the commonest first one; level 1e-4 each."""
    engine = drafter.engine(max_contexts=3000, candidates=6)
    reply = sampled(engine, 3000)
    np.testing.assert_allclose(reply.q_probs.sum(-1), 1.0, atol=1e-6)
    assert reply.q_probs.dtype == np.float32
    ids, q = reply.q_ids[0, 0], reply.q_probs[0, 0].astype(np.float64)
    assert (reply.q_ids[:, 0] == ids).all()
    assert q.max() < 0.9  # else there is nothing to see
    counts = np.array([(reply.tokens[:, 0] == token).sum() for token in ids])
    assert counts.sum() == 3000
    assert stats.chisquare(counts, q / q.sum() * 3000).pvalue > 1e-4
    rows = np.flatnonzero(reply.tokens[:, 0] == ids[0])
    ids, q = reply.q_ids[rows[0], 1], reply.q_probs[rows[0], 1].astype(np.float64)
    counts = np.array([(reply.tokens[rows, 1] == token).sum() for token in ids])
    kept = q * len(rows) > 5
    expected = np.append(q[kept], q[~kept].sum() + 1e-12) / q.sum() * len(rows)
    assert stats.chisquare(np.append(counts[kept], counts[~kept].sum()), expected).pvalue > 1e-4


def test_coupled_blocks_follow_the_noise_of_the_target_token_ids(drafter: TinyDrafter) -> None:
    engine = drafter.engine()
    keys = np.array([5, 2**64 - 1, 12345], np.uint64)
    reply = sampled(engine, 3, key=keys, coupled=np.ones(3, np.bool_))
    for r, key in enumerate(keys.tolist()):
        for slot in range(4):
            ids = reply.q_ids[r, slot]
            noise = gumbel(key, 13 + slot, ids)  # 13 tokens are committed: the first draft is at position 13
            scores = np.log(reply.q_probs[r, slot].astype(np.float64)) + noise
            assert reply.tokens[r, slot] == ids[int(np.argmax(scores))]


def test_a_confidence_reads_the_tokens_before_it_only(drafter: TinyDrafter) -> None:
    reply = sampled(drafter.engine(max_contexts=300), 300)
    assert len(np.unique(reply.confidence[:, 0])) == 1
    seen: dict[int, float] = {}
    for tokens, confidence in zip(reply.tokens, reply.confidence, strict=True):
        assert seen.setdefault(int(tokens[0]), float(confidence[1])) == pytest.approx(float(confidence[1]), abs=1e-5)
    assert len(seen) > 1 and len(set(seen.values())) > 1
