"""What is subtracted from a reward."""

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import baseline

NAN = jnp.nan
REWARD = jnp.array([[1.0, 0.0, 0.0, 1.0], [2.0, 0.5, -0.5, 0.0]])
LENGTH = jnp.array([[4, 1, 1, 2], [1, 2, 1, 4]])
GROUP_BASELINES = [baseline.group_mean, baseline.leave_one_out, baseline.length_weighted]


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


@pytest.mark.parametrize("rule", GROUP_BASELINES)
def test_a_tied_group_is_centred_to_exactly_zero(rule):
    reward = jnp.repeat(jnp.array([[0.7], [0.3], [1 / 3], [1e6 + 0.1]], jnp.float32), 8, axis=1)
    length = jnp.arange(32).reshape(4, 8)
    np.testing.assert_array_equal(reward - rule(reward, length), 0)
    holed = reward.at[0, 0].set(NAN)
    np.testing.assert_array_equal((holed - rule(holed, length))[1:], 0)
    np.testing.assert_array_equal((holed - rule(holed, length))[0, 1:], 0)


def test_a_row_alone_among_the_unscorable_is_its_own_baseline():
    reward = jnp.array([[NAN, 0.4, NAN, NAN]])
    for rule in GROUP_BASELINES:
        assert rule(reward, LENGTH[:1])[0, 1] == reward[0, 1]


def test_batch_mean_is_no_group_baseline():
    reward = jnp.array([[1.0, 1.0], [0.0, 0.0]])
    centred = reward - baseline.batch_mean(reward, LENGTH[:, :2])
    np.testing.assert_array_equal(centred, [[0.5, 0.5], [-0.5, -0.5]])
    tied = jnp.full((3, 4), 0.7, jnp.float32)
    np.testing.assert_array_equal(tied - baseline.batch_mean(tied, jnp.ones((3, 4), int)), 0)


def test_no_length_at_all_is_finite():
    assert jnp.isfinite(baseline.length_weighted(REWARD, jnp.zeros_like(LENGTH))).all()
