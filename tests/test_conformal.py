"""p-values and thresholds: exact counts, and realised false-alarm rates that follow their law."""

import numpy as np
import pytest
from scipy.stats import betabinom, binom
from sklearn.mixture import GaussianMixture

from daebm.conformal import check_rate, least_rate, needed, p_values, rank, threshold
from daebm.errors import InputError

REPETITIONS = 200
CALIBRATION, FRESH, FPR = 199, 2000, 0.05


def test_p_values_are_counts() -> None:
    calibration = np.array([3.0, 1.0, 2.0, 2.0])
    assert p_values(calibration, np.array([0.5, 1.0, 2.0, 9.0])).tolist() == [0.2, 0.4, 0.8, 1.0]
    assert p_values(calibration, np.array([-np.inf, np.inf])).tolist() == [0.2, 1.0]


@pytest.mark.parametrize("fpr", [0.01, 0.05, 0.07, 0.29, 0.5])
@pytest.mark.parametrize("count", [99, 100, 437])
def test_threshold_and_p_value_agree(fpr: float, count: int) -> None:
    """With ties too: below the threshold is the same as p <= fpr, in whole numbers."""
    rng = np.random.default_rng(count)
    calibration = rng.integers(0, 40, count).astype(float)
    scores = np.concatenate([calibration, np.arange(-1.0, 41)])
    below = scores < threshold(calibration, fpr)
    counted = 1 + (calibration <= scores[:, None]).sum(1)
    assert (below == (counted <= rank(count, fpr))).all()
    assert rank(count, fpr) == int(np.floor(np.round(fpr * (count + 1), 9)))
    np.testing.assert_allclose(p_values(calibration, scores), counted / (count + 1))


def test_too_few_points_are_refused_with_what_to_do() -> None:
    assert needed(0.01) == 99 and needed(0.05) == 19 and needed(0.3) == 3
    assert rank(99, 0.01) == 1
    with pytest.raises(InputError, match="at least 99 calibration points, and there are 98: give fit more rows, or"):
        threshold(np.arange(98.0), 0.01)
    for wrong in (0, 1, -0.1, np.nan, "0.1", None, True):
        with pytest.raises(InputError, match="false-alarm rate between 0 and 1"):
            check_rate(wrong)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="at least 1e-09"):
        check_rate(5e-324)  # whose inverse is infinite


@pytest.mark.parametrize("count", [1, 2, 6, 12, 98, 999, 1234])
def test_the_rate_that_is_advised_works(count: int) -> None:
    """Rounded up: 1 / 13 is .0769 to three digits, at which 12 points flag nothing."""
    assert rank(count, least_rate(count)) == 1 and needed(least_rate(count)) <= count
    assert least_rate(count) < 1.2 / (count + 1)


def flagged_counts(on_training_points: bool) -> list[int]:
    """Of fresh points, with a score that overfits: ten Gaussians on 120 points in four dimensions."""
    counts = []
    for seed in range(REPETITIONS):
        rng = np.random.default_rng(seed)
        train = rng.standard_normal((120, 4)) ** 3
        held = rng.standard_normal((CALIBRATION, 4)) ** 3
        fresh = rng.standard_normal((FRESH, 4)) ** 3
        score = GaussianMixture(10, covariance_type="diag", random_state=0, max_iter=5, init_params="random_from_data")
        score.fit(train)
        calibration = score.score_samples(rng.choice(train, CALIBRATION) if on_training_points else held)
        counts.append(int((score.score_samples(fresh) < threshold(calibration, FPR)).sum()))
    return counts


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_flagged_counts_follow_the_beta_binomial_law() -> None:
    """Fresh points are flagged as often as Beta(k, n + 1 - k) says: 95 % bands hold in 95 % of 200 repetitions."""
    k = rank(CALIBRATION, FPR)
    law = betabinom(FRESH, k, CALIBRATION + 1 - k)
    low, high = law.interval(0.95)
    inside_probability = law.cdf(high) - law.cdf(low - 1)  # 95 % and what whole numbers add

    def inside(counts: list[int]) -> int:
        return sum(low <= count <= high for count in counts)

    least, most = binom(REPETITIONS, inside_probability).interval(0.999)
    counts = flagged_counts(on_training_points=False)
    assert least <= inside(counts) <= most
    # The whole law, by its quantiles: the probability transform of the counts is uniform.
    uniform = law.cdf(counts)
    assert abs(uniform.mean() - 0.5) < 4 * np.sqrt(1 / 12 / REPETITIONS)
    # The planted fault: points that were trained on are not exchangeable with fresh ones.
    assert inside(flagged_counts(on_training_points=True)) < least
