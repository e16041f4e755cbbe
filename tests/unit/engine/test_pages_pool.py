"""The page pool: whole or nothing, and nothing lost."""

from __future__ import annotations

import pytest
import torch

from engine.pages import PAGE, KVShape, OutOfPages, PagePool

SHAPE = KVShape(layers=2, key_heads=3, head_dim=8)


def test_pages_are_taken_whole_or_not_at_all() -> None:
    pool = PagePool(SHAPE, 5)
    first = pool.take(3)
    assert len(set(first)) == 3 and pool.free == 2
    with pytest.raises(OutOfPages, match="3 pages wanted, 2 of 5 free"):
        pool.take(3)
    assert pool.free == 2
    assert pool.take(0) == []
    second = pool.take(2)
    assert not set(first) & set(second) and pool.free == 0
    pool.give_back(first)
    pool.give_back(second)
    assert pool.free == 5 and sorted(pool.take(5)) == [0, 1, 2, 3, 4]


def test_a_page_given_back_twice_is_noticed() -> None:
    pool = PagePool(SHAPE, 2)
    with pytest.raises(AssertionError, match="twice"):
        pool.give_back(pool.take(1) * 2)


def test_sizes() -> None:
    assert [PagePool.pages_for(n) for n in (0, 1, PAGE, PAGE + 1)] == [0, 1, 1, 2]
    pool = PagePool(SHAPE, 4)
    assert pool.keys[0].shape == (4, 3, 8, PAGE) and pool.values[1].shape == (4, 3, PAGE, 8)
    held = sum(t.numel() * t.element_size() for t in (*pool.keys, *pool.values))
    assert held == 4 * SHAPE.page_bytes
    assert KVShape(2, 3, 8, torch.bfloat16).page_bytes * 2 == SHAPE.page_bytes
    with pytest.raises(ValueError, match="at least one page, not 0"):
        PagePool(SHAPE, 0)
