"""The two acceptance rules: what is emitted, with which probability, and at which kind of position."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from engine.acceptance import accept_agreeing, accept_by_rejection

NEVER = 1 - 2**-53  # a number at which only a certain acceptance is one


def constant(u: float) -> Callable[[int], float]:
    return lambda position: u


def q_rows(rows: list[dict[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    width = max(len(row) for row in rows)
    ids, probs = np.zeros((len(rows), width), np.int32), np.zeros((len(rows), width), np.float32)
    for i, row in enumerate(rows):
        ids[i, : len(row)], probs[i, : len(row)] = list(row), list(row.values())
    return ids, probs


def emitted_first(p: list[float], q: dict[int, float], steps: int = 800) -> np.ndarray:
    """Exact distribution of the first emitted token of a block of one: every draft, every quantile."""
    ids, probs = q_rows([q])
    table = torch.tensor([p, p])
    quantiles = (np.arange(steps) + 0.5) / steps
    out = np.zeros(len(p))
    for token, chance in q.items():

        def emit(accept: float, sample: float, token: int = token) -> list[int]:
            return accept_by_rejection(table, [token], ids, probs, constant(accept), constant(sample))

        kept = float(np.mean([len(emit(u, 0.5)) == 2 for u in quantiles]))
        if kept > 0:
            out[token] += chance * kept
        if kept < 1:
            refused = [emit(NEVER, u) for u in quantiles]
            assert all(len(tokens) == 1 for tokens in refused)
            out += chance * (1 - kept) * np.bincount([tokens[0] for tokens in refused], minlength=len(p)) / steps
    return out


@pytest.mark.parametrize("u", [2**-53, 0.3, 0.999, 1 - 1e-9])
def test_equal_distributions_always_accept(u: float) -> None:
    p = torch.tensor([[0.125, 0.5, 0.375]] * 4)
    ids, probs = q_rows([{0: 0.125, 1: 0.5, 2: 0.375}] * 3)
    for block in ([0, 1, 2], [1, 1, 1], [2, 0, 0]):
        assert accept_by_rejection(p, block, ids, probs, constant(u), constant(0.3))[:3] == block


def test_a_token_outside_the_vocabulary_is_refused_and_its_position_samples_the_residual() -> None:
    """p = (.7, .3, 0), q = (.5, .1, .4): .70; dropping the draft and sampling a bonus would give .78."""
    for q in ({0: 0.5, 1: 0.1, 2: 0.4}, {0: 0.5, 1: 0.1, 999: 0.4}, {0: 0.5, 1: 0.1, -4: 0.4}):
        np.testing.assert_allclose(emitted_first([0.7, 0.3], q), [0.7, 0.3], atol=2e-3)


def test_a_forbidden_token_inside_the_vocabulary_is_refused_too() -> None:
    out = emitted_first([0.7, 0.3, 0.0], {0: 0.5, 1: 0.1, 2: 0.4})
    np.testing.assert_allclose(out, [0.7, 0.3, 0.0], atol=2e-3)


def test_random_distributions_come_out_as_the_target() -> None:
    rng = np.random.default_rng(0)
    for _ in range(3):
        p = rng.dirichlet(np.full(5, 0.6))
        support = rng.permutation(5)[:3]
        q = dict(zip(support.tolist(), rng.dirichlet(np.ones(3)).tolist(), strict=True))
        np.testing.assert_allclose(emitted_first(p.tolist(), q), p, atol=4e-3)


def test_a_refused_position_samples_the_residual_and_a_bonus_position_samples_p() -> None:
    p = torch.tensor([[0.5, 0.5], [0.25, 0.75], [1.0, 0.0]])
    ids, probs = q_rows([{0: 1.0}, {1: 1.0}])
    asked: list[int] = []

    def sample(position: int) -> float:
        asked.append(position)
        return 0.1

    # Refused at once: only token 1 is left of p - q, whatever the quantile.
    assert accept_by_rejection(p, [0, 1], ids, probs, constant(0.6), sample) == [1]
    # Token 0 stays, token 1 is refused: the residual of (.25, .75) - (0, 1) is token 0.
    assert accept_by_rejection(p, [0, 1], ids, probs, lambda k: (0.4, 0.8)[k], sample) == [0, 0]
    # All stay: the last row is a bonus.
    assert accept_by_rejection(p, [0, 1], ids, probs, constant(0.1), sample) == [0, 1, 0]
    # The planner stopped after one: position 2 is a bonus position and samples p, not the residual.
    assert accept_by_rejection(p[:2], [0], ids, probs, constant(0.1), sample) == [0, 0]
    assert accept_by_rejection(p[:2], [0], ids, probs, constant(0.1), constant(0.9)) == [0, 1]
    assert asked == [0, 1, 2, 1]


def test_a_token_that_its_own_distribution_does_not_hold_is_refused() -> None:
    p = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    ids, probs = q_rows([{0: 1.0}])
    assert len(accept_by_rejection(p, [1], ids, probs, constant(2**-53), constant(0.5))) == 1
    probs[:] = np.nan
    assert len(accept_by_rejection(p, [0], ids, probs, constant(2**-53), constant(0.5))) == 1


@pytest.mark.parametrize(
    ("choices", "drafted", "emitted"),
    [
        ([5], [], [5]),
        ([5, 6, 7], [5, 6], [5, 6, 7]),
        ([5, 6, 7], [5, 9], [5, 6]),
        ([5, 6, 7], [9, 6], [5]),
        ([5], [9, 6], [5]),  # choices behind a disagreement need not be known
    ],
)
def test_agreement(choices: list[int], drafted: list[int], emitted: list[int]) -> None:
    assert accept_agreeing(choices, drafted) == emitted
