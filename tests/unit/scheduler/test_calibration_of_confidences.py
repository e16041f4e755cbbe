import numpy as np
import pytest

from scheduler.arguments import ArgumentError
from scheduler.calibration import (
    apply_temperatures,
    auc,
    ece_noise_floor,
    expected_calibration_error,
    fit_sts,
)
from scheduler.survival import survival

PLANTED = np.array([2.0, 0.6, 3.0, 1.0])


def rounds_with_planted_temperatures(n, seed, censored):
    """Raw logits whose truth is sigmoid(logit / PLANTED), and the rounds they lead to."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 1.5, (n, PLANTED.size)) * PLANTED
    hit = rng.random(logits.shape) < apply_temperatures(logits, PLANTED)
    verified = rng.integers(0, PLANTED.size + 1, n) if censored else np.full(n, PLANTED.size)
    run = np.cumprod(hit, axis=1).sum(axis=1)
    return logits, np.minimum(run, verified), verified


def test_temperature_one_is_the_sigmoid_and_extremes_do_not_overflow():
    got = apply_temperatures([-1e9, 0.0, np.log(3.0), 1e9], np.ones(4))
    np.testing.assert_allclose(got, [0.0, 0.5, 0.75, 1.0])
    assert np.isnan(apply_temperatures([np.nan], [1.0]))[0]


def test_temperatures_apply_to_the_last_axis_and_keep_the_order():
    logits = np.random.default_rng(0).normal(size=(3, 5, 4))
    confidence = apply_temperatures(logits, PLANTED)
    assert confidence.shape == (3, 5, 4)
    np.testing.assert_allclose(confidence, 1.0 / (1.0 + np.exp(-logits / PLANTED)), rtol=1e-12)
    ordered = np.argsort(logits[0, :, 1])
    assert np.array_equal(ordered, np.argsort(confidence[0, :, 1]))


@pytest.mark.parametrize("temperatures", [[1.0, 0.0], [1.0, -1.0], [1.0, np.inf], [1.0, np.nan], [1.0]])
def test_bad_temperatures_are_refused(temperatures):
    with pytest.raises(ArgumentError) as refused:
        apply_temperatures(np.zeros((2, 2)), temperatures)
    assert refused.value.param == "temperatures"


@pytest.mark.parametrize("censored", [False, True])
def test_sts_recovers_planted_temperatures_and_lowers_the_error(censored):
    logits, accepted, verified = rounds_with_planted_temperatures(40_000, 1, censored)
    temperatures = fit_sts(logits, accepted, verified, np.geomspace(0.25, 4, 41))
    # The error is flat near its minimum and noisy: 30 % at the later, rarer positions.
    np.testing.assert_allclose(temperatures[0], PLANTED[0], rtol=0.15)
    np.testing.assert_allclose(temperatures, PLANTED, rtol=0.3)

    held_out, accepted, verified = rounds_with_planted_temperatures(40_000, 2, censored)
    raw = survival(apply_temperatures(held_out, np.ones(PLANTED.size)))
    calibrated = survival(apply_temperatures(held_out, temperatures))
    for k in range(PLANTED.size):
        trial = verified > k
        outcome = accepted[trial] > k
        after = expected_calibration_error(calibrated[trial, k], outcome)
        floor = ece_noise_floor(float(outcome.mean()), int(trial.sum()))
        assert after < expected_calibration_error(raw[trial, k], outcome)
        assert after < 2.5 * floor


def test_ignoring_the_censoring_would_be_far_off():
    """The check above can fail: counting unverified positions as refusals pushes the product down."""
    logits, accepted, verified = rounds_with_planted_temperatures(20_000, 3, censored=True)
    ignorant = fit_sts(logits, accepted, np.full_like(verified, PLANTED.size), np.geomspace(0.25, 4, 41))
    a = survival(apply_temperatures(logits, ignorant))
    trial = verified > 1
    assert expected_calibration_error(a[trial, 1], accepted[trial] > 1) > 0.1


def test_a_position_that_is_hardly_tried_keeps_temperature_one():
    logits, accepted, verified = rounds_with_planted_temperatures(4_000, 4, censored=False)
    verified = np.minimum(verified, 2)
    temperatures = fit_sts(logits, np.minimum(accepted, verified), verified)
    assert temperatures[0] != 1.0
    np.testing.assert_array_equal(temperatures[2:], 1.0)
    np.testing.assert_array_equal(fit_sts(np.zeros((0, 3)), np.zeros(0, int), np.zeros(0, int)), np.ones(3))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"accepted": [3, 0]}, "accepted"),
        ({"verified": [3, 0]}, "verified"),
        ({"verified": [2, 0, 1]}, "verified"),
        ({"verified": [0.5, 1.0]}, "verified"),
        ({"accepted": [2, 1]}, "accepted"),
        ({"grid": []}, "grid"),
        ({"grid": [0.0]}, "grid"),
        ({"logits": [[0.0, np.nan], [0.0, 0.0]]}, "logits"),
    ],
)
def test_bad_rounds_are_refused(changes, param):
    arguments = {"logits": np.zeros((2, 2)), "accepted": [1, 0], "verified": [2, 0]} | changes
    with pytest.raises(ArgumentError) as refused:
        fit_sts(**arguments)
    assert refused.value.param == param


def test_calibration_error_by_hand():
    # Bins [0, 0.5) and [0.5, 1]: gaps |0.4 - 1| of one round in three, |1.6 - 1| / 2 of two in three.
    assert expected_calibration_error([0.4, 0.6, 1.0], [1, 0, 1], bins=2) == pytest.approx(0.6 / 3 + 0.6 / 3)
    assert expected_calibration_error([0.0, 1.0], [0, 1]) == 0.0
    assert np.isnan(expected_calibration_error([], []))


def test_a_perfect_predictor_shows_the_noise_floor():
    rng = np.random.default_rng(5)
    errors = []
    for _ in range(50):
        p = rng.uniform(0, 1, 2_000)
        errors.append(expected_calibration_error(p, rng.random(2_000) < p))
    # p(1-p) averages 1/6 over a uniform p; its square root is what enters: pi/8 squared.
    assert np.mean(errors) == pytest.approx(0.7979 * np.pi / 8 * np.sqrt(20 / 2_000), rel=0.1)
    assert ece_noise_floor(0.6, 2_000) == pytest.approx(0.039, abs=1e-3)
    assert ece_noise_floor(0.6, 50_000) == pytest.approx(0.0078, abs=1e-4)


def test_auc_equals_the_count_over_pairs():
    rng = np.random.default_rng(6)
    p = np.round(rng.random(200), 1)  # many ties
    y = rng.random(200) < p
    above = (p[y][:, None] > p[~y][None, :]).mean()
    equal = (p[y][:, None] == p[~y][None, :]).mean()
    assert auc(p, y) == pytest.approx(above + 0.5 * equal)
    assert auc([0.1, 0.9], [0, 1]) == 1.0
    assert auc([0.5, 0.5], [0, 1]) == 0.5
    assert np.isnan(auc([0.5, 0.5], [1, 1]))


@pytest.mark.parametrize(
    ("p", "y", "param"),
    [([0.5], [0, 1], "y"), ([0.5], [0.5], "y"), ([1.5], [1], "p"), ([np.nan], [1], "p"), ([[0.5]], [1], "p")],
)
@pytest.mark.parametrize("measure", [expected_calibration_error, auc])
def test_bad_predictions_are_refused(measure, p, y, param):
    with pytest.raises(ArgumentError) as refused:
        measure(p, y)
    assert refused.value.param == param
