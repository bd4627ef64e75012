"""Axis `kl`: estimators of KL(policy || reference) from one sampled token.

Every value is `(logp, ref_logp: [B, T]) -> [B, T]`, with d = logp - ref_logp. k1, k3 and `exact`
agree in expectation under the policy (k2 to second order); their gradients do not. After
http://joschu.net/blog/kl-approx.html. A value that needs more asks for it by name:
`log_ratio` [B, T], the axis `ratio`'s, with its gradient (0 where the KL acts in the reward), or
`exact` [B, T], the KL over the whole vocabulary.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from grpo_jax.kernels.masked import LOG_LIMIT, bounded_exp


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


def k3_weighted(
    logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], *, log_ratio: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """w k3 with w = exp(log_ratio), the gradient going through both (DeepSeek-V3.2,
    arXiv:2512.02556; TRL's `use_bias_correction_kl`, its default).

    With one ratio a token the gradient is w d, which is that of the reverse KL also for samples of
    an older policy; k3 alone has the gradient of the forward KL even on policy. The ratio's log is
    held in ±20.
    """
    return bounded_exp(log_ratio) * k3(logp, ref_logp)


def k3_plus(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """The value of k3 with the gradient of k2, d (verl's "k3+").

    verl also bounds the value by ±10, which changes what is logged and no gradient.
    """
    square = k2(logp, ref_logp)
    return jax.lax.stop_gradient(k3(logp, ref_logp)) + (square - jax.lax.stop_gradient(square))


def absolute(logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """|d| (verl's "abs"). Gradient: the sign of d. No KL in expectation; a size of the change."""
    d = logp - ref_logp
    return lax.stop_gradient(jnp.sign(d)) * d  # `jnp.abs` has slope 1 at 0, where a run begins


def exact(
    logp: Float[Array, "B T"], ref_logp: Float[Array, "B T"], *, exact: Float[Array, "B T"]
) -> Float[Array, "B T"]:
    """The KL of the whole distributions at each sampled prefix: `exact`, as it is given.

    Without noise from the choice of the token. Its gradient leaves out how the policy's choice of a
    token changes the later prefixes. Costs a forward pass of the reference in each update.
    """
    return exact
