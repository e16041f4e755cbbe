"""The step loop of a verifier: receive, draft, plan, one ragged forward pass, accept, emit.

Exactness rests on the order of decisions. Who takes part in a step and who is drafted is decided from history,
before anything is drafted (`_request_drafts`). Once a block is sampled, only `scheduler.planner` shortens it, and
limits it is given depend on history alone. A reply that does not come in time is dropped whole, and a drafter's
time does not depend on what it drafts.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from engine.acceptance import accept_agreeing, accept_by_rejection
from engine.drafters.dspark import FeatureFusion
from engine.noise import Purpose, key_of, uniform
from engine.pages import PagePool
from engine.request import GenerationRequest, RequestError, SamplingParams, TokenChunk
from engine.rounds import DraftBatch, DraftLink, DraftReply
from engine.sampling import allowed_logits, coupled_token, sample_weights
from engine.sequence import FeatureTail, Sequence
from engine.settings import EngineSettings
from engine.statistics import RoundLog
from engine.target import StepInput, StepOutput, TargetRunner, places_of
from engine.text import TextStream
from scheduler.calibration import apply_temperatures
from scheduler.gate import choose_drafted, probe_due
from scheduler.planner import plan_prefixes
from scheduler.policy import VerifyPolicy
from scheduler.survival import survival
from scheduler.tiers import Tier, tier_named

logger = logging.getLogger(__name__)

SHORTEST_DEADLINE_S = 0.1
DEADLINE_FACTOR = 4.0  # of the time that drafting is expected to take


@dataclass(frozen=True)
class DraftSide:
    """What a verifier needs of its drafter.

    Attributes:
        fusion: `fc` and its norm, run here.
        weights: hash of the checkpoint they belong to.
        block_size: gamma.
        window: positions of context a block can see.
        link: to whatever drafts.
    """

    fusion: FeatureFusion
    weights: str
    block_size: int
    window: int
    link: DraftLink


@dataclass(frozen=True)
class _Work:
    """One sequence's part in a step: positions start .. start + count - 1, and the drafted prefix among them."""

    sequence: Sequence
    start: int
    tokens: list[int]
    block: int = -1  # row of the reply; -1 without a block
    samples: bool = True  # whether the last position's logits are wanted


