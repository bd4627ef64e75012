"""Which groups are kept."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.kernels import filter

NAN = jnp.nan
SCORE = jnp.array(
    [
        [1.0, 1.0, 1.0, 1.0],  # all right
        [0.0, 0.0, 0.0, 0.0],  # all wrong
        [1.0, 0.0, 0.0, 0.0],
        [NAN, 1.0, 0.0, NAN],  # mixed among those that could be scored
        [NAN, 1.0, 1.0, 1.0],
        [NAN, NAN, NAN, NAN],
    ]
)


def test_none_keeps_every_group():
    assert filter.none(SCORE).all()


def test_mixed_keeps_the_groups_that_disagree():
    np.testing.assert_array_equal(jax.jit(filter.mixed)(SCORE), [0, 0, 1, 1, 0, 0])


def test_equal_rewards_are_not_mixed_whatever_their_rounding():
    for value in (0.7, 0.3, 1 / 3):
        for group in (8, 12):
            assert not filter.mixed(jnp.full((1, group), value, jnp.float32)).any()


def test_tol_is_the_span_that_still_counts_as_equal():
    score = jnp.array([[0.5, 0.6]])
    assert filter.mixed(score, tol=0.05).all()
    assert not filter.mixed(score, tol=0.2).any()


def test_pass_range_is_strict_on_both_sides():
    keep = partial(filter.pass_range, SCORE)
    np.testing.assert_array_equal(keep(low=0.0, high=1.0), [0, 0, 1, 1, 0, 0])
    np.testing.assert_array_equal(keep(low=0.25, high=1.0), [0, 0, 0, 1, 0, 0])
    np.testing.assert_array_equal(keep(low=-1.0, high=0.5), [0, 1, 1, 0, 0, 0])
