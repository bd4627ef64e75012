"""Axis `shaping`: what the length of a completion adds to its reward.

Every value is `(reward [N, G], length [N, G], truncated [N, G]) -> [N, G]`. An unscorable reward
(NaN) stays NaN.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.kernels.masked import Knob


def none(
    reward: Float[Array, "N G"], length: Int[Array, "N G"], truncated: Bool[Array, "N G"]
) -> Float[Array, "N G"]:
    """The reward as it is."""
    return reward


def overlong(
    reward: Float[Array, "N G"],
    length: Int[Array, "N G"],
    truncated: Bool[Array, "N G"],
    *,
    limit: Knob,
    buffer_share: Knob = 0.2,
    penalty: Knob = 1.0,
) -> Float[Array, "N G"]:
    """Soft overlong punishment (DAPO, arXiv:2503.14476, eq. 13).

    Nothing up to `limit - buffer` tokens, then linearly down to `-penalty` at `limit`, and
    `-penalty` beyond. A truncated completion has the full length, hence the full penalty, whether
    or not it is correct.

    Args:
      reward: before shaping.
      length: completion tokens, EOS included.
      truncated: not needed, since the length says it.
      limit: tokens (L_max of the paper, where it is 20480).
      buffer_share: `buffer / limit` (the paper's 4096 of 20480); 0 makes the cut hard.
      penalty: the largest one; 1 in the paper, whose rewards are ±1.
    """
    buffer = jnp.asarray(buffer_share * limit, reward.dtype)
    over = length.astype(reward.dtype) - (limit - buffer)
    share = over / jnp.maximum(buffer, jnp.finfo(reward.dtype).tiny)
    return reward - penalty * jnp.clip(share, 0, 1)
