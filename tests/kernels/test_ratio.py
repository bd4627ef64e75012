"""Importance ratios in log space (public case K14)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import ratio

LOG = jnp.array([[0.2, -0.1, 0.4, 9.0], [0.3, 0.3, 9.0, 9.0]])  # 9.0 lies behind the mask
OLD = jnp.array([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.5, -2.5, -3.5]])
MASK = jnp.array([[True, True, True, False], [True, True, False, False]])
EVERY = [ratio.token, ratio.sequence, ratio.sequence_sum, ratio.sequence_token]


def test_token_is_the_difference():
    expected = np.where(MASK, LOG, 0)
    np.testing.assert_allclose(ratio.token(OLD + LOG, OLD, MASK), expected, atol=1e-6)


def test_k14_sequence_is_the_geometric_mean_of_the_row():
    s = jnp.exp(ratio.sequence(OLD + LOG, OLD, MASK))
    np.testing.assert_allclose(s[0, :3], 1.18136041, rtol=1e-6)
    np.testing.assert_allclose(s[1, :2], 1.34985881, rtol=1e-6)
    product = jnp.exp(ratio.sequence_sum(OLD + LOG, OLD, MASK))
    np.testing.assert_allclose(product[:, 0], [1.64872127, 1.8221188], rtol=1e-6)


@pytest.mark.parametrize("rule", EVERY)
def test_exactly_zero_behind_the_mask_whatever_lies_there(rule):
    for rubbish in (jnp.nan, jnp.inf, -jnp.inf):
        logp, old = (jnp.where(MASK, x, rubbish) for x in (OLD + LOG, OLD))
        value, gradient = jax.value_and_grad(lambda x, y: rule(x, y, MASK).sum())(logp, old)
        assert jnp.isfinite(value)
        np.testing.assert_array_equal(jnp.where(MASK, 0, rule(logp, old, MASK)), 0)
        np.testing.assert_array_equal(jnp.where(MASK, 0, gradient), 0)
        assert jnp.isfinite(gradient).all()


@pytest.mark.parametrize("rule", EVERY)
def test_a_wholly_masked_row_is_zero(rule):
    nothing = jnp.zeros_like(MASK)
    np.testing.assert_array_equal(rule(OLD + LOG, OLD, nothing), 0)
    gradient = jax.grad(lambda x: rule(x, OLD, nothing).sum())(OLD + LOG)
    np.testing.assert_array_equal(gradient, 0)


def test_gradients_share_a_row_evenly():
    def first(rule):
        return jax.grad(lambda x: rule(x, OLD, MASK)[0, 0])(OLD + LOG)[0]

    np.testing.assert_allclose(first(ratio.token), [1, 0, 0, 0])
    np.testing.assert_allclose(first(ratio.sequence), [1 / 3, 1 / 3, 1 / 3, 0], rtol=1e-6)
    np.testing.assert_allclose(first(ratio.sequence_sum), [1, 1, 1, 0])


@pytest.mark.parametrize("rule", EVERY)
def test_on_policy_the_log_ratio_is_exactly_zero_and_its_gradient_is_not(rule):
    np.testing.assert_array_equal(rule(OLD, OLD, MASK), 0)
    assert jax.grad(lambda x: rule(x, OLD, MASK).sum())(OLD)[0, 0] > 0


def test_a_nan_in_front_of_the_mask_stays_visible():
    for rule in EVERY:
        assert jnp.isnan(rule(OLD.at[0, 0].set(jnp.nan), OLD, MASK)[0, 0])


def test_sequence_token_has_the_value_of_the_row_and_the_gradient_of_the_token():
    logp = OLD + LOG
    value, vjp = jax.vjp(lambda x: ratio.sequence_token(x, OLD, MASK), logp)
    np.testing.assert_allclose(value, ratio.sequence(logp, OLD, MASK), atol=1e-7)
    np.testing.assert_allclose(value[0], [1 / 6, 1 / 6, 1 / 6, 0], rtol=1e-5)
    for i, t in ((0, 0), (0, 2), (1, 1)):
        at = jnp.zeros_like(LOG).at[i, t].set(1)
        np.testing.assert_array_equal(vjp(at)[0], at)  # no other token's, and not 1/n of it


def loss(rule, advantage):
    """The gradient of the mean over each row of exp(ratio) * advantage."""
    f = lambda x: jnp.where(MASK, jnp.exp(rule(x, OLD, MASK)) * advantage, 0)  # noqa: E731
    n = MASK.sum(1, keepdims=True)
    return jax.grad(lambda x: (f(x) / n).sum())(OLD + LOG)


def test_sequence_token_is_sequence_while_a_row_has_one_advantage():
    by_row = jnp.array([[1.5], [-0.5]])
    same = [loss(rule, by_row) for rule in (ratio.sequence, ratio.sequence_token)]
    np.testing.assert_allclose(*same, rtol=1e-5)
    by_token = jnp.array([[1.5, 0.0, -1.0, 0.0], [1.0, 2.0, 0.0, 0.0]])
    shared, own = (loss(rule, by_token) for rule in (ratio.sequence, ratio.sequence_token))
    s = jnp.exp(jnp.array([0.5 / 3, 0.3]))[:, None] / MASK.sum(1, keepdims=True)  # s_i / n_i
    np.testing.assert_allclose(own, jnp.where(MASK, s * by_token, 0), rtol=1e-5, atol=1e-7)
    mean = by_token.sum(1, keepdims=True) / MASK.sum(1, keepdims=True)
    np.testing.assert_allclose(shared, jnp.where(MASK, s * mean, 0), rtol=1e-5, atol=1e-7)
