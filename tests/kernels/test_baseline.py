"""What is subtracted from a reward."""

from functools import partial
from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import baseline

NAN = jnp.nan
REWARD = jnp.array([[1.0, 0.0, 0.0, 1.0], [2.0, 0.5, -0.5, 0.0]])
LENGTH = jnp.array([[4, 1, 1, 2], [1, 2, 1, 4]])
GROUP_BASELINES = [baseline.group_mean, baseline.leave_one_out, baseline.length_weighted]
BEST = baseline.best_of_group
PASS_AT_4 = partial(baseline.pass_at_k, k=4, right=0.5)
TO_ZERO = [*GROUP_BASELINES, BEST, PASS_AT_4]  # of equal rewards


def test_hand_computed():
    mean = [[0.5] * 4, [0.5] * 4]
    np.testing.assert_allclose(baseline.group_mean(REWARD, LENGTH), mean)
    others = [[1 / 3, 2 / 3, 2 / 3, 1 / 3], [0, 0.5, 5 / 6, 2 / 3]]
    np.testing.assert_allclose(baseline.leave_one_out(REWARD, LENGTH), others, atol=1e-7)
    weighted = [[6 / 8] * 4, [2.5 / 8] * 4]
    np.testing.assert_allclose(baseline.length_weighted(REWARD, LENGTH), weighted)
    np.testing.assert_allclose(baseline.batch_mean(REWARD, LENGTH), [[0.5] * 4] * 2)
    np.testing.assert_array_equal(baseline.none(REWARD, LENGTH), jnp.zeros((2, 4)))


def test_unscorable_rows_leave_the_statistics():
    reward = REWARD.at[0, 1].set(NAN)
    scored = [0, 2, 3]
    for rule in GROUP_BASELINES:
        alone = rule(REWARD[:1, jnp.array(scored)], LENGTH[:1, jnp.array(scored)])
        np.testing.assert_allclose(rule(reward, LENGTH)[0, jnp.array(scored)], alone[0])
    np.testing.assert_allclose(baseline.batch_mean(reward, LENGTH)[1], [4 / 7] * 4, rtol=1e-6)


def test_leave_one_out_is_g_over_g_minus_1_times_centred():
    centred = REWARD - baseline.group_mean(REWARD, LENGTH)
    left_out = REWARD - baseline.leave_one_out(REWARD, LENGTH)
    np.testing.assert_allclose(left_out, centred * 4 / 3, rtol=1e-6)


def test_what_each_baseline_makes_zero():
    centred = REWARD - baseline.group_mean(REWARD, LENGTH)
    np.testing.assert_allclose(centred.sum(1), 0, atol=1e-6)
    weighted = REWARD - baseline.length_weighted(REWARD, LENGTH)
    np.testing.assert_allclose((LENGTH * weighted).sum(1), 0, atol=1e-6)


@pytest.mark.parametrize("rule", TO_ZERO)
def test_a_tied_group_is_centred_to_exactly_zero(rule):
    reward = jnp.repeat(jnp.array([[0.7], [0.3], [1 / 3], [1e6 + 0.1]], jnp.float32), 8, axis=1)
    length = jnp.arange(32).reshape(4, 8)
    np.testing.assert_array_equal(reward - rule(reward, length), 0)
    holed = reward.at[0, 0].set(NAN)
    np.testing.assert_array_equal((holed - rule(holed, length))[1:], 0)
    np.testing.assert_array_equal((holed - rule(holed, length))[0, 1:], 0)


def test_a_row_alone_among_the_unscorable_is_its_own_baseline():
    reward = jnp.array([[NAN, 0.4, NAN, NAN]])
    for rule in TO_ZERO:
        assert rule(reward, LENGTH[:1])[0, 1] == reward[0, 1]


