"""Axis `scale`: what the centred reward is divided by.

Every value is `(centered [N, G], reward [N, G]) -> [N, G]`, the advantage. `ddof` and `eps` are
values, because codebases differ: numpy's default is ddof 0, PyTorch's is 1; eps is 1e-8, 1e-6 or
1e-4. Rows that could not be scored (NaN in `reward`) are left out of the statistics and get
advantage 0. Rewards that span at most 1e-6 have no scale, and divide by 1.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_jax.kernels.masked import TIED, Knob, masked_mean, masked_std, scorable, spread


def none(centered: Float[Array, "N G"], reward: Float[Array, "N G"]) -> Float[Array, "N G"]:
    """No division (Dr. GRPO, arXiv:2503.20783: dividing favours groups that are nearly tied)."""
    return jnp.where(scorable(reward), centered, 0)


def group_std(
    centered: Float[Array, "N G"],
    reward: Float[Array, "N G"],
    *,
    ddof: Knob,
    eps: Knob,
) -> Float[Array, "N G"]:
    """Divide by the standard deviation of the group's rewards (GRPO, arXiv:2402.03300)."""
    ok = scorable(reward)
    tied = spread(reward, ok, 1, keepdims=True) <= TIED
    divisor = masked_std(reward, ok, 1, keepdims=True, ddof=ddof) + eps
    return jnp.where(ok, centered / jnp.where(tied, 1, divisor), 0)


def batch_std(
    centered: Float[Array, "N G"],
    reward: Float[Array, "N G"],
    *,
    ddof: Knob,
    eps: Knob,
) -> Float[Array, "N G"]:
    """Divide by the standard deviation of all *raw* rewards of the batch (Lite PPO, TRL "batch").

    Raw: the spread between prompts counts too, although a group baseline has removed it.
    """
    ok = scorable(reward)
    divisor = masked_std(reward, ok, ddof=ddof) + eps
    return jnp.where(ok, centered / jnp.where(spread(reward, ok) <= TIED, 1, divisor), 0)


def group_mean(centered: Float[Array, "N G"], reward: Float[Array, "N G"]) -> Float[Array, "N G"]:
    """Divide by the mean reward of the group (MaxRL, arXiv:2602.02710).

    0 where that mean is not positive (at most 1e-6, so that rewards which cancel to a rounding
    error are not blown up): the objective is defined for rewards that are never negative.
    """
    ok = scorable(reward)
    mean = masked_mean(reward, ok, 1, keepdims=True)
    positive = mean > TIED
    return jnp.where(ok & positive, centered / jnp.where(positive, mean, 1), 0)


def whiten(
    centered: Float[Array, "N G"],
    reward: Float[Array, "N G"],
    *,
    ddof: Knob,
    eps: Knob,
) -> Float[Array, "N G"]:
    """Subtract the batch mean of the centred rewards and divide by their standard deviation.

    Over rows, as TRL's RLOO `normalize_advantages` (verl and OpenRLHF whiten over tokens, where
    long rows count more). A tied group that its baseline has centred to 0 stays at exactly 0.
    """
    ok = scorable(reward)
    tied = spread(centered, ok) <= TIED
    divisor = jnp.where(tied, 1, masked_std(centered, ok, ddof=ddof) + eps)
    dead = (spread(reward, ok, 1, keepdims=True) <= TIED) & (centered == 0)
    whitened = (centered - masked_mean(centered, ok)) / divisor
    return jnp.where(ok & ~dead & ~tied, whitened, 0)
