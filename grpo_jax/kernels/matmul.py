"""The matrix product of the model and of the head: factors in one dtype, summed in float32.

The backward pass is written out for two reasons. With bfloat16 factors, the gradient of a float32
product is float32, and both products of the backward pass would be too: here it is rounded to the
factors' dtype first. And the gradient of a weight is formed with its longer side last, without a
transposed copy of the activations, which on a CPU costs as much as the product itself.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul(
    x: Float[Array, "N I"], w: Float[Array, "I O"] | Float[Array, "O I"], transposed: bool = False
) -> Float[Array, "N O"]:
    """x @ w, or x @ w.T where `transposed` -> float32.

    The factors have x's dtype (w is converted). Gradients have the dtypes of x and w; that of w is
    a float32 sum, rounded once. Reverse mode only.
    """
    return _product(x, w.astype(x.dtype), 1, 1 if transposed else 0)


def _forward(x, w, transposed):
    return matmul(x, w, transposed), (x, w)


def _backward(transposed, saved, cotangent):
    return matmul_gradients(*saved, cotangent, transposed)


def matmul_gradients(
    x: Float[Array, "N I"],
    w: Float[Array, "I O"] | Float[Array, "O I"],
    cotangent: Float[Array, "N O"],
    transposed: bool = False,
) -> tuple[Float[Array, "N I"], Float[Array, "..."]]:
    """Those of `matmul(x, w, transposed)` in x and w, in their dtypes."""
    g = cotangent.astype(x.dtype)
    back = _product(g, w.astype(x.dtype), 1, 0 if transposed else 1).astype(x.dtype)
    rows, columns = (g, x) if transposed else (x, g)
    return back, outer(rows, columns).astype(w.dtype)


def outer(a: Float[Array, "N I"], b: Float[Array, "N O"]) -> Float[Array, "I O"]:
    """a.T @ b -> float32, with the longer side of the two in the place where it is quick."""
    return _product(a, b, 0, 0) if a.shape[1] <= b.shape[1] else _product(b, a, 0, 0).T


def _product(a, b, axis: int, other: int):
    contract = (((axis,), (other,)), ((), ()))
    return lax.dot_general(a, b, contract, preferred_element_type=jnp.float32)


matmul.defvjp(_forward, _backward)


@jax.custom_vjp
def lookup(table: Float[Array, "V D"], ids) -> Float[Array, "*b D"]:
    """table[ids], in the table's dtype. The gradient is a product with the one-hot ids where the
    table is short: a scatter-add goes row by row on a CPU, and in no fixed order on a GPU."""
    return table[ids]


_SHORT = 4096  # rows; on longer tables the one-hot product costs more than the scatter


def _lookup_forward(table, ids):
    return table[ids], (table, ids)


def _lookup_backward(saved, cotangent):
    table, ids = saved
    V, D = table.shape
    ids, g = ids.reshape(-1), cotangent.reshape(-1, D)
    if V <= _SHORT:
        hot = (ids[:, None] == jnp.arange(V)).astype(g.dtype)
        return outer(hot, g).astype(table.dtype), None
    zero = jnp.zeros((V, D), jnp.float32)
    return zero.at[ids].add(g.astype(jnp.float32)).astype(table.dtype), None


lookup.defvjp(_lookup_forward, _lookup_backward)
