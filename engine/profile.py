"""What steps and drafts cost on this machine: measured once at start, on made-up tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import numpy as np
import torch

from engine.engine import DraftSide
from engine.pages import PagePool
from engine.rounds import DraftBatch
from engine.target import StepInput, TargetRunner, places_of

CONTEXT = 256
VERIFY_TOKENS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)
DRAFT_REQUESTS = (1, 2, 4, 8, 16, 32)
RUNS = 5

Progress = Callable[[str], None]


def profile_verify(target: TargetRunner, pool: PagePool, progress: Progress) -> dict[int, list[float]]:
    """Seconds of steps by their tokens, at a context of 256 positions: up to 4 tokens a request.

    The pool's free pages are borrowed and given back; shapes that do not fit are left out.
    """
    seconds: dict[int, list[float]] = {}
    for tokens in VERIFY_TOKENS:
        each = min(4, tokens)
        counts = [each] * (tokens // each) + ([tokens % each] if tokens % each else [])
        pages = PagePool.pages_for(CONTEXT + each)
        if pages * len(counts) > pool.free:
            break
        tables = [pool.take(pages) for _ in counts]
        places = places_of(tables, [CONTEXT] * len(counts), counts)
        step = StepInput(torch.arange(tokens) % target.vocab_size, places, pool, torch.arange(tokens))
        try:
            target.forward(step)
            runs = []
            for _ in range(RUNS if tokens <= 64 else 3):
                began = time.perf_counter()
                target.forward(step)
                runs.append(time.perf_counter() - began)
        finally:
            for table in tables:
                pool.give_back(table)
        seconds[tokens] = runs
        progress(f"a step of {tokens} tokens takes {sorted(runs)[len(runs) // 2] * 1000:.1f} ms")
    return seconds


def profile_draft(draft: DraftSide, hidden_size: int, progress: Progress) -> dict[int, list[float]]:
    """Seconds from sending a batch to having its reply, by the number of requests; {} if no reply comes."""
    seconds: dict[int, list[float]] = {}
    for requests in DRAFT_REQUESTS:
        rounds = _rounds(requests, draft, hidden_size)
        runs = []
        for batch in rounds:
            began = time.perf_counter()
            draft.link.submit(batch)
            if draft.link.collect(batch.round, 10.0) is None:
                return seconds
            runs.append(time.perf_counter() - began)
        draft.link.submit(next(_rounds(requests, draft, hidden_size, closing=True)))
        seconds[requests] = runs[1:]
        progress(f"drafting for {requests} requests takes {sorted(runs)[len(runs) // 2] * 1000:.1f} ms")
    return seconds


def _rounds(requests: int, draft: DraftSide, hidden_size: int, closing: bool = False) -> Iterator[DraftBatch]:
    """A first round that fills the contexts, then rounds of three more tokens; or one that frees them.

    Negative sequence numbers cannot clash with an engine's.
    """
    numbers = -np.arange(1, requests + 1, dtype=np.int64)
    count, end = 0 if closing else requests, 0
    rng = np.random.default_rng(0)
    for index in range(1 if closing else RUNS + 1):
        new = draft.window if index == 0 else 3
        features = rng.standard_normal((count * new, hidden_size)).astype(np.float16)
        yield DraftBatch(
            round=-1 - index,
            weights=draft.weights,
            closed=numbers if closing else numbers[:0],
            sequence=numbers[:count],
            epoch=np.zeros(count, np.int32),
            committed=np.full(count, end + new + 1, np.int32),
            prefix=np.zeros(count, np.uint64),
            anchor=np.ones(count, np.int32),
            draft=np.ones(count, np.bool_),
            temperature=np.zeros(count, np.float32),
            coupled=np.zeros(count, np.bool_),
            key=np.zeros(count, np.uint64),
            feature_start=np.full(count, end, np.int32),
            feature_count=np.full(count, new, np.int32),
            features=features,
        )
        end += new
