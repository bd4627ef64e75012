"""Axis `ratio`: the log of the importance ratio between the policy and the one at rollout.

Every value is `(logp, old_logp, mask: [B, T]) -> [B, T]`. Entries behind the mask are exactly 0, in
value and in gradient, whatever lies there: the `where` is on the inputs, before any arithmetic.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_jax.kernels.masked import masked_mean, masked_sum


def token(
    logp: Float[Array, "B T"], old_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """One ratio a token (PPO, GRPO)."""
    return jnp.where(mask, logp, 0) - jnp.where(mask, old_logp, 0)


def sequence(
    logp: Float[Array, "B T"], old_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """One ratio a row: the geometric mean of its token ratios (GSPO, arXiv:2507.18071).

    The gradient of the row's value with respect to one of its n log-probs is 1/n.
    """
    row = masked_mean(token(logp, old_logp, mask), mask, 1, keepdims=True)
    return jnp.where(mask, row, 0)


def sequence_sum(
    logp: Float[Array, "B T"], old_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """One ratio a row: the product of its token ratios, not normalised by length (RLOO in TRL)."""
    row = masked_sum(token(logp, old_logp, mask), mask, 1, keepdims=True)
    return jnp.where(mask, row, 0)


def sequence_token(
    logp: Float[Array, "B T"], old_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """The value of `sequence` with the gradient of `token` (GSPO-token, arXiv:2507.18071, eq. 14).

    The row's log ratio under stop-gradient, plus logp minus itself under stop-gradient. While every
    token of a row has the same advantage and weight, loss and gradient are those of `sequence`; it
    makes a difference with advantages (or corrections) by token. verl and SkyRL call this GSPO, and
    bound the log ratio above by 10.
    """
    row = jax.lax.stop_gradient(sequence(logp, old_logp, mask))
    logp = jnp.where(mask, logp, 0)
    return row + (logp - jax.lax.stop_gradient(logp))
