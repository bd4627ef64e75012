"""From rewards to advantages: the axes `baseline` and `scale`, one after the other."""

from collections.abc import Callable

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_jax.kernels.masked import scorable
from grpo_jax.rules import asks, call


def advantage(
    baseline: Callable[..., Array],
    scale: Callable[..., Array],
    reward: Float[Array, "N G"],
    length: Int[Array, "N G"],
    greedy: Float[Array, "N 1"] | None = None,
) -> Float[Array, "N G"]:
    """`scale(reward - baseline(reward, length), reward)`: one number a completion, all its tokens'.

    Args:
      baseline: a value of `kernels/baseline.py`, constants bound.
      scale: a value of `kernels/scale.py`, constants bound.
      reward: after shaping (and after the KL penalty, where that sits in the reward). Row n holds
        the G answers to prompt n. NaN marks an answer that could not be scored.
      length: completion tokens, for rules that weigh by them.
      greedy: the reward of a greedy answer to each prompt, for a baseline that asks for it; NaN
        where that could not be scored. A baseline that asks raises ValueError if there is none.

    Returns:
      The advantages, finite: 0 in NaN rows, which take no part in the statistics of their group,
      and exactly 0 in a group of equal rewards under every group baseline, for any eps, unless
      `scale` whitens such groups too (`hold_tied`).
    """
    if greedy is None and asks(baseline, "greedy"):
        raise ValueError("this baseline needs the rewards of greedy answers: pass `greedy` [N, 1]")
    centered = reward - call(baseline, reward, length, greedy=greedy)
    return jnp.where(scorable(reward), call(scale, centered, reward, length=length), 0)
