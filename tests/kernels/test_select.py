"""Which tokens have a policy term."""

from fractions import Fraction
from functools import partial
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import select
from grpo_jax.rules import asks, sees_all_rows

MASK = jnp.array([[True, True, True, False], [True, True, False, False]])
ENTROPY = jnp.array([[0.1, 0.5, 0.3, 9.0], [0.2, 0.4, 9.0, 9.0]])


def top(share, entropy=ENTROPY, mask=MASK):
    return np.asarray(select.top_entropy(mask, entropy=entropy, share=share))


def test_none_is_the_mask():
    np.testing.assert_array_equal(select.none(MASK), MASK)


def test_top_entropy_by_hand():
    # five tokens, 0.1 to 0.5: share 0.2 puts the threshold at place 3.2, 0.42
    np.testing.assert_array_equal(top(0.2), [[0, 1, 0, 0], [0, 0, 0, 0]])
    # 0.25: place 3, that is 0.4 itself, which is kept
    np.testing.assert_array_equal(top(0.25), [[0, 1, 0, 0], [0, 1, 0, 0]])
    np.testing.assert_array_equal(top(0.5), [[0, 1, 1, 0], [0, 1, 0, 0]])
    np.testing.assert_array_equal(top(0.0), [[0, 1, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(top(1.0), MASK)


def test_tokens_that_are_tied_at_the_threshold_are_all_kept():
    tied = jnp.array([[0.0, 0.0, 0.5, 9.0], [0.0, 0.0, 9.0, 9.0]])
    np.testing.assert_array_equal(top(0.2, tied), [[0, 0, 1, 0], [0, 0, 0, 0]])
    np.testing.assert_array_equal(top(0.25, tied), MASK)  # place 3 is a zero, and so are the rest
    np.testing.assert_array_equal(top(0.2, jnp.full((2, 4), 0.7)), MASK)


def test_against_numpys_quantile_in_float64():
    rng = np.random.default_rng(5)
    with jax.enable_x64(True):
        for _ in range(20):
            mask = rng.random((6, 9)) < 0.6
            entropy, share = rng.exponential(1.0, (6, 9)), rng.random()
            expected = mask & (entropy >= np.quantile(entropy[mask], 1 - share))
            np.testing.assert_array_equal(
                top(share, jnp.asarray(entropy), jnp.asarray(mask)), expected
            )


@pytest.mark.parametrize("share", ["0.1", "0.2", "0.3", "0.05", "0.7"])
def test_float32_rounding_costs_no_token(share):
    """The place is often a whole number, 0.8 * 40: a rounding above it would lose that token."""
    kept = jax.jit(partial(select.top_entropy, share=float(share)))
    entropy = jnp.arange(400, dtype=jnp.float32)[None] / 7
    for n in range(1, 400, 3):
        mask = jnp.arange(400)[None] < n
        expected = n - ceil((1 - Fraction(share)) * (n - 1))
        assert int(kept(mask, entropy=entropy).sum()) == expected


def test_what_lies_behind_the_mask_reaches_nothing():
    for rubbish in (jnp.nan, jnp.inf, -jnp.inf):
        np.testing.assert_array_equal(top(0.25, jnp.where(MASK, ENTROPY, rubbish)), top(0.25))
        np.testing.assert_array_equal(
            top(0.25, jnp.full((2, 4), rubbish), jnp.zeros_like(MASK)), False
        )


def test_a_nan_within_the_mask_is_selected_so_that_the_loss_shows_it():
    assert top(0.25, ENTROPY.at[0, 0].set(jnp.nan))[0, 0]


def test_share_may_be_swept_and_rows_are_compared():
    swept = jax.jit(jax.vmap(lambda share: select.top_entropy(MASK, entropy=ENTROPY, share=share)))
    kept = swept(jnp.array([0.0, 0.25, 0.5, 1.0]))
    np.testing.assert_array_equal(kept.sum((1, 2)), [1, 2, 3, 5])
    rule = partial(select.top_entropy, share=0.2)
    assert sees_all_rows(rule)
    assert asks(rule, "entropy")
    assert not sees_all_rows(select.none)
