"""Axis `kl`: estimators of KL(policy || reference) from one sampled token.

Every value is `(logp, ref_logp: [B, T]) -> [B, T]`, with d = logp - ref_logp. They agree in
expectation under the policy (k2 to second order); their gradients do not. After
http://joschu.net/blog/kl-approx.html.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_jax.kernels.masked import LOG_LIMIT


def none(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """0."""
    return jnp.zeros_like(logp)


def k1(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """d. Fine in a reward; useless in a loss, where its gradient, 1, has no pull on average."""
    return logp - ref_logp


def k2(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """d² / 2. Its gradient, d, is the unbiased one of the reverse KL while on policy."""
    return (logp - ref_logp) ** 2 / 2


def k3(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """exp(-d) + d - 1, never negative (GRPO, arXiv:2402.03300, eq. 4). Gradient 1 - exp(-d).

    -d is held at 20 or less, so that a reference far above the policy gives a large finite value
    and gradient 0, not inf and NaN. (A bound on the output would still make the gradient NaN.)
    The other side cannot overflow and is left alone. A NaN input stays NaN.
    """
    x = jnp.minimum(ref_logp - logp, LOG_LIMIT)
    return jnp.expm1(x) - x  # expm1: exp(x) - 1 would lose every digit near 0
