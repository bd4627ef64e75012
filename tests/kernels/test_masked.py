"""Masked reductions, and the mask of a completion (public cases T2 and T3)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import masked

X = jnp.array([[1.0, 2.0, jnp.nan], [jnp.inf, 5.0, 7.0]])
MASK = jnp.array([[True, True, False], [False, True, True]])
NOTHING = jnp.zeros((2, 3), bool)


def test_what_lies_behind_the_mask_counts_for_nothing():
    assert masked.masked_sum(X, MASK) == 15
    np.testing.assert_array_equal(masked.masked_sum(X, MASK, 1), [3, 12])
    assert masked.masked_mean(X, MASK) == 3.75
    np.testing.assert_array_equal(masked.masked_mean(X, MASK, 1, keepdims=True), [[1.5], [6]])
    np.testing.assert_array_equal(masked.spread(X, MASK, 1), [1, 2])


def test_the_gradient_behind_the_mask_is_zero():
    gradient = jax.grad(lambda x: masked.masked_mean(x, MASK))(X)
    np.testing.assert_array_equal(gradient, [[0.25, 0.25, 0], [0, 0.25, 0.25]])


@pytest.mark.parametrize("ddof", [0, 1])
def test_std_is_numpys(ddof):
    np.testing.assert_allclose(
        masked.masked_std(X, MASK, 1, ddof=ddof),
        [np.std([1, 2], ddof=ddof), np.std([5, 7], ddof=ddof)],
        rtol=1e-6,
    )


def test_nothing_to_reduce_gives_zero():
    for reduce in (masked.masked_sum, masked.masked_mean, masked.masked_std, masked.spread):
        assert reduce(X, NOTHING) == 0
    one = jnp.array([[True, False, False], [False, False, False]])
    np.testing.assert_array_equal(masked.masked_std(X, one, 1, ddof=1), [0, 0])


def test_spread_of_equal_floats_is_exactly_zero_where_the_std_is_not():
    x = jnp.full((1, 8), 0.7, jnp.float32)
    everywhere = jnp.ones_like(x, bool)
    assert masked.spread(x, everywhere) == 0
    assert masked.masked_std(x, everywhere) > 0  # the trap that `spread` is there for


def test_bounded_exp_neither_overflows_nor_hides_nan():
    x = jnp.array([-1e4, 0.5, 1e4], jnp.float32)
    np.testing.assert_allclose(masked.bounded_exp(x), np.exp([-20, 0.5, 20]), rtol=1e-5)
    gradient = jax.grad(lambda x: masked.bounded_exp(x).sum())(x)
    np.testing.assert_allclose(gradient, [0, np.exp(0.5), 0], rtol=1e-5)
    assert jnp.isnan(masked.bounded_exp(jnp.array(jnp.nan)))


def test_the_mask_runs_through_the_first_eos_even_where_pad_is_eos():
    ids = jnp.array([[5, 9, 2, 2, 2], [5, 6, 7, 8, 9], [2, 7, 2, 7, 7]])
    expected = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    np.testing.assert_array_equal(masked.completion_mask(ids, (2,)), expected)
    np.testing.assert_array_equal(masked.first_eos(ids, (2,)), [2, 5, 0])


def test_any_of_several_eos_ids_ends_a_completion():
    ids = jnp.array([[5, 128009, 2, 2, 2], [5, 2, 128009, 7, 7]])
    expected = [[1, 1, 0, 0, 0], [1, 1, 0, 0, 0]]
    for eos in ((2, 128009), jnp.array([2, 128009])):
        np.testing.assert_array_equal(masked.completion_mask(ids, eos), expected)
    assert masked.completion_mask(ids, ()).all()  # a model that never stops