class Engine:
    """Runs requests to their end, one step at a time. Not thread-safe: one thread calls it.

    Args:
        target: the target model.
        tokenizer: its fast tokenizer.
        settings: limits of this engine.
        tiers: known tiers; waiting requests of the lowest priority number go first.
        policy: what holds until another policy is set.
        draft: the drafting side; None decodes plainly.
        clock: seconds.
    """

    def __init__(
        self,
        target: TargetRunner,
        tokenizer: Any,
        settings: EngineSettings,
        tiers: Seq[Tier],
        policy: VerifyPolicy,
        draft: DraftSide | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._target = target
        self._tokenizer = tokenizer
        self._settings = settings
        self._tiers = tuple(tiers)
        self._draft = draft
        self._clock = clock
        limit = getattr(target.config, "max_position_embeddings", settings.max_context)
        self.max_context = min(settings.max_context, limit)
        pages = max(1, settings.kv_memory_bytes // target.kv_shape.page_bytes)
        self.pool = PagePool(target.kv_shape, pages, settings.device)
        self.policy = policy
        self.log = RoundLog(draft.block_size if draft else 1)
        self._seed = settings.random_seed if settings.random_seed is not None else int.from_bytes(os.urandom(8))
        self._ends = frozenset(_end_tokens(target.config, tokenizer))
        self._waiting: list[Sequence] = []
        self._running: list[Sequence] = []
        self._by_id: dict[str, Sequence] = {}
        self._closed: deque[int] = deque()
        self._numbers = 0
        self._round = 0
        self._drafting = True
        self._idle_rounds = 0
        self._awaited: tuple[int, int] | None = None  # round asked for, and of how many requests
        if draft is not None and settings.verify_length is None and policy.costs is None:
            logger.warning("no step costs yet: the planner verifies every drafted token until they are measured")

    # ---------------------------------------------------------------- requests

    def add(self, request: GenerationRequest) -> None:
        """Take a request into the queue of its tier.

        Raises:
            RequestError: it could never run: empty, too long for the context or the page pool, or its id is in use.
            UnknownTierError: no such tier.
        """
        params, size = request.params, len(request.prompt)
        tier_named(self._tiers, request.tier)
        if request.request_id in self._by_id:
            raise RequestError(f"request id {request.request_id!r} is already in use", "request_id")
        if size == 0:
            raise RequestError("the prompt is empty", "prompt")
        if not all(0 <= token < self._target.vocab_size for token in request.prompt):
            raise RequestError(f"the prompt holds ids outside 0..{self._target.vocab_size - 1}", "prompt")
        if size + params.max_tokens > self.max_context:
            raise RequestError(
                f"prompt ({size} tokens) and max_tokens ({params.max_tokens}) exceed the context of "
                f"{self.max_context} tokens",
                "max_tokens",
            )
        features = None
        if self._draft is not None and request.speculation and self._settings.verify_length != 0:
            features = FeatureTail(self._draft.window, self._target.hidden_size)
        sequence = Sequence(request, self._numbers, TextStream(self._tokenizer, params.stop), features)
        if sequence.pages_wanted > self.pool.pages:
            raise RequestError(
                f"{size} + {params.max_tokens} tokens need {sequence.pages_wanted} pages, there are "
                f"{self.pool.pages} in all",
                "max_tokens",
            )
        self._numbers += 1
        self._by_id[request.request_id] = sequence
        self._waiting.append(sequence)

    def abort(self, request_id: str) -> bool:
        """End a request now and free its memory; False if it is not here (any more)."""
        sequence = self._by_id.get(request_id)
        if sequence is None:
            return False
        sequence.finish_reason = "abort"
        self._release(sequence)
        if not self.has_work:  # no step will tell the drafter
            self._request_drafts()
        return True

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._running or self._waiting)

    def load(self) -> dict[str, tuple[int, int]]:
        """(running, waiting) requests of each tier."""
        load = {tier.name: (0, 0) for tier in self._tiers}
        for position, group in enumerate((self._running, self._waiting)):
            for sequence in group:
                counts = list(load[sequence.request.tier])
                counts[position] += 1
                load[sequence.request.tier] = (counts[0], counts[1])
        return load

    def generate(
        self, prompts: Seq[Seq[int]], params: SamplingParams | Seq[SamplingParams], tier: str = "default"
    ) -> list[list[int]]:
        """Run prompts to their ends together; token ids of each, in their order.

        Raises:
            RequestError: as `add`.
        """
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        for i, (prompt, wanted) in enumerate(zip(prompts, each, strict=True)):
            self.add(GenerationRequest(f"generate-{i}", tuple(prompt), wanted, tier))
        out: list[list[int]] = [[] for _ in prompts]
        for chunk in self.run():
            if chunk.error:
                raise RuntimeError(chunk.error)
            out[int(chunk.request_id.rpartition("-")[2])] += chunk.token_ids
        return out

    def run(self) -> Iterator[TokenChunk]:
        """Step until nothing is left to do."""
        while self.has_work:
            yield from self.step()

    # ---------------------------------------------------------------- one step

    def step(self) -> list[TokenChunk]:
        """Run one step: everything that came out of it, at most one chunk a request."""
        began = self._clock()
        self._round += 1
        self._admit()
        reply = self._collect()
        waited = self._clock() - began
        work = self._plan(reply, waited)
        if not work:
            return []
        started = self._clock()
        output, rows = self._forward(work)
        chunks = self._resolve(work, rows, output, reply)
        self._running = [s for s in self._running if s.finish_reason is None]
        self._request_drafts()
        tokens = sum(len(w.tokens) for w in work)
        self.log.step(tokens, self._clock() - started, waited)
        return chunks

    def _admit(self) -> None:
        order = {tier.name: tier.priority for tier in self._tiers}
        self._waiting.sort(key=lambda s: (order[s.request.tier], s.number))
        while self._waiting and len(self._running) < self._settings.max_running:
            sequence = self._waiting[0]
            if sequence.pages_wanted > self.pool.free:
                return  # first come, first served within a tier: nobody overtakes
            sequence.pages = self.pool.take(sequence.pages_wanted)
            self._running.append(self._waiting.pop(0))

    def _release(self, sequence: Sequence) -> None:
        self.pool.give_back(sequence.pages)
        sequence.pages = []
        self._by_id.pop(sequence.request.request_id, None)
        self._waiting = [s for s in self._waiting if s is not sequence]
        self._running = [s for s in self._running if s is not sequence]
        if sequence.known_to >= 0:  # also where a resync is due: the drafter has begun a context all the same
            self._closed.append(sequence.number)

    def _collect(self) -> DraftReply | None:
        """The reply to the last batch, if it comes before the deadline that was set with it."""
        if self._draft is None or self._awaited is None:
            return None
        (asked, count), self._awaited = self._awaited, None
        costs = self.policy.costs
        expected = costs.draft(count) if costs else 1.0
        reply = self._draft.link.collect(asked, max(SHORTEST_DEADLINE_S, DEADLINE_FACTOR * expected))
        if reply is None:
            self.log.missed(late=1)
            return None
        if reply.weights != self._draft.weights:
            logger.error("drafter has weights %s, this verifier %s", reply.weights, self._draft.weights)
            self.log.missed(mismatched=1)
            return None
        self.log.drafted(reply.seconds)
        lost = set(reply.resync.tolist())
        for sequence in self._running:
            if sequence.number in lost:
                sequence.sent = 0
        return reply

    def _plan(self, reply: DraftReply | None, waited: float) -> list[_Work]:
        decoding = [s for s in self._running if s.decoding]
        work: list[_Work] = []
        budget = self._settings.prefill_tokens
        for s in self._running:
            count = min(s.prompt_length - s.computed, budget)
            if not s.decoding and count > 0:
                budget -= count
                last = s.computed + count == s.prompt_length
                work.append(_Work(s, s.computed, s.tokens[s.computed : s.computed + count], samples=last))
        prefill = sum(len(w.tokens) for w in work)
        blocks = self._matching(decoding, reply)
        lengths = self._lengths(decoding, blocks, reply, prefill, waited)
        for s, block, length in zip(decoding, blocks, lengths, strict=True):
            drafted = reply.tokens[block, :length].tolist() if reply is not None and length else []
            work.append(_Work(s, len(s.tokens) - 1, [s.tokens[-1], *drafted], block))
        return work

    @staticmethod
    def _matching(decoding: list[Sequence], reply: DraftReply | None) -> list[int]:
        """Row of the reply for each sequence, -1 where there is none for its present state."""
        if reply is None:
            return [-1] * len(decoding)
        keys = zip(reply.sequence.tolist(), reply.epoch.tolist(), reply.committed.tolist(), strict=True)
        row = {key: i for i, key in enumerate(keys)}
        return [row.get((s.number, s.epoch, len(s.tokens)), -1) for s in decoding]

    def _lengths(
        self,
        decoding: list[Sequence],
        blocks: list[int],
        reply: DraftReply | None,
        prefill: int,
        waited: float,
    ) -> list[int]:
        """Draft tokens to verify for each decoding sequence."""
        has = [i for i, block in enumerate(blocks) if block >= 0]
        lengths = [0] * len(decoding)
        if reply is None or not has:
            return lengths
        gamma = reply.tokens.shape[1]
        # From history only: the limit leaves room for the one token that follows the prefix.
        limits = np.array([min(gamma, decoding[i].remaining - 1) for i in has], dtype=np.int64)
        if self._settings.verify_length is not None:
            chosen = np.minimum(limits, self._settings.verify_length)
        else:
            temperatures = self.policy.temperatures or (1.0,) * gamma
            confidence = apply_temperatures(reply.confidence[[blocks[i] for i in has]], temperatures)
            plan = plan_prefixes(
                survival(confidence),
                [self._weight(decoding[i]) for i in has],
                self.policy.costs,
                base_tokens=len(decoding) + prefill,
                base_value=sum(self._weight(s) for s in decoding),
                limits=limits,
                sunk_seconds=waited,
            )
            chosen = plan.lengths
            self.log.planned(plan.expected_tokens, plan.predicted_seconds)
        for i, length in zip(has, chosen.tolist(), strict=True):
            lengths[i] = length
        return lengths

    def _weight(self, sequence: Sequence) -> float:
        return self.policy.weights.get(sequence.request.tier, 1.0)

    def _forward(self, work: list[_Work]) -> tuple[StepOutput, list[slice]]:
        """One pass over all tokens; also the rows of its logits that belong to each work."""
        tokens = [token for w in work for token in w.tokens]
        # A drafter may propose ids the target does not have: they are refused later, here they must not break.
        vocabulary = self._target.vocab_size
        safe = [token if 0 <= token < vocabulary else 0 for token in tokens]
        rows: list[slice] = []
        wanted: list[int] = []
        at = 0
        for w in work:
            count = len(w.tokens)
            # A prompt's last position, or every position of a decoding sequence.
            first = 0 if w.sequence.decoding else count - 1 if w.samples else count
            rows.append(slice(len(wanted), len(wanted) + count - first))
            wanted += range(at + first, at + count)
            at += count
        places = places_of(
            [w.sequence.pages for w in work],
            [w.start for w in work],
            [len(w.tokens) for w in work],
            self._settings.device,
        )
        step = StepInput(torch.tensor(safe), places, self.pool, torch.tensor(wanted, dtype=torch.int64))
        return self._target.forward(step), rows

    def _resolve(
        self, work: list[_Work], rows: list[slice], output: StepOutput, reply: DraftReply | None
    ) -> list[TokenChunk]:
        top, index = output.logits.max(-1)  # a NaN anywhere in a row is its maximum
        best, finite = index.tolist(), torch.isfinite(top).tolist()
        sampled = [
            (i, w.sequence.request.params)
            for w, part in zip(work, rows, strict=True)
            for i in range(part.start, part.stop)
            if not w.sequence.request.params.greedy
        ]
        allowed: dict[int, torch.Tensor] = {}
        if sampled:
            logits = output.logits[[i for i, _ in sampled]]
            scaled = allowed_logits(logits, [params for _, params in sampled])
            allowed = {i: scaled[j] for j, (i, _) in enumerate(sampled)}
        kept: list[tuple[int, int]] = []  # for each work: first row of its features, how many are committed
        chunks: list[TokenChunk] = []
        at = 0
        for w, part in zip(work, rows, strict=True):
            s, size = w.sequence, len(w.tokens)
            if part.start == part.stop:  # a prompt with more chunks to come
                s.computed += size
                kept.append((at, size))
                at += size
                continue
            drafted = w.tokens[1:] if s.decoding else []
            if all(finite[part]):
                tokens = self._tokens(s, part, best, allowed, drafted, w.block, reply)
                chunk = s.emit(tokens, self._ends, len(tokens) - 1, len(drafted) - len(tokens) + 1)
            else:
                s.finish_reason = "error"
                chunk = TokenChunk(s.request.request_id, (), "", "error", error="the target's logits are not finite")
                tokens = []
            if w.block >= 0:
                self.log.resolved(s, len(drafted), max(0, len(tokens) - 1))
            new = size if not drafted else max(1, len(tokens))
            kept.append((at, new))
            s.computed = w.start + new
            at += size
            self.log.emitted(s, len(chunk.token_ids))
            chunks.append(chunk)
        self._keep_features(work, kept, output)
        for chunk in chunks:
            if chunk.finish_reason is not None:
                self._release(self._by_id[chunk.request_id])
        return chunks

    def _tokens(
        self,
        s: Sequence,
        part: slice,
        best: list[int],
        allowed: dict[int, torch.Tensor],
        drafted: list[int],
        block: int,
        reply: DraftReply | None,
    ) -> list[int]:
        """The tokens one sequence gets in this step: accepted drafts and one more."""
        params = s.request.params
        if params.greedy:
            return accept_agreeing(best[part], drafted)
        scaled = [allowed[i] for i in range(part.start, part.stop)]
        if params.coupled:
            assert params.seed is not None
            choices: list[int] = []
            for k, row in enumerate(scaled):
                choices.append(coupled_token(row, params.seed, len(s.tokens) + k))
                if k < len(drafted) and choices[k] != drafted[k]:
                    break
            return accept_agreeing(choices, drafted)

        def draw(purpose: Purpose) -> Callable[[int], float]:
            key = key_of(self._seed, s.number, s.epoch, self._round, purpose)
            return lambda k: uniform(key_of(key, k))

        p = torch.stack(scaled).softmax(-1)
        if not drafted or reply is None:
            return [sample_weights(p[-1], draw(Purpose.SAMPLE)(0))]
        q_ids, q_probs = reply.q_ids[block], reply.q_probs[block]
        return accept_by_rejection(p, drafted, q_ids, q_probs, draw(Purpose.ACCEPT), draw(Purpose.SAMPLE))

    def _keep_features(self, work: list[_Work], kept: list[tuple[int, int]], output: StepOutput) -> None:
        """Fuse the features of committed positions and append them to their sequences."""
        if self._draft is None:
            return
        wanted = [
            (w.sequence, at, count)
            for w, (at, count) in zip(work, kept, strict=True)
            if w.sequence.features is not None and w.sequence.finish_reason is None
        ]
        if not wanted:
            return
        rows = torch.cat([torch.arange(at, at + count) for _, at, count in wanted])
        with torch.inference_mode():
            fused = self._draft.fusion(output.features[rows.to(output.features.device)].float()).half().cpu().numpy()
        done = 0
        for s, _, count in wanted:
            assert s.features is not None
            s.features.append(fused[done : done + count])
            done += count

    # ---------------------------------------------------------------- drafting

    def _request_drafts(self) -> None:
        """Ask for the next round's blocks: who is drafted is decided here, from resolved rounds only."""
        draft = self._draft
        if draft is None or not draft.link.ready or self._settings.verify_length == 0:
            return
        decoding = [s for s in self._running if s.decoding]
        chosen = self._choose(decoding)
        if not chosen and not self._closed:
            return
        generation = draft.link.generation
        entries: list[tuple[Sequence, int, Any]] = []
        for s in chosen:
            assert s.features is not None
            if s.known_to != generation:
                s.known_to, s.sent = generation, 0
            start, rows = s.features.since(s.sent)
            s.sent = s.features.end
            entries.append((s, start, rows))
        closed = [self._closed.popleft() for _ in range(len(self._closed))]
        params = [s.request.params for s in chosen]
        batch = DraftBatch(
            round=self._round,
            weights=draft.weights,
            closed=np.array(closed, np.int64),
            sequence=np.array([s.number for s in chosen], np.int64),
            epoch=np.array([s.epoch for s in chosen], np.int32),
            committed=np.array([len(s.tokens) for s in chosen], np.int32),
            prefix=np.array([s.digest for s in chosen], np.uint64),
            anchor=np.array([s.tokens[-1] for s in chosen], np.int32),
            draft=np.ones(len(chosen), np.bool_),
            temperature=np.array([p.temperature for p in params], np.float32),
            coupled=np.array([p.coupled for p in params], np.bool_),
            key=np.array([self._draft_key(s) for s in chosen], np.uint64),
            feature_start=np.array([start for _, start, _ in entries], np.int32),
            feature_count=np.array([len(rows) for _, _, rows in entries], np.int32),
            features=np.concatenate([rows for _, _, rows in entries])
            if entries
            else np.zeros((0, self._target.hidden_size), np.float16),
        )
        draft.link.submit(batch)
        self._awaited = (self._round, len(chosen)) if chosen else None

    def _draft_key(self, s: Sequence) -> int:
        params = s.request.params
        if params.coupled:
            assert params.seed is not None
            return params.seed & (2**64 - 1)
        return key_of(self._seed, s.number, s.epoch, self._round, Purpose.DRAFT)

    def _choose(self, decoding: list[Sequence]) -> list[Sequence]:
        """Who is drafted next."""
        eligible = [s.features is not None and s.remaining > 1 for s in decoding]
        if self._settings.verify_length is not None:
            return [s for s, may in zip(decoding, eligible, strict=True) if may]
        if not any(eligible):
            return []
        waiting_prompt = sum(s.prompt_length - s.computed for s in self._running if not s.decoding)
        mask = choose_drafted(
            np.stack([self.log.mean_survival(s) for s in decoding]),
            [self._weight(s) for s in decoding],
            np.array(eligible),
            self.policy.costs,
            other_tokens=min(waiting_prompt, self._settings.prefill_tokens),
            previously_on=self._drafting,
            hysteresis=self.policy.hysteresis,
        )
        self._drafting = bool(mask.any())
        if self._drafting:
            self._idle_rounds = 0
        else:
            self._idle_rounds += 1
            if probe_due(self._idle_rounds, self.policy.probe_interval_steps):
                self._idle_rounds = 0
                # In turn over the requests, so that no single one stands for all.
                may = np.flatnonzero(eligible)
                mask[may[self._round % len(may)]] = True
        return [s for s, yes in zip(decoding, mask.tolist(), strict=True) if yes]


def _end_tokens(config: Any, tokenizer: Any) -> set[int]:
    """Token ids that end a text."""
    ends: set[int] = set()
    for value in (config.eos_token_id, tokenizer.eos_token_id):
        if isinstance(value, int):
            ends.add(value)
        elif value is not None:
            ends.update(value)
    return ends
