"""Products of activations with a weight of any shape, and a second layout for weights."""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float

from grpo_jax.kernels.matmul import matmul, matmul_gradients, outer

PRODUCT = "product"  # what `remat="dots"` keeps, by this name


@partial(jax.tree_util.register_dataclass, data_fields=["rows"], meta_fields=["outside"])
@dataclass(frozen=True)
class Turned:
    """A weight [*in, *out] that lies as [out, in], for a CPU that reads it once a token.

    `rows` may have further axes in front, of layers. `outside`: *out. Takes no gradient.
    """

    rows: Float[Array, "*layers O I"]
    outside: tuple[int, ...]

    @classmethod
    def of(cls, w: Float[Array, "..."], axes: int) -> "Turned":
        """A copy of w [*in, *out], whose first `axes` are *in."""
        return cls(w.reshape(math.prod(w.shape[:axes]), -1).T, w.shape[axes:])


def dot(x: Float[Array, "..."], w: Float[Array, "..."] | Turned, axes: int) -> Float[Array, "..."]:
    """x [*b, *in] @ w [*in, *out] over the last `axes` of x -> float32 [*b, *out].

    The factors have x's dtype. The caller rounds: once, when all that it adds up is there.
    """
    if isinstance(w, Turned):
        batch = x.shape[: x.ndim - axes]
        y = matmul(w.rows, x.reshape(-1, w.rows.shape[1]), True)
        # the weight is the left factor: read through row by row. XLA would exchange the two and
        # drop the transpose, but for the barrier
        return lax.optimization_barrier(y).T.reshape(*batch, *w.outside)
    return checkpoint_name(_dot(x, w, axes), PRODUCT)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _dot(x, w, axes):
    y = matmul(*_flat(x, w, axes))
    return y.reshape(*x.shape[: x.ndim - axes], *w.shape[axes:])


def _dot_forward(x, w, axes):
    # w as it came, or a scan over layers would keep a copy of every layer's for the backward pass
    return _dot(x, w, axes), (x, w)


def _dot_backward(axes, saved, cotangent):
    x, w = saved
    flat = _flat(x, w, axes)
    g = cotangent.reshape(len(flat[0]), -1)
    back = matmul_gradients(*flat, g)
    return tuple(a.reshape(like.shape) for a, like in zip(back, saved, strict=True))


_dot.defvjp(_dot_forward, _dot_backward)


def _flat(x, w, axes):
    size = math.prod(w.shape[:axes])
    return x.reshape(-1, size), w.reshape(size, -1)


@jax.custom_vjp
def gated(x: Float[Array, "*b D"], w: Float[Array, "D 2 F"] | Turned) -> Float[Array, "*b F"]:
    """silu(x @ w[:, 0]) * (x @ w[:, 1]), in x's dtype: one product forward, and backward its two
    halves apart, since laying their gradients side by side costs a CPU more than the products."""
    return _gated_forward(x, w)[0]


def _gated_forward(x, w):
    y = dot(x, w, 1).astype(x.dtype)
    return _swiglu(y[..., 0, :], y[..., 1, :]), (x, y, w)


def _swiglu(gate, up):
    return jax.nn.silu(gate) * up


def _gated_backward(saved, g):
    x, y, w = saved
    _, swiglu_back = jax.vjp(_swiglu, y[..., 0, :], y[..., 1, :])
    flat, x_back, w_back = x.reshape(-1, x.shape[-1]), [], []
    for half, h in enumerate(swiglu_back(g)):
        h = h.reshape(-1, h.shape[-1])
        x_back.append(matmul(h, w[:, half], True))
        w_back.append(outer(flat, h))
    summed = (x_back[0] + x_back[1]).astype(x.dtype)
    return summed.reshape(x.shape), jnp.stack(w_back, 1).astype(w.dtype)


gated.defvjp(_gated_forward, _gated_backward)
