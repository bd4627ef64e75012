"""KL estimators (public cases K11 and K13)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import kl, ratio


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
    for rule in (kl.k1, kl.k2, kl.k3, kl.k3_plus, kl.absolute):
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


@pytest.mark.parametrize("d", [0.5, -0.5, 0.0])
def test_k3_plus_has_the_value_of_k3_and_the_gradient_of_k2(d):
    value, gradient = at(kl.k3_plus, d)
    assert value == at(kl.k3, d)[0]
    assert gradient == pytest.approx(d)


def test_absolute():
    assert at(kl.absolute, 0.5) == (0.5, 1)
    assert at(kl.absolute, -0.5) == (0.5, -1)


def weighted(level, logp, old, ref, mask):
    def f(x):
        return kl.k3_weighted(x, ref, log_ratio=level(x, old, mask))

    return f(logp), jax.grad(lambda x: jnp.where(mask, f(x), 0).sum())(logp)


def test_k3_weighted_against_float64_of_its_definition():
    rng = np.random.default_rng(1)
    logp, old, ref = (-rng.exponential(1.0, (3, 5)) for _ in range(3))
    mask = np.arange(5) < np.array([[5], [2], [0]])
    d, log = logp - ref, logp - old
    k3 = np.exp(-d) + d - 1
    with jax.enable_x64(True):
        value, gradient = weighted(ratio.token, *map(jnp.asarray, (logp, old, ref, mask)))
        np.testing.assert_allclose(value, np.where(mask, np.exp(log), 1) * k3, rtol=1e-12)
        np.testing.assert_allclose(gradient, np.where(mask, np.exp(log) * d, 0), atol=1e-12)  # w d

        value, gradient = weighted(ratio.sequence, *map(jnp.asarray, (logp, old, ref, mask)))
        n = np.maximum(mask.sum(1, keepdims=True), 1)
        w = np.exp(np.where(mask, log, 0).sum(1, keepdims=True) / n)
        np.testing.assert_allclose(value[:2][mask[:2]], (w * k3)[mask], rtol=1e-12)
        own = w * (1 - np.exp(-d)) + w / n * np.where(mask, k3, 0).sum(1, keepdims=True)
        np.testing.assert_allclose(gradient, np.where(mask, own, 0), atol=1e-12)


def test_k3_weighted_has_the_reverse_kls_gradient_off_policy_where_k3_has_not():
    """Exact, over a vocabulary of 6: samples of `old`, the policy elsewhere."""
    logits, old, ref = jax.random.normal(jax.random.key(3), (3, 6))
    q, ref = jax.nn.softmax(old), jax.nn.log_softmax(ref)

    def expected(logits, estimator):
        logp = jax.nn.log_softmax(logits)
        return (q * estimator(logp[None], ref[None], jnp.log(q)[None])[0]).sum()

    def true(logits):
        logp = jax.nn.log_softmax(logits)
        return (jnp.exp(logp) * (logp - ref)).sum()

    def unbiased(logp, ref, old):
        return kl.k3_weighted(logp, ref, log_ratio=logp - old)

    value, gradient = jax.value_and_grad(true)(logits)
    mine, my_gradient = jax.value_and_grad(expected)(logits, unbiased)
    assert float(mine) == pytest.approx(float(value), rel=1e-5)
    np.testing.assert_allclose(my_gradient, gradient, atol=1e-6)
    biased = jax.grad(expected)(logits, lambda logp, ref, old: kl.k3(logp, ref))
    assert jnp.abs(biased - gradient).max() > 0.1


def test_k3_weighted_stays_finite_far_away_and_its_weight_may_be_absent():
    far = jnp.array([[-200.0, 0.0]])
    value, gradient = weighted(ratio.token, far, far[:, ::-1], jnp.zeros((1, 2)), far <= 0)
    assert jnp.isfinite(value).all()
    assert jnp.isfinite(gradient).all()
    logp, ref = jnp.array([[-1.0, -2.0]]), jnp.array([[-1.5, -1.0]])
    in_the_reward = kl.k3_weighted(logp, ref, log_ratio=jnp.zeros_like(logp))
    np.testing.assert_array_equal(in_the_reward, kl.k3(logp, ref))


def test_exact_is_what_it_is_given_with_its_gradient():
    given = jnp.array([[0.25, 0.5]])
    value, vjp = jax.vjp(lambda x: kl.exact(given, given, exact=x), given)
    np.testing.assert_array_equal(value, given)
    np.testing.assert_array_equal(vjp(jnp.ones_like(given))[0], 1)


def test_the_absolute_value_is_at_rest_where_a_run_begins():
    same = jnp.full((2, 3), -1.5)
    np.testing.assert_array_equal(jax.grad(lambda x: kl.absolute(x, same).sum())(same), 0)
