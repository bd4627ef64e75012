"""Chances of drawing answers from a group, for the rules that train Pass@k."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_jax.kernels.masked import Knob, scorable


def tally(
    reward: Float[Array, "N G"], right: Knob
) -> tuple[Bool[Array, "N G"], Float[Array, "N 1"], Float[Array, "N 1"]]:
    """(which rows are right, right rows, wrong rows) of each group; NaN rows are neither."""
    ok = scorable(reward)
    is_right = ok & (reward > right)
    rights = is_right.sum(1, keepdims=True)
    wrongs = ok.sum(1, keepdims=True) - rights
    return is_right, rights.astype(reward.dtype), wrongs.astype(reward.dtype)


def chance_all_wrong(reward: Float[Array, "N G"], *, k: Knob, right: Knob) -> Float[Array, "N 1"]:
    """C(wrong, k) / C(scorable, k): that k answers drawn from the group are all wrong.

    Exactly 0 where fewer than k are wrong, exactly 1 where all are (also in a group without any
    scorable row). Where fewer than k rows are scorable, all of them are drawn.
    """
    _, rights, wrongs = tally(reward, right)
    count = rights + wrongs
    drawn = jnp.arange(reward.shape[1], dtype=reward.dtype)  # so far; k need not be known to jit
    # never negative: a part of the product could overflow before it meets the 0, inf * 0 being NaN
    factor = jnp.maximum(wrongs - drawn, 0) / jnp.maximum(count - drawn, 1)
    return jnp.where(drawn < jnp.minimum(k, count), factor, 1).prod(1, keepdims=True)
