"""Answers that were cut off (the DAPO paper's overlong filtering)."""

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.kernels import aggregation, truncation

TRUNCATED = jnp.array([False, True, False])


def test_keep_keeps_all_and_mask_those_that_ended():
    np.testing.assert_array_equal(truncation.keep(TRUNCATED), [True, True, True])
    np.testing.assert_array_equal(truncation.mask(TRUNCATED), [True, False, True])
    for rule in (truncation.keep, truncation.mask):
        assert rule(TRUNCATED).dtype == bool
        np.testing.assert_array_equal(jax.jit(rule)(TRUNCATED), rule(TRUNCATED))


def test_a_masked_row_stays_in_the_count_of_rows_and_leaves_that_of_tokens():
    mask = jnp.ones((3, 4), bool)
    group = jnp.zeros(3, int)
    kept = mask & truncation.mask(TRUNCATED)[:, None]
    rows = aggregation.sequence_mean(kept, group)
    np.testing.assert_allclose(rows[:, 0], [1 / 12, 0, 1 / 12], rtol=1e-6)
    tokens = aggregation.token_mean(kept, group)
    np.testing.assert_allclose(tokens[:, 0], [1 / 8, 0, 1 / 8], rtol=1e-6)
