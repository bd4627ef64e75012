"""From rewards to advantages: the axes `baseline` and `scale`, one after the other."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_jax.kernels.masked import scorable


def advantage(
    baseline: Callable[[Array, Array], Array],
    scale: Callable[[Array, Array], Array],
    reward: Float[Array, "N G"],
    length: Int[Array, "N G"],
) -> Float[Array, "N G"]:
    """`scale(reward - baseline(reward, length), reward)`: one number a completion, all its tokens'.

    Args:
      baseline: a value of `kernels/baseline.py`, constants bound.
      scale: a value of `kernels/scale.py`, constants bound.
      reward: after shaping (and after the KL penalty, where that sits in the reward). Row n holds
        the G answers to prompt n. NaN marks an answer that could not be scored.
      length: completion tokens, for baselines that weigh by them.

    Returns:
      The advantages, finite: 0 in NaN rows, which take no part in the statistics of their group,
      and exactly 0 in a group of equal rewards under every group baseline, for any eps.
    """
    centered = reward - baseline(reward, length)
    return jnp.where(scorable(reward), scale(centered, reward), 0)
