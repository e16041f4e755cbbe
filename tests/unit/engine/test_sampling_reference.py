"""Temperature, top-k and top-p against the most obvious way to write them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from engine.noise import gumbel
from engine.request import SamplingParams
from engine.sampling import allowed_logits, coupled_token, sample_weights


def obvious(logits: list[float], params: SamplingParams) -> list[float]:
    """Probabilities after temperature, then top-k, then top-p, token by token."""
    scaled = [x / params.temperature for x in logits]
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token], token))
    if params.top_k > 0:
        order = order[: params.top_k]
    total = sum(math.exp(scaled[token]) for token in order)
    kept, mass = [], 0.0
    for token in order:
        if mass >= params.top_p and params.top_p < 1.0:
            break
        kept.append(token)
        mass += math.exp(scaled[token]) / total
    total = sum(math.exp(scaled[token]) for token in kept)
    return [math.exp(scaled[token]) / total if token in kept else 0.0 for token in range(len(scaled))]


def test_random_rows_of_mixed_parameters() -> None:
    rng = np.random.default_rng(0)
    for _ in range(40):
        rows = int(rng.integers(1, 6))
        logits = rng.normal(0, 2, (rows, 13)).astype(np.float32)
        if rng.random() < 0.5:
            logits = np.round(logits)  # ties
        params = [
            SamplingParams(
                temperature=float(rng.choice([0.3, 1.0, 1.7])),
                top_k=int(rng.choice([-1, 0, 1, 4, 12, 13, 50])),
                top_p=float(rng.choice([0.05, 0.5, 0.9, 1.0])),
            )
            for _ in range(rows)
        ]
        ours = allowed_logits(torch.from_numpy(logits), params).softmax(-1).numpy()
        right = [obvious(row, p) for row, p in zip(logits.tolist(), params, strict=True)]
        np.testing.assert_allclose(ours, right, atol=1e-6)
        assert ((ours > 0) == (np.array(right) > 0)).all()


def test_a_row_of_nan_leaves_the_others_alone() -> None:
    logits = torch.randn(2, 9, generator=torch.Generator().manual_seed(0))
    params = [SamplingParams(top_k=3, top_p=0.9)] * 2
    alone = allowed_logits(logits[1:].clone(), params[1:])
    logits[0] = torch.nan
    assert torch.equal(allowed_logits(logits, params)[1:], alone)


def test_a_quantile_names_its_token_and_never_one_without_weight() -> None:
    weights = torch.tensor([0.0, 0.2, 0.0, 0.3, 0.5, 0.0])
    for u, token in ((1e-17, 1), (0.19, 1), (0.21, 3), (0.49, 3), (0.51, 4), (1 - 2**-53, 4)):
        assert sample_weights(weights, u) == token
        assert sample_weights(weights * 7, u) == token  # weights need no sum of 1
    edges = torch.tensor([1e-30, 0.0, 1.0, 1e-30, 0.0])
    assert {sample_weights(edges, u) for u in (2**-53, 0.5, 1 - 2**-53)} == {2}


@pytest.mark.parametrize("seed", [0, -5, 2**64 - 1])
def test_the_coupled_token_is_the_largest_of_log_p_and_noise(seed: int) -> None:
    logits = torch.randn(6, 30, generator=torch.Generator().manual_seed(1))
    scaled = allowed_logits(logits, [SamplingParams(top_k=5)] * 6)
    for position, row in enumerate(scaled):
        p = row.double().softmax(-1).numpy()
        with np.errstate(divide="ignore"):
            scores = np.log(p) + gumbel(seed, position, range(30))
        assert coupled_token(row, seed, position) == int(np.argmax(scores))
        assert p[coupled_token(row, seed, position)] > 0