def test_batch_mean_is_no_group_baseline():
    reward = jnp.array([[1.0, 1.0], [0.0, 0.0]])
    centred = reward - baseline.batch_mean(reward, LENGTH[:, :2])
    np.testing.assert_array_equal(centred, [[0.5, 0.5], [-0.5, -0.5]])
    tied = jnp.full((3, 4), 0.7, jnp.float32)
    np.testing.assert_array_equal(tied - baseline.batch_mean(tied, jnp.ones((3, 4), int)), 0)


def test_no_length_at_all_is_finite():
    assert jnp.isfinite(baseline.length_weighted(REWARD, jnp.zeros_like(LENGTH))).all()


# ---------------------------------------------------------------- ReMax, best of group, Pass@k


def test_the_greedy_answer_of_each_prompt():
    greedy = jnp.array([[1.0], [0.25]])
    expected = [[1, 1, 1, 1], [0.25] * 4]
    np.testing.assert_array_equal(baseline.greedy(REWARD, LENGTH, greedy=greedy), expected)


def test_an_unscorable_greedy_answer_leaves_its_prompt_without_advantages():
    greedy = jnp.array([[NAN], [0.25]])
    centred = REWARD - baseline.greedy(REWARD, LENGTH, greedy=greedy)
    np.testing.assert_array_equal(centred, [[0] * 4, [1.75, 0.25, -0.75, -0.25]])


def test_as_good_as_the_greedy_answer_is_exactly_zero():
    reward = jnp.array([[0.7, 0.7 + 5e-7, 0.7 - 5e-7, 0.8, NAN]], jnp.float32)
    rule = partial(baseline.greedy, greedy=jnp.full((1, 1), 0.7, jnp.float32))
    centred = reward - rule(reward, jnp.ones((1, 5), int))
    np.testing.assert_array_equal(centred[0, :3], 0)
    np.testing.assert_allclose(centred[0, 3], 0.1, rtol=1e-5)
    assert jnp.isnan(centred[0, 4])


def test_only_the_best_of_a_group_learns_by_its_lead():
    reward = jnp.array([[0.5, 2.0, -0.25, 1.0], [-3.0, -1.0, -2.5, -4.0]])
    centred = reward - BEST(reward, LENGTH)
    np.testing.assert_array_equal(centred, [[0, 1, 0, 0], [0, 1.5, 0, 0]])


def test_two_best_lead_by_nothing():
    reward = jnp.array([[1.0, 0.0, 1.0], [1.0, 1 - 5e-7, 0.0]], jnp.float32)
    np.testing.assert_array_equal(reward - BEST(reward, LENGTH[:, :3]), 0)


def test_the_best_of_the_scorable():
    reward = jnp.array([[NAN, 0.25, NAN, 1.0], [NAN, NAN, NAN, NAN]])
    centred = reward - BEST(reward, LENGTH)
    np.testing.assert_array_equal(centred, [[NAN, 0, NAN, 0.75], [NAN] * 4])
    np.testing.assert_array_equal(REWARD[:, :1] - BEST(REWARD[:, :1], LENGTH[:, :1]), 0)


def test_pass_at_k_by_hand():
    reward = jnp.array([[1.0, 0.0, 0.0, 0.0]])  # two of four: 3 of 6 pairs are all wrong
    centred = reward - baseline.pass_at_k(reward, LENGTH[:1], k=2, right=0.5)
    np.testing.assert_allclose(centred, [[1 / 2, -1 / 6, -1 / 6, -1 / 6]], rtol=1e-6)


def printed_pass_at_k(reward, k, right):
    """Numerators and deviation of one group as the paper has them, in whole numbers."""
    ok = ~np.isnan(reward)
    n, wrong = ok.sum(), (ok & ~(reward > right)).sum()
    k = min(k, n)
    mean = 1 - comb(wrong, k) / comb(n, k)
    lost = mean + (comb(wrong - 1, k - 1) / comb(n - 1, k - 1) if wrong else 0)
    return np.where(reward > right, 1 - mean, 1 - lost), np.sqrt(mean * (1 - mean))


