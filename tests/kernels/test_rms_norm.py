"""rms_norm: by hand, against its paper in float64, and its gradients against autodiff's."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels.rms_norm import rms_norm


def paper(x, scale, eps):
    """Zhang and Sennrich 2019, equation 4, with the usual eps; float64."""
    x = np.asarray(x, np.float64)
    rows = x.reshape(-1, x.shape[-1])
    normed = [row / np.sqrt(sum(a * a for a in row) / len(row) + eps) * scale for row in rows]
    return np.reshape(normed, x.shape)


def plain(x, scale, eps):
    y = x.astype(jnp.float32)
    y = y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return (y * scale).astype(x.dtype)


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def test_by_hand():
    x, scale = jnp.array([[3.0, 4.0, 0.0, 0.0]]), jnp.array([1.0, 2.0, 3.0, 4.0])
    value, back = jax.vjp(lambda x, scale: rms_norm(x, scale, 0.0), x, scale)
    np.testing.assert_allclose(value, [[1.2, 3.2, 0, 0]], rtol=1e-6)  # the root mean square is 2.5
    x_back, scale_back = back(jnp.array([[1.0, 0.0, 1.0, 0.0]]))
    # (g*scale - unit * mean(g*scale*unit)) / 2.5, with unit (1.2, 1.6, 0, 0)
    np.testing.assert_allclose(x_back, [[0.256, -0.192, 1.2, 0]], rtol=1e-6)
    np.testing.assert_allclose(scale_back, [1.2, 0, 0, 0], rtol=1e-6)


@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)])
@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_is_the_papers_and_its_gradients_are_autodiffs(shape, eps):
    x, scale, g = normal(*shape), normal(6, seed=1), normal(*shape, seed=2)
    got, got_back = jax.vjp(lambda x, scale: rms_norm(x, scale, eps), x, scale)
    _, want_back = jax.vjp(lambda x, scale: plain(x, scale, eps), x, scale)
    np.testing.assert_allclose(got, paper(x, scale, eps), rtol=1e-5, atol=1e-6)
    for a, b in zip(got_back(g), want_back(g), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_rows_of_zeros_and_of_huge_numbers_are_finite():
    x = jnp.stack([jnp.zeros(4), jnp.full(4, 1e18)])
    value, back = jax.vjp(lambda x: rms_norm(x, jnp.ones(4), 1e-6), x)
    np.testing.assert_allclose(value, [[0] * 4, [1] * 4], rtol=1e-6)
    assert np.isfinite(back(jnp.ones((2, 4)))[0]).all()


def test_bfloat16_rows_are_normed_in_float32_and_rounded_once():
    x, scale, g = (normal(5, 64, seed=seed, dtype=jnp.bfloat16) for seed in range(3))
    scale = scale[0].astype(jnp.float32)
    got, back = jax.vjp(lambda x, scale: rms_norm(x, scale, 1e-6), x, scale)
    want = jnp.asarray(paper(x.astype(jnp.float32), np.asarray(scale), 1e-6)).astype(jnp.bfloat16)
    np.testing.assert_array_equal(got.astype(jnp.float32), want.astype(jnp.float32))
    x_back, scale_back = back(g)
    assert x_back.dtype == jnp.bfloat16 and scale_back.dtype == jnp.float32
    want_back = jax.vjp(lambda x, scale: plain(x, scale, 1e-6), x.astype(jnp.float32), scale)[1]
    for a, b in zip((x_back, scale_back), want_back(g.astype(jnp.float32)), strict=True):
        np.testing.assert_allclose(a.astype(jnp.float32), b, rtol=2e-2, atol=1e-3)
