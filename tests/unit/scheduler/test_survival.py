import numpy as np
import pytest

from scheduler.arguments import ArgumentError
from scheduler.survival import survival


def test_is_the_running_product():
    np.testing.assert_allclose(survival([[0.5, 0.5, 1.0], [1.0, 0.9, 0.0]]), [[0.5, 0.25, 0.25], [1.0, 0.9, 0.0]])


def test_no_requests_and_one_position():
    assert survival(np.zeros((0, 7))).shape == (0, 7)
    np.testing.assert_array_equal(survival([[0.3]]), [[0.3]])


def test_nan_counts_as_zero_and_ends_the_prefix():
    np.testing.assert_array_equal(survival([[0.5, np.nan, 1.0], [np.nan, 1.0, 1.0]]), [[0.5, 0, 0], [0, 0, 0]])


def test_confidences_are_clipped():
    np.testing.assert_array_equal(survival([[1.5, np.inf, 0.5], [-0.1, 1.0, -np.inf]]), [[1, 1, 0.5], [0, 0, 0]])


def test_float32_becomes_float64_and_never_rises():
    confidence = np.random.default_rng(0).uniform(-0.1, 1.1, (500, 9)).astype(np.float32)
    a = survival(confidence)
    assert a.dtype == np.float64
    assert np.all(np.diff(a, axis=1) <= 0.0)
    assert np.all((a >= 0.0) & (a <= 1.0))


def test_an_entry_reads_no_later_confidence():
    rng = np.random.default_rng(1)
    confidence = rng.uniform(0, 1, (64, 7))
    for k in range(1, 7):
        changed = confidence.copy()
        changed[:, k:] = rng.uniform(0, 1, (64, 7 - k))
        assert np.array_equal(survival(confidence)[:, :k], survival(changed)[:, :k])


@pytest.mark.parametrize("shape", [(3,), (2, 0), (1, 2, 3)])
def test_other_shapes_are_refused(shape):
    with pytest.raises(ArgumentError) as refused:
        survival(np.zeros(shape))
    assert refused.value.param == "confidence"
