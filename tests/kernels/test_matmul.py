"""Products and their gradients: by hand, against autodiff of the plain product, and in bfloat16."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels.matmul import _SHORT, lookup, matmul, outer
from grpo_jax.models.linear import dot, gated


def normal(*shape, seed=0, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def test_by_hand():
    x, w = jnp.array([[1.0, 2.0]]), jnp.array([[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]])
    value, back = jax.vjp(matmul, x, w)
    assert value.tolist() == [[15, 18, 21]]
    x_back, w_back = back(jnp.array([[1.0, 0.0, 2.0]]))
    assert x_back.tolist() == [[13, 22]] and w_back.tolist() == [[1, 0, 2], [2, 0, 4]]


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("inner", "outside"), [(3, 8), (8, 3)])
def test_gradients_are_those_of_the_plain_product(inner, outside, transposed):
    x, g = normal(7, inner), normal(7, outside, seed=2)
    w = normal(outside, inner, seed=1) if transposed else normal(inner, outside, seed=1)

    def plain(x, w):
        return x @ (w.T if transposed else w)

    want, want_back = jax.vjp(plain, x, w)
    got, got_back = jax.vjp(lambda x, w: matmul(x, w, transposed), x, w)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for a, b in zip(got_back(g), want_back(g), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_outer_is_the_sum_of_the_rows_products():
    for a, b in ((normal(5, 2), normal(5, 6)), (normal(5, 6), normal(5, 2))):
        want = sum(np.outer(x, y) for x, y in zip(a, b, strict=True))
        np.testing.assert_allclose(outer(a, b), want, rtol=1e-5, atol=1e-6)


def dots_of(function, *arguments):
    """Dtypes of the factors of each product in a trace, calls included."""

    def walk(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "dot_general":
                yield tuple(v.aval.dtype.name for v in equation.invars)
            for value in equation.params.values():
                inner = getattr(value, "jaxpr", value)
                if hasattr(inner, "eqns"):
                    yield from walk(inner)

    return list(walk(jax.make_jaxpr(function)(*arguments).jaxpr))


@pytest.mark.parametrize("product", [matmul, lambda x, w: gated(x, w.reshape(8, 2, 3))])
def test_bfloat16_stays_bfloat16_going_back(product):
    """And the gradient of float32 weights is a float32 sum, not rounded on the way."""
    x, w = normal(64, 8, dtype=jnp.bfloat16), normal(8, 6, seed=1)
    gradient = jax.grad(lambda x, w: product(x, w).astype(jnp.float32).sum(), argnums=(0, 1))
    assert set(dots_of(gradient, x, w)) == {("bfloat16", "bfloat16")}
    x_back, w_back = gradient(x, w)
    assert x_back.dtype == jnp.bfloat16 and w_back.dtype == jnp.float32
    if product is matmul:
        exact = np.asarray(x, np.float64).sum(0)
        np.testing.assert_allclose(w_back[:, 0], exact, rtol=1e-5, atol=1e-5)


def test_gated_is_silu_of_one_half_times_the_other():
    x, w, g = normal(2, 5, 4), normal(4, 2, 3, seed=1), normal(2, 5, 3, seed=2)

    def plain(x, w):
        y = jnp.einsum("btd,dcf->btcf", x, w)
        return jax.nn.silu(y[..., 0, :]) * y[..., 1, :]

    (want, want_back), (got, got_back) = (jax.vjp(f, x, w) for f in (plain, gated))
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    for a, b in zip(got_back(g), want_back(g), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_dot_contracts_several_axes():
    x, w = normal(2, 5, 3, 4), normal(3, 4, 2, 6, seed=1)
    np.testing.assert_allclose(
        dot(x, w, 2), np.einsum("btij,ijkl->btkl", x, w), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("rows", [9, _SHORT + 1])
def test_gradient_of_a_lookup_adds_up_where_a_row_is_read_twice(rows):
    table, ids = normal(rows, 4), jnp.array([[0, 3, 3], [rows - 1, 3, 0]])
    g = normal(2, 3, 4, seed=1)
    value, back = jax.vjp(lambda table: lookup(table, ids), table)
    np.testing.assert_array_equal(value, table[ids])
    want = np.zeros((rows, 4), np.float32)
    np.add.at(want, np.asarray(ids), np.asarray(g))
    np.testing.assert_allclose(back(g)[0], want, rtol=1e-5, atol=1e-6)
