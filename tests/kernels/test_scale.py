"""What the centred reward is divided by."""

from functools import partial

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import scale

NAN = jnp.nan
REWARD = jnp.array([[1.0, 0.0, 0.0, 1.0], [2.0, 0.5, -0.5, 0.0]])
CENTERED = REWARD - REWARD.mean(1, keepdims=True)
EVERY = {
    "none": scale.none,
    "group_std": partial(scale.group_std, ddof=0, eps=0.0),
    "batch_std": partial(scale.batch_std, ddof=0, eps=0.0),
    "group_mean": scale.group_mean,
    "whiten": partial(scale.whiten, ddof=0, eps=0.0),
}


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [0.0, 1e-4, 0.5])
def test_std_of_the_group_of_the_batch_and_whitening(ddof, eps):
    reward, centered = np.asarray(REWARD), np.asarray(CENTERED)
    group = centered / (reward.std(1, ddof=ddof, keepdims=True) + eps)
    np.testing.assert_allclose(
        scale.group_std(CENTERED, REWARD, ddof=ddof, eps=eps), group, rtol=1e-5
    )
    batch = centered / (reward.std(ddof=ddof) + eps)
    np.testing.assert_allclose(
        scale.batch_std(CENTERED, REWARD, ddof=ddof, eps=eps), batch, rtol=1e-5
    )
    shifted = centered + 0.25
    white = (shifted - shifted.mean()) / (shifted.std(ddof=ddof) + eps)
    np.testing.assert_allclose(
        scale.whiten(CENTERED + 0.25, REWARD, ddof=ddof, eps=eps), white, rtol=1e-5
    )


def test_batch_std_is_of_the_raw_rewards():
    reward = jnp.array([[10.0, 12.0], [0.0, 2.0]])
    centered = jnp.array([[-1.0, 1.0], [-1.0, 1.0]])
    expected = np.asarray(centered) / np.std([10, 12, 0, 2])
    np.testing.assert_allclose(
        scale.batch_std(centered, reward, ddof=0, eps=0.0), expected, rtol=1e-6
    )


def test_group_mean_divides_by_the_mean_where_there_is_one():
    reward = jnp.array([[1.0, 0.0, 0.0, 0.0], [0.0] * 4, [-1.0, 0.5, 0.0, 0.0]])
    centered = reward - reward.mean(1, keepdims=True)
    expected = [[3, -1, -1, -1], [0] * 4, [0] * 4]
    np.testing.assert_array_equal(scale.group_mean(centered, reward), expected)


def test_rewards_that_cancel_to_a_rounding_error_are_not_blown_up():
    reward = jnp.array([[0.1, 0.2, -0.3, 0.0]], jnp.float32)
    assert 0 < abs(float(reward.mean())) < 1e-7 or reward.mean() == 0
    np.testing.assert_array_equal(scale.group_mean(reward, reward), 0)


@pytest.mark.parametrize("rule", EVERY.values(), ids=EVERY)
def test_unscorable_rows_get_zero_and_leave_the_statistics(rule):
    reward = REWARD.at[0, 1].set(NAN).at[1, 3].set(NAN)
    columns = jnp.array([[0, 2, 3], [0, 1, 2]])
    kept = jnp.take_along_axis(reward, columns, 1)
    centered = kept - 0.25
    scaled = rule(reward - 0.25, reward)
    assert scaled[0, 1] == 0
    assert scaled[1, 3] == 0
    np.testing.assert_allclose(
        jnp.take_along_axis(scaled, columns, 1), rule(centered, kept), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("rule", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("value", [0.7, 0.0, NAN])
def test_a_batch_with_no_spread_divides_by_one(rule, value):
    reward = jnp.full((2, 8), value, jnp.float32)
    scaled = rule(jnp.zeros_like(reward) * reward, reward)
    np.testing.assert_array_equal(scaled, 0)


def test_a_tied_group_keeps_what_another_baseline_gave_it():
    reward = jnp.array([[1.0, 1.0], [0.0, 1.0]])
    centered = reward - 0.75
    scaled = scale.group_std(centered, reward, ddof=0, eps=0.0)
    np.testing.assert_array_equal(scaled, [[0.25, 0.25], [-1.5, 0.5]])
    white = scale.whiten(centered, reward, ddof=0, eps=0.0)
    np.testing.assert_allclose(white.mean(), 0, atol=1e-7)
    np.testing.assert_allclose(white.std(), 1, rtol=1e-6)


def test_whitening_leaves_a_dead_group_at_exactly_zero():
    centered = jnp.array([[0.0, 0.0, 0.0], [0.7, -0.1, 0.3]])  # as length_weighted leaves them
    reward = jnp.array([[0.7, 0.7, 0.7], [1.0, 0.2, 0.6]])
    white = scale.whiten(centered, reward, ddof=0, eps=1e-8)
    np.testing.assert_array_equal(white[0], 0)
    assert (jnp.abs(white[1]) > 0.1).all()
