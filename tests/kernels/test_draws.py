"""Chances of drawing answers from a group."""

from math import comb

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels.draws import chance_all_wrong, tally

NAN = jnp.nan


def test_a_tally_by_hand():
    reward = jnp.array([[1.0, 0.5, NAN, 0.6], [NAN, NAN, NAN, NAN]])
    is_right, rights, wrongs = tally(reward, 0.5)
    np.testing.assert_array_equal(is_right, [[True, False, False, True], [False] * 4])
    np.testing.assert_array_equal(rights, [[2], [0]])
    np.testing.assert_array_equal(wrongs, [[1], [0]])


@pytest.mark.parametrize("k", [1, 3, 16, 32])
def test_the_chance_is_a_ratio_of_binomials(k):
    reward = np.arange(32) < np.arange(33)[:, None]  # 0 to 32 right
    with jax.enable_x64(True):
        value = chance_all_wrong(jnp.asarray(reward, float), k=k, right=0.5)[:, 0]
    expected = [comb(32 - rights, k) / comb(32, k) for rights in range(33)]
    np.testing.assert_allclose(value, expected, rtol=1e-9, atol=0)


def test_fewer_rows_than_k_are_all_drawn():
    reward = jnp.array([[0.0, 0.0, NAN, NAN], [0.0, 1.0, NAN, NAN], [NAN] * 4])
    chance = chance_all_wrong(reward, k=3, right=0.5)
    np.testing.assert_array_equal(chance, [[1], [0], [1]])


def test_large_groups_stay_finite():
    reward = jnp.ones((1, 2048), jnp.float32).at[0, :2].set(0)
    chance = chance_all_wrong(reward, k=2048, right=0.5)
    np.testing.assert_array_equal(chance, 0)
