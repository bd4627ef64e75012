"""Axis `baseline`: what is subtracted from a reward.

Every value is `(reward [N, G], length [N, G]) -> [N, G]`. Unscorable rows (NaN) are left out of the
statistics. Where the rewards that a baseline averages are all equal (they span at most 1e-6), the
baseline of a row is its own reward, so that the centred reward is exactly 0: the rounded mean of
eight float32 rewards of 0.7 is not 0.7, and a division by `std + 1e-8` makes 0.8 of the difference.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.kernels.masked import TIED, masked_mean, masked_sum, scorable, spread


def none(reward: Float[Array, "N G"], length: Int[Array, "N G"]) -> Float[Array, "N G"]:
    """0: REINFORCE."""
    return jnp.zeros_like(reward)


def group_mean(reward: Float[Array, "N G"], length: Int[Array, "N G"]) -> Float[Array, "N G"]:
    """Mean reward of the group (GRPO, arXiv:2402.03300, section 4.1.2)."""
    ok = scorable(reward)
    return _or_own(reward, masked_mean(reward, ok, 1, keepdims=True), ok)


def leave_one_out(reward: Float[Array, "N G"], length: Int[Array, "N G"]) -> Float[Array, "N G"]:
    """Mean reward of the *other* rows of the group (RLOO, arXiv:2402.14740).

    `reward - leave_one_out` is G / (G - 1) times `reward - group_mean`. A row that has no other
    scorable row beside it is its own baseline.
    """
    ok = scorable(reward)
    others = masked_sum(reward, ok, 1, keepdims=True) - reward
    count = jnp.maximum(ok.sum(1, keepdims=True) - 1, 1)
    return _or_own(reward, others / count, ok)


def length_weighted(reward: Float[Array, "N G"], length: Int[Array, "N G"]) -> Float[Array, "N G"]:
    """Mean reward of the group weighted by completion length (OPO, arXiv:2505.23585).

    The sum of `length * advantage` over a group is 0.
    """
    ok = scorable(reward)
    n = jnp.where(ok, length, 0).astype(reward.dtype)
    total = jnp.maximum(n.sum(1, keepdims=True), 1)
    return _or_own(reward, masked_sum(n * reward, ok, 1, keepdims=True) / total, ok)


def batch_mean(reward: Float[Array, "N G"], length: Int[Array, "N G"]) -> Float[Array, "N G"]:
    """Mean reward of the whole batch (REINFORCE++, arXiv:2501.03262).

    Not a group baseline: a group whose rewards are all equal keeps its distance from the batch.
    """
    ok = scorable(reward)
    tied = spread(reward, ok) <= TIED
    return jnp.where(tied, reward, masked_mean(reward, ok))


def _or_own(
    reward: Float[Array, "N G"], baseline: Float[Array, "N #G"], ok: Bool[Array, "N G"]
) -> Float[Array, "N G"]:
    return jnp.where(spread(reward, ok, 1, keepdims=True) <= TIED, reward, baseline)
