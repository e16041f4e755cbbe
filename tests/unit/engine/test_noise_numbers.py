"""Counter-based numbers: open interval, equal wherever they are drawn, different for different keys."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from engine.noise import Purpose, extend_digest, gumbel, key_of, uniform, uniforms

MASK = (1 << 64) - 1


def key_that_mixes_to(value: int) -> int:
    """The inverse of SplitMix64's finaliser and its step."""

    def unshift(x: int, by: int) -> int:
        out = x
        for _ in range(64 // by + 1):
            out = x ^ (out >> by)
        return out

    x = unshift(value, 31) * pow(0x94D049BB133111EB, -1, 1 << 64) & MASK
    x = unshift(x, 27) * pow(0xBF58476D1CE4E5B9, -1, 1 << 64) & MASK
    return (unshift(x, 30) - 0x9E3779B97F4A7C15) & MASK


@pytest.mark.parametrize("extreme", [0, 1, MASK - 1, MASK])
def test_the_interval_is_open_at_its_very_ends(extreme: int) -> None:
    key = key_that_mixes_to(extreme)
    for u in (uniform(key), float(uniforms([key], 0)[0])):
        assert 0.0 < u < 1.0
        assert (u > 0.5) == (extreme > 1)
        assert np.isfinite(np.log(-np.log(u)))


def test_one_number_and_many_are_the_same_numbers() -> None:
    keys = [key_of(7, n) for n in range(50)]
    assert uniforms(keys, 0).tolist() == [uniform(key) for key in keys]
    assert uniforms([keys[3]], range(20)).tolist() == [uniform(keys[3] ^ n) for n in range(20)]


def test_both_sides_draw_the_same_noise_for_the_tokens_they_know() -> None:
    whole = gumbel(11, 40, range(400))
    some = np.array([399, 3, 17], np.int32)
    assert gumbel(11, 40, some).tolist() == whole[some].tolist()
    assert gumbel(-1, 5, range(9)).tolist() == gumbel(MASK, 5, range(9)).tolist()  # a seed is 64 bits
    for other in (gumbel(12, 40, range(400)), gumbel(11, 41, range(400))):
        assert not np.any(other == whole)


def test_numbers_are_uniform_and_uncorrelated_across_purposes_and_rounds() -> None:
    """Kolmogorov-Smirnov and correlation at level 1e-4 each, fixed keys."""
    n = 20_000
    series = [[uniform(key_of(key_of(5, 1, 0, r, purpose), 0)) for r in range(n)] for purpose in (1, 2, 3)]
    series.append(uniforms([key_of(5, 1, 0, 9, Purpose.DRAFT)], range(n)).tolist())
    for numbers in series:
        assert stats.kstest(numbers, "uniform").pvalue > 1e-4
        assert stats.pearsonr(numbers[:-1], numbers[1:]).pvalue > 1e-4
    for a, b in ((0, 1), (0, 2), (1, 2)):
        assert stats.pearsonr(series[a], series[b]).pvalue > 1e-4


def test_gumbel_noise_picks_tokens_with_their_probabilities() -> None:
    """Chi-square at level 1e-4: the largest of log p + noise is distributed as p."""
    p = np.array([0.5, 0.3, 0.15, 0.05])
    picked = [int(np.argmax(np.log(p) + gumbel(3, position, range(4)))) for position in range(20_000)]
    assert stats.chisquare(np.bincount(picked, minlength=4), p * len(picked)).pvalue > 1e-4


def test_a_digest_grows_with_its_tokens_and_depends_on_their_order() -> None:
    assert extend_digest(0, []) == 0
    assert extend_digest(extend_digest(0, [1, 2]), [3]) == extend_digest(0, [1, 2, 3])
    assert len({extend_digest(0, ids) for ids in ([1, 2], [2, 1], [1], [1, 2, 0], [0])}) == 5
