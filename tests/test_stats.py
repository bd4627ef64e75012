"""stats.py against values worked out by hand, and at the few seeds that real sweeps have."""

import itertools

import numpy as np
import pytest

from grpo_jax import stats


def test_iqm_drops_a_quarter_at_either_end():
    assert stats.iqm([8, 1, 2, 100]) == 5.0  # the mean of 2 and 8
    assert stats.iqm([1, 2, 6]) == 3.0  # floor(3 / 4) = 0: the plain mean
    assert stats.iqm([9, 1, 2, 3, 4, 5, 6, 100]) == 4.5  # 3 4 5 6
    np.testing.assert_array_equal(stats.iqm([[0, 1], [4, 1], [2, 1], [50, 9]], axis=0), [3, 1])


@pytest.mark.parametrize("values", [[], [1.0, np.nan, 2.0, 3.0], [np.inf, 1.0]])
def test_iqm_refuses_what_trimming_would_hide(values):
    with pytest.raises(ValueError, match=r"no values|not finite"):
        stats.iqm(values)


@pytest.mark.parametrize("method", ["percentile", "bca"])
def test_bootstrap_repeats_and_leaves_the_global_generator_alone(method):
    values = np.random.default_rng(3).normal(size=8)
    state = np.random.get_state()[1].copy()  # noqa: NPY002 (the point of the test)
    first = stats.bootstrap_interval(values, method=method, seed=5)
    second = stats.bootstrap_interval(values, method=method, seed=5)
    other = stats.bootstrap_interval(values, method=method, seed=6)
    assert first == second and first != other
    assert first[0] < stats.iqm(values) < first[1]
    np.testing.assert_array_equal(np.random.get_state()[1], state)  # noqa: NPY002


def test_percentile_interval_of_two_seeds_by_hand():
    # resamples of (0, 1) have the means 0, 1/2, 1 with chances 1/4, 1/2, 1/4
    low, high = stats.bootstrap_interval([0.0, 1.0])
    assert (low, high) == (0.0, 1.0)
    low, high = stats.bootstrap_interval([0.0, 1.0], level=0.2)  # 40 % to 60 %: all in the middle
    assert (low, high) == (0.5, 0.5)


def test_bca_corrects_for_skew():
    skewed = np.exp(np.random.default_rng(0).normal(size=30))
    mean = np.mean
    _, percentile = stats.bootstrap_interval(skewed, mean)
    _, bca = stats.bootstrap_interval(skewed, mean, method="bca")
    assert bca > percentile  # a long right tail asks for more room on the right


@pytest.mark.parametrize("method", ["percentile", "bca"])
@pytest.mark.parametrize("n", [2, 3, 4])
def test_few_or_tied_seeds_give_finite_intervals(method, n):
    columns = np.stack([np.arange(n), np.full(n, 0.5), np.arange(n) == 0], axis=1)
    low, high = stats.bootstrap_interval(columns, method=method)
    assert low.shape == high.shape == (3,)
    assert np.all(np.isfinite([low, high])) and np.all(low <= high)
    assert low[1] == high[1] == 0.5


def test_one_seed_has_no_interval():
    assert stats.bootstrap_interval([0.3]) is None
    assert stats.paired_difference([0.3], [0.1]) is None
    assert stats.paired_difference([], []) is None


def test_unknown_method():
    with pytest.raises(ValueError, match="percentile"):
        stats.bootstrap_interval([1.0, 2.0], method="BCA!")


def test_columns_share_their_resamples():
    values = np.random.default_rng(1).normal(size=6)
    low, high = stats.bootstrap_interval(np.stack([values, values + 1.0], axis=1))
    np.testing.assert_allclose(low[1] - low[0], 1.0, rtol=1e-12)
    np.testing.assert_allclose(high[1] - high[0], 1.0, rtol=1e-12)


def test_paired_difference_by_hand():
    # differences 1 2 3: mean 2, sd 1, t(0.975, 2) = 4.302653, half width 4.302653 / sqrt(3)
    result = stats.paired_difference([2.0, 4.0, 8.0], [1.0, 2.0, 5.0])
    assert result.mean == 2.0 and result.n == 3
    np.testing.assert_allclose([result.low, result.high], [2 - 2.484138, 2 + 2.484138], atol=1e-6)
    assert result.p == 0.25  # +++ and --- of the 8 sign patterns are as extreme


def test_pairing_removes_what_the_seeds_share():
    seeds = np.array([0.0, 10.0, 20.0, 30.0])
    result = stats.paired_difference(seeds + np.array([1.0, 1.1, 0.9, 1.0]), seeds)
    assert 0.8 < result.low < result.high < 1.2


def test_equal_runs_differ_by_nothing():
    result = stats.paired_difference([0.1, 0.2, 0.7], [0.1, 0.2, 0.7])
    assert (result.mean, result.low, result.high, result.p) == (0.0, 0.0, 0.0, 1.0)


