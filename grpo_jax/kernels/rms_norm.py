"""Root-mean-square normalisation (Zhang and Sennrich 2019, eq. 4), its backward pass written out.

Autodiff would keep the normalised rows and their norms of every layer beside what came in, which a
model then writes and reads again: here nothing is kept but what came in.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def rms_norm(
    x: Float[Array, "*b D"], scale: Float[Array, " D"], eps: float
) -> Float[Array, "*b D"]:
    """scale * x / sqrt(mean(x**2) + eps) over the last axis, in float32, rounded once to x's dtype.

    Gradients have the dtypes of x and scale; that of scale is a float32 sum. Reverse mode only.
    """
    unit, _ = _unit(x, eps)
    return (unit * scale).astype(x.dtype)


def _unit(x, eps):
    y = x.astype(jnp.float32)
    inverse = lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + eps)
    return y * inverse, inverse


def _forward(x, scale, eps):
    return rms_norm(x, scale, eps), (x, scale)


def _backward(eps, saved, cotangent):
    x, scale = saved
    unit, inverse = _unit(x, eps)
    g = cotangent.astype(jnp.float32)
    scaled = g * scale
    back = inverse * (scaled - unit * jnp.mean(scaled * unit, -1, keepdims=True))
    rows = tuple(range(x.ndim - 1))
    return back.astype(x.dtype), (g * unit).sum(rows).astype(scale.dtype)


rms_norm.defvjp(_forward, _backward)
