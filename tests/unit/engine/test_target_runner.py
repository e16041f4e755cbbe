"""The target runner against transformers' own forward: ragged, chunked and mixed steps of several families."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import tiny_llama
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from engine.pages import PagePool
from engine.target import StepInput, TargetRunner, places_of

SHAPE: dict[str, Any] = {
    "vocab_size": 120,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LAYERS = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8}
FAMILIES = {
    "llama": LlamaConfig(**SHAPE, attention_bias=True),
    "llama-tied": LlamaConfig(**SHAPE, tie_word_embeddings=True),
    "qwen2": Qwen2Config(**{**SHAPE, "hidden_size": 64}, use_sliding_window=True, **LAYERS),
    "qwen3": Qwen3Config(**SHAPE),
    "mistral": MistralConfig(**SHAPE, sliding_window=8),
    "gemma2": Gemma2Config(
        **SHAPE, **LAYERS, query_pre_attn_scalar=24, attn_logit_softcapping=2.0, final_logit_softcapping=3.0
    ),
    "gemma3": Gemma3TextConfig(**SHAPE, **LAYERS, query_pre_attn_scalar=24),
}
FEATURES = (0, 2)
LENGTHS = (37, 5, 21, 1)


def family(name: str) -> tuple[TargetRunner, Any]:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(FAMILIES[name], attn_implementation="eager").eval()
    with torch.no_grad():  # norms and biases start as ones and zeros, which would hide a missing one
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    reference = copy.deepcopy(model)
    return TargetRunner(model, FEATURES), reference


@torch.inference_mode()
def expected(reference: Any, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    out = reference(tokens[None], output_hidden_states=True)
    return out.logits[0], torch.cat([out.hidden_states[layer + 1][0] for layer in FEATURES], dim=-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_features_are_those_of_transformers(name: str) -> None:
    runner, reference = family(name)
    generator = torch.Generator().manual_seed(3)
    texts = [torch.randint(3, 120, (n,), generator=generator) for n in LENGTHS]
    pool = PagePool(runner.kv_shape, 16)
    for tensor in (*pool.keys, *pool.values):
        tensor.fill_(torch.nan)
    tables = [pool.take(PagePool.pages_for(n)) for n in LENGTHS]
    done = [0] * len(texts)
    logits: list[list[torch.Tensor]] = [[] for _ in texts]
    features: list[list[torch.Tensor]] = [[] for _ in texts]
    step = 0
    # Chunks of prompts beside single tokens, other sequences in every step, other counts every time.
    while any(d < n for d, n in zip(done, LENGTHS, strict=True)):
        step += 1
        counts = [
            min(n - d, (1, 7, 3, 1, 16)[(s + step) % 5]) for s, (d, n) in enumerate(zip(done, LENGTHS, strict=True))
        ]
        part = [s for s, count in enumerate(counts) if count]
        places = places_of([tables[s] for s in part], [done[s] for s in part], [counts[s] for s in part])
        tokens = torch.cat([texts[s][done[s] : done[s] + counts[s]] for s in part])
        out = runner.forward(StepInput(tokens, places, pool, torch.arange(len(tokens))))
        at = 0
        for s in part:
            logits[s].append(out.logits[at : at + counts[s]])
            features[s].append(out.features[at : at + counts[s]])
            at += counts[s]
            done[s] += counts[s]
    for s, text in enumerate(texts):
        right_logits, right_features = expected(reference, text)
        torch.testing.assert_close(torch.cat(logits[s]), right_logits, atol=1e-4, rtol=0)
        torch.testing.assert_close(torch.cat(features[s]), right_features, atol=1e-4, rtol=1e-4)


def test_only_wanted_rows_come_back_and_rejected_positions_leave_no_trace() -> None:
    model = tiny_llama(vocabulary=120)
    runner = TargetRunner(model)
    tokens = torch.arange(3, 23)
    pool = PagePool(runner.kv_shape, 2)
    table = pool.take(2)

    def forward(ids: torch.Tensor, start: int) -> torch.Tensor:
        places = places_of([table], [start], [len(ids)])
        return runner.forward(StepInput(ids, places, pool, torch.tensor([len(ids) - 1]))).logits

    whole = forward(tokens, 0)
    assert whole.shape == (1, 120)
    forward(torch.tensor([90, 91, 92]), 15)  # drafted and refused
    torch.testing.assert_close(forward(tokens[15:], 15), whole, atol=1e-5, rtol=0)


def test_a_token_gets_the_same_bits_alone_and_in_any_batch() -> None:
    """On the compiled kernels, for widths that fill whole vectors (as those of real models do)."""
    torch.manual_seed(0)
    shape = {**SHAPE, "hidden_size": 192, "intermediate_size": 512, "num_attention_heads": 3, "num_key_value_heads": 1}
    model = AutoModelForCausalLM.from_config(LlamaConfig(**{**shape, "head_dim": 64, "num_hidden_layers": 2}))
    runner = TargetRunner(model, (0,))
    lengths = (33, 7, 20, 1)
    texts = [torch.randint(3, 120, (n,)) for n in lengths]
    pool = PagePool(runner.kv_shape, 16)
    tables = [pool.take(PagePool.pages_for(n)) for n in lengths]
    whole = runner.forward(
        StepInput(torch.cat(texts), places_of(tables, [0] * 4, lengths), pool, torch.arange(sum(lengths)))
    )
    at = 0
    for text, table in zip(texts, tables, strict=True):
        for count in (1, 5):
            for start in range(len(text) - count + 1):
                part = slice(at + start, at + start + count)
                places = places_of([table], [start], [count])
                out = runner.forward(StepInput(text[start : start + count], places, pool, torch.arange(count)))
                assert torch.equal(out.logits, whole.logits[part]) and torch.equal(out.features, whole.features[part])
        at += len(text)


def test_without_feature_layers_there_are_no_features() -> None:
    runner = TargetRunner(tiny_llama(vocabulary=120))
    pool = PagePool(runner.kv_shape, 1)
    step = StepInput(torch.tensor([4, 5]), places_of([pool.take(1)], [0], [2]), pool, torch.tensor([1]))
    assert runner.forward(step).features.shape == (2, 0)


@pytest.mark.parametrize("layer", [-1, 2, 3])
def test_a_feature_layer_out_of_range_is_refused(layer: int) -> None:
    with pytest.raises(ValueError, match=f"feature layer {layer} is not below the target's last layer 2"):
        TargetRunner(tiny_llama(vocabulary=120), (0, layer))