def test_permutation_test_counts_sign_patterns():
    # differences 1 -1 2 sum to 2; of the 8 sign patterns |sum| is 2, 4, 0, 2 and their negatives
    assert stats.permutation_test([1.0, -1.0, 2.0], [0.0, 0.0, 0.0]) == 0.75
    assert stats.permutation_test(np.ones(5), np.zeros(5)) == 2 / 2**5
    assert stats.permutation_test([4.0], [1.0]) == 1.0


def test_permutation_test_samples_when_there_are_too_many_patterns():
    x = np.random.default_rng(0).normal(1.0, 1.0, size=20)
    first, second = (stats.permutation_test(x, np.zeros(20), resamples=999) for _ in range(2))
    assert first == second
    assert 2 / 1000 <= first < 0.05  # never 0


@pytest.mark.parametrize("test", [stats.permutation_test, stats.paired_difference])
def test_pairs_must_match(test):
    with pytest.raises(ValueError, match="equal lengths"):
        test([1.0, 2.0], [1.0])
    with pytest.raises(ValueError, match="not finite"):
        test([1.0, np.nan], [1.0, 2.0])


def test_probability_of_improvement_counts_pairs():
    # 3 > 1, 3 > 2, 2 > 1, 2 = 2: (3 + 1/2) / 4
    assert stats.probability_of_improvement([3.0, 2.0], [1.0, 2.0]) == 0.875
    assert stats.probability_of_improvement([1.0, 2.0], [3.0, 2.0]) == 0.125
    with pytest.raises(ValueError, match="both sides"):
        stats.probability_of_improvement([], [1.0])


@pytest.mark.parametrize("k", [1, 2, 3, 5])
def test_pass_at_k_is_the_share_of_draws_with_a_right_answer(k):
    n = 5
    for c in range(n + 1):
        answers = [1] * c + [0] * (n - c)
        exact = np.mean([max(draw) for draw in itertools.combinations(answers, k)])
        np.testing.assert_allclose(stats.pass_at_k(n, c, k), exact, rtol=1e-12)


def test_pass_at_k_of_many_prompts_and_samples():
    np.testing.assert_allclose(stats.pass_at_k([4, 10], [1, 10], 2), [0.5, 1.0])
    np.testing.assert_allclose(stats.pass_at_k(5000, 1, 2500), 0.5)  # C(5000, 2500) overflows


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 5), (4, 2, 0)])
def test_pass_at_k_refuses_impossible_counts(n, c, k):
    with pytest.raises(ValueError, match="pass_at_k needs"):
        stats.pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("votes", "correct", "score"),
    [
        ("aab", [1, 1, 0], 1.0),
        ("abb", [1, 0, 0], 0.0),
        ("ba", [0, 1], 0.0),  # one vote each: the one seen first
        ("ab", [1, 0], 1.0),
        ("bcacab", [0, 0, 1, 0, 1, 0], 0.0),  # two votes each: b was first
        ([None, None, "a"], [0, 0, 1], 1.0),  # whoever abstains is no majority
        ([None, None], [0, 1], 0.0),
        ("aaab", [1, 0, 1, 1], 2 / 3),  # the reward looks at more than the answer
    ],
)
def test_majority_vote_by_hand(votes, correct, score):
    assert stats.majority_vote(list(votes), correct) == pytest.approx(score)


@pytest.mark.parametrize(("votes", "correct"), [([], []), (["a"], [1, 0]), (["a"], [np.nan])])
def test_majority_vote_refuses(votes, correct):
    with pytest.raises(ValueError, match=r"majority_vote|not finite"):
        stats.majority_vote(votes, correct)


def test_wilson_interval_by_hand():
    # z = 1.959964: z^2 / (n + z^2) for none of ten; (p + z^2/2n -+ ...) / (1 + z^2/n) for two
    low, high = stats.wilson_interval(0, 10)
    assert low == 0 and high == pytest.approx(3.841459 / 13.841459, abs=1e-6)
    low, high = stats.wilson_interval(2, 10)
    np.testing.assert_allclose([low, high], [0.056682, 0.509838], atol=1e-6)
    for successes, n in ((-1, 3), (4, 3), (0, 0)):
        with pytest.raises(ValueError, match="wilson_interval needs"):
            stats.wilson_interval(successes, n)


def test_mean_intervals_over_problems():
    values = np.array([[0.0, 0.0, 0.0, 3.0], [1.0, 0.5, 0.0, 5.0]])
    mixed, shares, none_right, length = stats.mean_intervals(values, [True, True, True, False])
    assert mixed == stats.wilson_interval(1, 2)
    assert shares == (0.0, 0.5)  # resamples of two problems have the means 0, 1/4, 1/2
    assert none_right == stats.wilson_interval(0, 2)
    assert length == (3.0, 5.0)
    # 0 or 1 token is no share; one problem has no bootstrap
    assert stats.mean_intervals([[0.0], [1.0]], [False]) == [(0.0, 1.0)]
    assert stats.mean_intervals([[0.3, 1.0]], [True, True])[0] is None
    with pytest.raises(ValueError, match="not finite"):
        stats.mean_intervals([[np.nan], [1.0]], [True])
