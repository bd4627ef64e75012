"""Weights for a sampler that is not quite the trainer's policy."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import correction
from grpo_jax.rules import call
from tests.cases import CORRECTION

RHO = jnp.array([[0.5, 1.5, 4.0, 9.0], [1.2, 1.1, 9.0, 9.0]])  # 9.0 lies behind the mask
SAMPLER = jnp.array([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.5, -2.5, -3.5]])
OLD = SAMPLER + jnp.log(RHO)
MASK = jnp.array([[True, True, True, False], [True, True, False, False]])


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (correction.none, [[1, 1, 1, 1], [1, 1, 1, 1]]),
        (partial(correction.token_truncate, cap=3), [[0.5, 1.5, 3, 1], [1.2, 1.1, 1, 1]]),
        (partial(correction.token_mask, low=0.6, high=3), [[0, 1.5, 0, 1], [1.2, 1.1, 1, 1]]),
        (partial(correction.sequence_truncate, cap=2), [[2, 2, 2, 1], [1.32, 1.32, 1, 1]]),
        (partial(correction.sequence_mask, low=0, high=2), [[0, 0, 0, 1], [1.32, 1.32, 1, 1]]),
        (partial(correction.sequence_mask, low=2, high=4), [[3, 3, 3, 1], [0, 0, 1, 1]]),
    ],
)
def test_hand_computed(rule, expected):
    np.testing.assert_allclose(rule(OLD, SAMPLER, MASK), expected, rtol=1e-5)


def weigh(rule, old, sampler):
    """With a policy that is still the one at rollout, and bad answers."""
    return call(rule, old, sampler, MASK, logp=old, advantage=jnp.array([[-1.0], [-1.0]]))


@pytest.mark.parametrize("rule", CORRECTION.values(), ids=CORRECTION)
def test_an_exact_sampler_needs_no_correction(rule):
    np.testing.assert_array_equal(weigh(rule, SAMPLER, SAMPLER), 1)


@pytest.mark.parametrize("rule", CORRECTION.values(), ids=CORRECTION)
def test_no_gradient_and_no_rubbish_from_behind_the_mask(rule):
    for rubbish in (jnp.nan, jnp.inf, -jnp.inf):
        old, sampler = (jnp.where(MASK, x, rubbish) for x in (OLD, SAMPLER))
        np.testing.assert_allclose(weigh(rule, old, sampler), weigh(rule, OLD, SAMPLER))
        gradients = jax.grad(lambda a, b: weigh(rule, a, b).sum(), argnums=(0, 1))(old, sampler)
        np.testing.assert_array_equal(jnp.stack(gradients), 0)


def test_a_product_that_would_overflow_stays_finite():
    far = SAMPLER + 100
    for rule in CORRECTION.values():
        assert jnp.isfinite(weigh(rule, far, SAMPLER)).all()
