"""Small random targets and drafters, and engines over them, for tests that need no checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from engine.drafters.config import DSparkConfig
from engine.drafters.dspark import DSparkDrafter, FeatureFusion
from engine.drafting import DraftEngine, Drafter
from engine.engine import DraftSide, Engine
from engine.local_link import LocalLink
from engine.noise import extend_digest
from engine.request import SamplingParams
from engine.rounds import DraftBatch, DraftReply
from engine.settings import EngineSettings
from engine.target import TargetRunner
from scheduler.costs import StepCosts
from scheduler.policy import VerifyPolicy, safe_default
from scheduler.tiers import DEFAULT_TIERS

VOCABULARY = 400
END = 2
WEIGHTS = "tiny"


@cache
def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 single bytes (ids 3..258) and pairs of letters up to id 399; 0, 1, 2 are <pad>, <s>, </s>."""
    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": END}
    for symbol in sorted(pre_tokenizers.ByteLevel.alphabet()):
        vocabulary[symbol] = len(vocabulary)
    letters = "etaoinshrdlu"
    merges = [(a, b) for a in letters for b in letters][: VOCABULARY - len(vocabulary)]
    for a, b in merges:
        vocabulary[a + b] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        clean_up_tokenization_spaces=False,
    )


@dataclass(frozen=True)
class TinyTarget:
    """A runner, and a copy of its model that transformers runs its own way."""

    runner: TargetRunner
    reference: Any

    def greedy(self, prompt: list[int], tokens: int) -> list[int]:
        """The reference's own greedy continuation, end tokens ignored."""
        whole = self.reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return whole[0, len(prompt) :].tolist()

    @torch.inference_mode()
    def logits(self, tokens: list[int]) -> torch.Tensor:
        """[T, V] logits of the reference after each token."""
        return self.reference(torch.tensor([tokens])).logits[0]


