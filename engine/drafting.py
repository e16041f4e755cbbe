"""The drafter's side of a round: bounded contexts of many sequences, and one block for each that asks."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from engine.drafters.backbone import backbone_of
from engine.drafters.dspark import DSparkDrafter
from engine.noise import gumbel, uniforms
from engine.rounds import F32, I32, I64, DraftBatch, DraftReply


class Drafter(Protocol):
    """What answers a verifier's batches."""

    @property
    def block_size(self) -> int:
        """gamma, draft tokens in a block."""
        ...

    def draft(self, owner: str, batch: DraftBatch) -> DraftReply:
        """Extend contexts and draft blocks; `owner` names the verifier that numbers the sequences."""
        ...

    def forget(self, owner: str) -> None:
        """Free all contexts of a verifier that has gone."""
        ...


@dataclass
class _Context:
    """Where one sequence's context lies, and up to which position it reaches."""

    slot: int
    end: int = 0


@dataclass(frozen=True)
class Blocks:
    """R drafted blocks, in the layout of `DraftReply`."""

    tokens: I32
    confidence: F32
    q_ids: I32
    q_probs: F32


class DraftEngine:
    """Drafts with a DSpark model over bounded contexts (see `engine.drafters.backbone`).

    The work of a block does not depend on what it drafts: no early stop, fixed row sizes.

    Args:
        model: the drafter.
        weights: hash of its checkpoint; batches made with another are refused by an empty reply.
        candidates: K, size of the truncated proposal that is really sampled from.
        max_contexts: contexts held; the least recently used goes first and is asked for again when needed. What
            a batch has beyond them is not drafted.
        clock: seconds.
    """

    def __init__(
        self,
        model: DSparkDrafter,
        weights: str,
        candidates: int = 32,
        max_contexts: int = 256,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        config = model.config
        self._model = model
        self._weights = weights
        self._candidates = min(candidates, config.draft_vocab_size)
        self._window = config.sliding_window
        self._clock = clock
        self._device = model.embedding.device
        self._backbone = backbone_of(model, max_contexts)
        self._contexts: OrderedDict[tuple[str, int], _Context] = OrderedDict()
        self._free = list(range(max_contexts))
        self._draft_ids = model.draft_ids

    @property
    def block_size(self) -> int:
        """gamma."""
        return self._model.config.block_size

    @property
    def contexts(self) -> int:
        """Contexts held."""
        return len(self._contexts)

    def forget(self, owner: str) -> None:
        """Free all contexts of a verifier."""
        for key in [k for k in self._contexts if k[0] == owner]:
            self._drop(key)

    def _drop(self, key: tuple[str, int]) -> None:
        context = self._contexts.pop(key, None)
        if context is not None:
            self._free.append(context.slot)

    def _tensor(self, array: np.typing.NDArray[Any]) -> torch.Tensor:
        return torch.from_numpy(array).to(self._device)

    def _context(self, key: tuple[str, int], in_use: set[tuple[str, int]]) -> _Context | None:
        """The context of a sequence, made if need be; None if all are `in_use` by the batch at hand."""
        context = self._contexts.get(key)
        if context is None:
            if not self._free:
                oldest = next((k for k in self._contexts if k not in in_use), None)
                if oldest is None:
                    return None
                self._drop(oldest)
            context = self._contexts[key] = _Context(self._free.pop())
        self._contexts.move_to_end(key)
        return context

    @torch.inference_mode()
    def draft(self, owner: str, batch: DraftBatch) -> DraftReply:
        """One round: free closed contexts, take the new features in, draft where asked.

        Returns:
            blocks of the entries that want one and whose context reaches their anchor; the others that want
            one are listed in `resync`.
        """
        began = self._clock()
        for number in batch.closed.tolist():
            self._drop((owner, number))
        fits = batch.weights == self._weights
        ready = self._extend(owner, batch) if fits else np.zeros(len(batch.sequence), np.bool_)
        rows = np.flatnonzero(ready & batch.draft)
        blocks = self._blocks(owner, batch, rows)
        missing: I64 = batch.sequence[batch.draft & ~ready]
        return DraftReply(
            round=batch.round,
            weights=self._weights,
            sequence=batch.sequence[rows],
            epoch=batch.epoch[rows],
            committed=batch.committed[rows],
            tokens=blocks.tokens,
            confidence=blocks.confidence,
            q_ids=blocks.q_ids,
            q_probs=blocks.q_probs,
            resync=missing,
            seconds=self._clock() - began,
        )

    def _extend(self, owner: str, batch: DraftBatch) -> np.typing.NDArray[np.bool_]:
        """Take features in; [R] whether each context now reaches the position before its anchor."""
        ready = np.zeros(len(batch.sequence), np.bool_)
        taken: list[tuple[int, int, int, int]] = []  # slot, first position, first row, count
        offsets = np.concatenate(([0], np.cumsum(batch.feature_count)))
        in_use = {(owner, number) for number in batch.sequence.tolist()}
        for i, number in enumerate(batch.sequence.tolist()):
            context = self._context((owner, number), in_use)
            if context is None:
                continue
            start, count = int(batch.feature_start[i]), int(batch.feature_count[i])
            # A fresh start needs everything a block can see: from position 0, or a whole window.
            if count and start != context.end and (start == 0 or count >= self._window):
                context.end = start
            if count and start == context.end:
                skip = max(0, count - self._window)
                taken.append((context.slot, start + skip, int(offsets[i]) + skip, count - skip))
                context.end = start + count
            ready[i] = context.end == int(batch.committed[i]) - 1
        if taken:
            slot = np.concatenate([np.full(n, s) for s, _, _, n in taken])
            position = np.concatenate([np.arange(p, p + n) for _, p, _, n in taken])
            row = np.concatenate([np.arange(r, r + n) for _, _, r, n in taken])
            features = self._tensor(batch.features[row].astype(np.float32))
            self._backbone.write(self._tensor(slot), self._tensor(position), features)
        return ready

    def _blocks(self, owner: str, batch: DraftBatch, rows: I64) -> Blocks:
        greedy = not batch.temperature[rows].any()
        gamma, k, count = self.block_size, 1 if greedy else self._candidates, len(rows)
        if count == 0:
            tokens, confidence = np.zeros((0, gamma), np.int32), np.zeros((0, gamma), np.float32)
            return Blocks(tokens, confidence, np.zeros((0, gamma, k), np.int32), np.zeros((0, gamma, k), np.float32))
        contexts = [self._contexts[(owner, int(n))] for n in batch.sequence[rows]]
        anchor = self._tensor(batch.anchor[rows].astype(np.int64))
        hidden = self._backbone.run(
            anchor,
            self._tensor(batch.committed[rows].astype(np.int64)) - 1,
            self._tensor(np.array([c.slot for c in contexts])),
            self._tensor(np.array([min(c.end, self._window) for c in contexts])),
        )
        logits = self._model.base_logits(hidden)
        if greedy:
            return self._greedy_blocks(anchor, hidden, logits)
        return self._sampled_blocks(anchor, hidden, logits, batch, rows)

    def _greedy_blocks(self, anchor: torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor) -> Blocks:
        """Blocks of requests that are all greedy: the proposal is the best token, with certainty."""
        drafted = [anchor]
        best = []
        for slot in range(self.block_size):
            scores = logits[:, slot] + self._model.markov_bias(drafted[-1])
            drafted.append(self._draft_ids[scores.argmax(-1)])
            if self._model.confidence_head is None:
                best.append(scores.softmax(-1).amax(-1))
        tokens = torch.stack(drafted[1:], 1)
        q_ids = tokens.cpu().numpy().astype(np.int32)
        confidence = self._confidence(hidden, torch.stack(drafted[:-1], 1), best)
        return Blocks(q_ids, confidence, q_ids[:, :, None], np.ones((*q_ids.shape, 1), np.float32))

    def _sampled_blocks(
        self, anchor: torch.Tensor, hidden: torch.Tensor, logits: torch.Tensor, batch: DraftBatch, rows: I64
    ) -> Blocks:
        """Blocks where some request samples: each token is drawn from the renormalised top K."""
        k, temperature = self._candidates, self._tensor(batch.temperature[rows])
        q_ids = np.zeros((len(rows), self.block_size, k), np.int32)
        q_probs = np.zeros((len(rows), self.block_size, k), np.float32)
        drafted = [anchor]
        best = []
        for slot in range(self.block_size):
            top, local = (logits[:, slot] + self._model.markov_bias(drafted[-1])).topk(k)
            q = torch.softmax(top / temperature.clamp(min=1e-6)[:, None], dim=-1)
            q[temperature == 0] = torch.eye(1, k, device=self._device)
            q_ids[:, slot], q_probs[:, slot] = self._draft_ids[local].cpu().numpy(), q.cpu().numpy()
            picked = _choose(q_ids[:, slot], q_probs[:, slot], batch, rows, slot)
            token = np.take_along_axis(q_ids[:, slot], picked[:, None], 1)[:, 0]
            drafted.append(self._tensor(token.astype(np.int64)))
            best.append(q.amax(-1))
        tokens = torch.stack(drafted[1:], 1).cpu().numpy().astype(np.int32)
        return Blocks(tokens, self._confidence(hidden, torch.stack(drafted[:-1], 1), best), q_ids, q_probs)

    def _confidence(self, hidden: torch.Tensor, previous: torch.Tensor, best: list[torch.Tensor]) -> F32:
        """[R, gamma] raw logits: of the head, or, without one, of the largest q, never of the token drawn."""
        if self._model.confidence_head is not None:
            logits = self._model.confidence_logits(hidden, previous)
        else:
            logits = torch.logit(torch.stack(best, 1).clamp(1e-4, 1 - 1e-4))
        raw: F32 = logits.float().cpu().numpy()
        return raw


def _choose(q_ids: I32, q_probs: F32, batch: DraftBatch, rows: I64, slot: int) -> I64:
    """[R] index among the K candidates: greedy, by quantile, or by the coupled rule's noise."""
    u = uniforms(batch.key[rows], np.full(len(rows), slot))
    cumulative = q_probs.astype(np.float64).cumsum(axis=1)
    picked = (cumulative <= (u * cumulative[:, -1])[:, None]).sum(axis=1)
    picked = np.minimum(picked, (q_probs > 0).sum(axis=1) - 1)  # candidates fall, so the used ones come first
    for i in np.flatnonzero(batch.coupled[rows]).tolist():
        position = int(batch.committed[rows[i]]) + slot
        with np.errstate(divide="ignore"):
            scores = np.log(q_probs[i].astype(np.float64))
        picked[i] = int(np.argmax(scores + gumbel(int(batch.key[rows[i]]), position, q_ids[i])))
    picked[batch.temperature[rows] == 0] = 0
    chosen: I64 = picked.astype(np.int64)
    return chosen