@pytest.mark.parametrize("k", [1, 2, 4, 7, 12])
def test_pass_at_k_as_printed(k):
    rng = np.random.default_rng(k)
    reward = np.where(rng.random((30, 12)) < rng.random((30, 1)), 1.0, 0.25)
    reward[:, 0] = np.where(rng.random(30) < 0.5, np.nan, reward[:, 0])
    reward[:3, 2:] = np.nan  # fewer than k, for most
    expected = np.stack([printed_pass_at_k(row, k, 0.5)[0] for row in reward])
    with jax.enable_x64(True):
        x = jnp.asarray(reward)
        value = np.asarray(x - baseline.pass_at_k(x, jnp.ones((30, 12), int), k=k, right=0.5))
    ok = ~np.isnan(reward)
    np.testing.assert_allclose(value[ok], expected[ok], rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(np.where(ok, value, 0).sum(1), 0, atol=1e-12)


def test_pass_at_1_is_the_mean_of_the_group():
    reward = jnp.array([[1.0, 0.0, 0.0, 1.0, 1.0]])
    length = jnp.ones((1, 5), int)
    for k in (1, jnp.array(1)):
        value = baseline.pass_at_k(reward, length, k=k, right=0.5)
        np.testing.assert_allclose(value, baseline.group_mean(reward, length), rtol=1e-6)


def test_pass_at_k_asks_only_whether_a_row_is_right():
    low = jnp.array([[1.0, 0.0, 0.0, 0.0]])
    high = jnp.array([[3.0, -1.0, 0.5, 0.25]])  # 0.5 is not above 0.5
    centred = [x - baseline.pass_at_k(x, LENGTH[:1], k=2, right=0.5) for x in (low, high)]
    np.testing.assert_allclose(*centred, rtol=1e-5)
    other = high - baseline.pass_at_k(high, LENGTH[:1], k=2, right=0.3)
    assert other[0, 2] > 0


@pytest.mark.parametrize("rights", [0, 5, 6, 8])  # of 8: with 5 right, 4 draws can't be all wrong
def test_pass_at_k_is_exactly_zero_where_all_draws_end_alike(rights):
    reward = jnp.where(jnp.arange(8) < rights, 0.7, 0.3)[None].astype(jnp.float32)
    np.testing.assert_array_equal(reward - PASS_AT_4(reward, jnp.ones((1, 8), int)), 0)


def test_fewer_scorable_than_k_are_all_drawn():
    reward = jnp.array([[1.0, 0.0, NAN, NAN, NAN]])
    centred = reward - PASS_AT_4(reward, jnp.ones((1, 5), int))
    np.testing.assert_array_equal(centred[0, :2], 0)


@pytest.mark.parametrize("rule", [BEST, PASS_AT_4])
def test_permuted_rows_and_groups(rule):
    rng = np.random.default_rng(0)
    reward = np.round(rng.random((5, 7)), 1).astype(np.float32)
    rows, columns = rng.permutation(5), rng.permutation(7)
    length = jnp.ones((5, 7), int)
    moved = rule(jnp.asarray(reward[rows][:, columns]), length)
    whole = np.asarray(rule(jnp.asarray(reward), length))
    np.testing.assert_allclose(moved, whole[rows][:, columns], rtol=1e-6)


def test_k_and_right_may_be_swept_in_one_jit():
    reward = jnp.array([[1.0, 0.4, 0.0, 0.0, 0.0, 0.0]])
    length = jnp.ones((1, 6), int)

    def f(k, right):
        return baseline.pass_at_k(reward, length, k=k, right=right)

    knobs = [(1, 0.5), (3, 0.5), (3, 0.3)]
    swept = jax.jit(jax.vmap(f))(*(jnp.array(x) for x in zip(*knobs, strict=True)))
    for value, (k, right) in zip(swept, knobs, strict=True):
        np.testing.assert_allclose(value, f(k, right), rtol=1e-6)
    assert len({float(value[0, 0]) for value in swept}) == 3