def tiny_llama(
    seed: int = 0,
    *,
    vocabulary: int = VOCABULARY,
    hidden: int = 64,
    layers: int = 3,
    spread: float = 0.2,
    positions: int = 512,
) -> Any:
    """A random Llama whose weights are wide enough that its distributions are not flat."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 16,
        num_key_value_heads=max(1, hidden // 32),
        head_dim=16,
        max_position_embeddings=positions,
        initializer_range=spread,
        eos_token_id=END,
        bos_token_id=1,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def tiny_target(model: Any | None = None, feature_layers: tuple[int, ...] = (0, 1)) -> TinyTarget:
    """A runner over `model` (a `tiny_llama`), and its reference."""
    model = tiny_llama() if model is None else model
    reference = copy.deepcopy(model)
    return TinyTarget(TargetRunner(model, feature_layers), reference)


@dataclass(frozen=True)
class TinyDrafter:
    """A random DSpark drafter in its two halves."""

    model: DSparkDrafter
    fusion: FeatureFusion

    @property
    def config(self) -> DSparkConfig:
        return self.model.config

    def engine(self, **settings: Any) -> DraftEngine:
        """A drafting engine with no contexts yet; `settings` as in `DraftEngine`."""
        return DraftEngine(self.model, WEIGHTS, **{"candidates": 16, **settings})


def tiny_drafter(
    target: TargetRunner,
    seed: int = 0,
    *,
    draft_vocabulary: int | None = None,
    block_size: int = 4,
    window: int = 32,
    spread: float = 0.2,
) -> TinyDrafter:
    """A drafter over `target`, all of its own weights normal with standard deviation `spread`."""
    size = target.hidden_size
    vocabulary = draft_vocabulary or target.vocab_size * 3 // 4
    config = DSparkConfig(
        hidden_size=size,
        num_hidden_layers=1,
        num_attention_heads=size // 16,
        num_key_value_heads=max(1, size // 32),
        head_dim=16,
        intermediate_size=size,
        vocab_size=target.vocab_size,
        draft_vocab_size=vocabulary,
        target_layer_ids=target.feature_layers,
        num_target_layers=target.config.num_hidden_layers,
        block_size=block_size,
        mask_token_id=0,
        markov_rank=8,
        sliding_window=window,
    )
    generator = torch.Generator().manual_seed(seed)
    ids = torch.arange(vocabulary)
    model = DSparkDrafter(config, target.embedding.clone(), target.head_weight[ids], ids).eval()
    fusion = FeatureFusion(config).eval()
    with torch.no_grad():
        for half in (model, fusion):
            for name, weight in half.named_parameters():
                if weight.dim() > 1 and not name.startswith("lm_head"):
                    weight.copy_(torch.randn(weight.shape, generator=generator) * spread)
        model.markov_head.markov_w1.weight.mul_(5.0)  # blocks that differ from their first token on
    return TinyDrafter(model, fusion)


class WatchedLink(LocalLink):
    """A link in this process that keeps what went over it; a test may change or lose replies on their way back.

    Attributes:
        batches: everything sent, in order.
        replies: everything that came back, as it was changed.
    """

    def __init__(
        self, drafter: Drafter | None, change: Callable[[DraftReply], DraftReply | None] = lambda reply: reply
    ) -> None:
        super().__init__(drafter)
        self._change = change
        self.batches: list[DraftBatch] = []
        self.replies: list[DraftReply] = []

    def submit(self, batch: DraftBatch) -> None:
        self.batches.append(batch)
        super().submit(batch)

    def collect(self, round: int, timeout: float) -> DraftReply | None:
        reply = super().collect(round, timeout)
        reply = None if reply is None else self._change(reply)
        if reply is not None:
            self.replies.append(reply)
        return reply

    @property
    def drafted(self) -> set[int]:
        """Numbers of the sequences that a block was ever asked for."""
        return {int(n) for batch in self.batches for n in batch.sequence[batch.draft]}


class ForcedDrafter:
    """Wraps a drafter and puts tokens of the test's choice into its blocks, each proposed with certainty.

    Args:
        drafter: the wrapped one, which decides whose context is there.
        propose: from the entry's digest of committed tokens to the block's tokens.
        confidence: logit reported for every position.
    """

    def __init__(self, drafter: DraftEngine, propose: Callable[[int], list[int]], confidence: float = 2.0) -> None:
        self._drafter = drafter
        self._propose = propose
        self._confidence = confidence

    @property
    def block_size(self) -> int:
        return self._drafter.block_size

    @property
    def contexts(self) -> int:
        return self._drafter.contexts

    def forget(self, owner: str) -> None:
        self._drafter.forget(owner)

    def draft(self, owner: str, batch: DraftBatch) -> DraftReply:
        reply = self._drafter.draft(owner, batch)
        digest = dict(zip(batch.sequence.tolist(), batch.prefix.tolist(), strict=True))
        tokens = np.array([self._propose(digest[n]) for n in reply.sequence.tolist()], np.int32)
        tokens = tokens.reshape(reply.tokens.shape)
        q_ids, q_probs = reply.q_ids.copy(), np.zeros_like(reply.q_probs)
        q_ids[:, :, 0], q_probs[:, :, 0] = tokens, 1.0
        confidence = np.full_like(reply.confidence, self._confidence)
        return replace(reply, tokens=tokens, q_ids=q_ids, q_probs=q_probs, confidence=confidence)


def continuations(
    target: TinyTarget, prompts: Iterable[list[int]], tokens: int, block_size: int
) -> dict[int, list[int]]:
    """The next `block_size` greedy tokens of the reference, by the digest of everything before them."""
    known: dict[int, list[int]] = {}
    for prompt in prompts:
        whole = [*target.greedy(prompt, tokens), *[0] * block_size]
        digest = extend_digest(0, prompt)
        for i in range(tokens):
            digest = extend_digest(digest, whole[i : i + 1])
            known[digest] = whole[i + 1 : i + 1 + block_size]
    return known


def tiny_engine(
    target: TinyTarget | TargetRunner,
    drafter: TinyDrafter | None = None,
    link: LocalLink | None = None,
    *,
    costs: StepCosts | None = None,
    policy: VerifyPolicy | None = None,
    **settings: Any,
) -> Engine:
    """An engine; with a drafter it drafts over `link`, or over a fresh local one.

    Args:
        settings: of `EngineSettings`, over defaults that suit a tiny model.
    """
    runner = target.runner if isinstance(target, TinyTarget) else target
    chosen = EngineSettings(**{"kv_memory_bytes": 1 << 24, "max_context": 256, "prefill_tokens": 32, **settings})
    gamma = drafter.config.block_size if drafter else 1
    draft = None
    if drafter is not None:
        link = LocalLink(drafter.engine()) if link is None else link
        draft = DraftSide(drafter.fusion, WEIGHTS, gamma, drafter.config.sliding_window, link)
    policy = safe_default(DEFAULT_TIERS, gamma, costs=costs) if policy is None else policy
    return Engine(runner, byte_tokenizer(), chosen, DEFAULT_TIERS, policy, draft)


def random_prompts(count: int, seed: int = 1, *, longest: int = 50, vocabulary: int = VOCABULARY) -> list[list[int]]:
    """Prompts of 1 to `longest` random ordinary tokens."""
    rng = np.random.default_rng(seed)
    low = min(3, vocabulary - 1)
    return [rng.integers(low, vocabulary, rng.integers(1, longest + 1)).tolist() for _ in range(count)]


def greedy_params(tokens: int, **changes: Any) -> SamplingParams:
    """Temperature 0, and nothing but the length ends the text."""
    return SamplingParams(**{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **changes})
