"""Soft overlong punishment (DAPO eq. 13; public case K19)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.kernels import shaping

LENGTH = jnp.array([[79, 80, 81, 90, 99, 100, 101]])
TRUNCATED = jnp.zeros_like(LENGTH, bool)
REWARD = jnp.zeros(LENGTH.shape)


def test_none_needs_no_length_and_changes_nothing():
    np.testing.assert_array_equal(shaping.none(REWARD + 0.5, LENGTH, TRUNCATED), REWARD + 0.5)


def test_the_penalty_grows_from_the_buffer_to_the_limit():
    shaped = shaping.overlong(REWARD, LENGTH, TRUNCATED, limit=100)
    np.testing.assert_allclose(shaped, [[0, 0, -0.05, -0.5, -0.95, -1, -1]], atol=1e-7)


def test_the_papers_constants():
    length = jnp.array([[16384, 18432, 20480, 20481]])
    reward = jnp.ones(length.shape)
    shaped = shaping.overlong(reward, length, jnp.zeros_like(length, bool), limit=20480)
    np.testing.assert_allclose(shaped, [[1, 0.5, 0, 0]], atol=1e-7)


def test_the_buffer_may_be_empty_and_the_penalty_any_size():
    shaped = shaping.overlong(REWARD, LENGTH, TRUNCATED, limit=100, buffer_share=0.0, penalty=0.25)
    np.testing.assert_array_equal(shaped, [[0, 0, 0, 0, 0, 0, -0.25]])


def test_an_unscorable_reward_stays_unscorable():
    shaped = shaping.overlong(REWARD.at[0, 5].set(jnp.nan), LENGTH, TRUNCATED, limit=100)
    assert jnp.isnan(shaped[0, 5])
    assert jnp.isfinite(jnp.delete(shaped[0], 5)).all()


def test_constants_may_be_traced():
    shape = partial(shaping.overlong, REWARD, LENGTH, TRUNCATED)
    limits = jnp.array([100, 50])
    swept = jax.jit(jax.vmap(lambda limit: shape(limit=limit)))(limits)
    for row, limit in zip(swept, (100, 50), strict=True):
        np.testing.assert_allclose(row, shape(limit=limit), atol=1e-6)
