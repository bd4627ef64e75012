"""The one matrix product of the models: in the compute dtype, summed in float32."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def dot(x: Float[Array, "..."], w: Float[Array, "..."], axes: int) -> Float[Array, "..."]:
    """x [*b, *in] @ w [*in, *out] over the last `axes` of x -> float32 [*b, *out].

    The factors have x's dtype. The caller rounds: once, when all that it adds up is there.
    """
    contract = (tuple(range(x.ndim - axes, x.ndim)), tuple(range(axes)))
    w = w.astype(x.dtype)
    return lax.dot_general(x, w, (contract, ((), ())), preferred_element_type=jnp.float32)
