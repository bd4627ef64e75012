"""KL estimators (public cases K11 and K13)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import kl


def at(rule, d):
    """Value and gradient with respect to logp, at logp - ref_logp = d."""
    f = lambda x: rule(x, jnp.full((1, 1), -1.0 - d, jnp.float32))[0, 0]  # noqa: E731
    value, gradient = jax.value_and_grad(f)(jnp.full((1, 1), -1.0, jnp.float32))
    return float(value), float(gradient[0, 0])


@pytest.mark.parametrize(
    ("d", "k1", "k2", "k3", "slope"),
    [
        (0.5, 0.5, 0.125, 0.10653066, 0.39346934),
        (-0.5, -0.5, 0.125, 0.14872122, -0.64872122),
        (0.0, 0.0, 0.0, 0.0, 0.0),
    ],
)
def test_k13_values_and_gradients(d, k1, k2, k3, slope):
    assert at(kl.k1, d) == pytest.approx((k1, 1), rel=1e-6)
    assert at(kl.k2, d) == pytest.approx((k2, d), rel=1e-6)
    assert at(kl.k3, d) == pytest.approx((k3, slope), rel=1e-5)
    assert at(kl.none, d) == (0, 0)


def test_k11_a_reference_far_above_the_policy_overflows_nothing():
    value, gradient = at(kl.k3, -100.0)
    assert np.isfinite(value)
    assert np.isfinite(gradient)
    assert value == pytest.approx(np.expm1(20) - 20, rel=1e-5)


def test_k11_the_guard_changes_nothing_within_ten_nats_nor_on_the_safe_side():
    d = np.array([-10.0, -3.0, -0.1, 0.1, 3.0, 10.0, 50.0])
    with jax.enable_x64(True):
        logp = jnp.asarray(d)[None]
        value, vjp = jax.vjp(lambda x: kl.k3(x, jnp.zeros_like(x)), logp)
        (gradient,) = vjp(jnp.ones_like(value))
    np.testing.assert_allclose(value[0], np.exp(-d) + d - 1, rtol=1e-12)
    np.testing.assert_allclose(gradient[0], 1 - np.exp(-d), rtol=1e-12)


def test_k11_a_nan_stays_visible():
    for rule in (kl.k1, kl.k2, kl.k3):
        assert jnp.isnan(rule(jnp.full((1, 1), jnp.nan), jnp.zeros((1, 1)))).all()


def test_k3_keeps_its_digits_near_zero_and_is_never_negative():
    d = jnp.linspace(-2, 2, 4001, dtype=jnp.float32)[None]
    assert (kl.k3(d, jnp.zeros_like(d)) >= 0).all()
    value = kl.k3(jnp.full((1, 1), 1e-4), jnp.zeros((1, 1)))
    assert float(value[0, 0]) == pytest.approx(5e-9, rel=0.02)  # exp(x) - 1 - x gives 0 or 1e-8


def test_k1_and_k3_are_the_kl_in_expectation_under_the_policy():
    logits = jax.random.normal(jax.random.key(0), (2, 6))
    logp, ref = jax.nn.log_softmax(logits)
    exact = jnp.sum(jnp.exp(logp) * (logp - ref))
    for rule in (kl.k1, kl.k3):
        mean = jnp.sum(jnp.exp(logp) * rule(logp[None], ref[None])[0])
        assert float(mean) == pytest.approx(float(exact), rel=1e-5)
