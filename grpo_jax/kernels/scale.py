"""Axis `scale`: what the centred reward is divided by.

Every value is `(centered [N, G], reward [N, G]) -> [N, G]`, the advantage. A value that asks for
`length` [N, G] gets the completions' tokens. `ddof` and `eps` are values, because codebases differ:
numpy's default is ddof 0, PyTorch's is 1; eps is 1e-8, 1e-6 or 1e-4. Rows that could not be scored
(NaN in `reward`) are left out of the statistics and get advantage 0. Rewards that span at most 1e-6
have no scale, and divide by 1.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.kernels.draws import chance_all_wrong
from grpo_jax.kernels.masked import (
    TIED,
    Knob,
    masked_mean,
    masked_std,
    masked_sum,
    scorable,
    spread,
)


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


def pass_at_k_std(
    centered: Float[Array, "N G"], reward: Float[Array, "N G"], *, k: Knob, right: Knob
) -> Float[Array, "N G"]:
    """Divide by the deviation of Pass@k (Pass@k Training, arXiv:2508.10751, analytic form).

    That of the best of k answers drawn from the group, which is right with chance P = 1 -
    C(wrong, k) / C(scorable, k): sqrt(P (1 - P)). Exactly 0 in groups where P is 0 or 1. Goes with
    `baseline.pass_at_k` of the same `k` and `right`, and means what they mean there.
    """
    miss = chance_all_wrong(reward, k=k, right=right)
    variance = miss * (1 - miss)
    live = scorable(reward) & (variance > 0)
    return jnp.where(live, centered / jnp.sqrt(jnp.where(variance > 0, variance, 1)), 0)


def informative_share(
    centered: Float[Array, "N G"], reward: Float[Array, "N G"]
) -> Float[Array, "N G"]:
    """Divide by the share of groups whose rewards differ (GPG, arXiv:2504.02546).

    Tied groups have no gradient and still count in a mean over the batch; the factor makes up for
    them. Groups without a scorable row, as those that a filter drops, count nowhere; with no group
    left that differs, nothing is divided.
    """
    ok = scorable(reward)
    groups = ok.any(1).sum()
    informative = (spread(reward, ok, 1) > TIED).sum()
    alpha = jnp.where(informative > 0, groups / jnp.maximum(informative, 1), 1)
    return jnp.where(ok, centered * alpha.astype(centered.dtype), 0)


def nonzero_share(
    centered: Float[Array, "N G"], reward: Float[Array, "N G"]
) -> Float[Array, "N G"]:
    """Divide by the share of scorable rows whose reward is not 0 (verl's reading of GPG).

    With rewards of 0 and 1 that is the accuracy, so hard batches weigh more; with rewards of -1 and
    1 it is 1. `informative_share` counts groups instead. With all rewards 0, by 1 / rows.
    """
    ok = scorable(reward)
    nonzero = (ok & (reward != 0)).sum()
    alpha = ok.sum() / jnp.maximum(nonzero, 1)
    return jnp.where(ok, centered * alpha.astype(centered.dtype), 0)


def whiten(
    centered: Float[Array, "N G"],
    reward: Float[Array, "N G"],
    *,
    ddof: Knob,
    eps: Knob,
    hold_tied: bool | Array,
) -> Float[Array, "N G"]:
    """Subtract the batch mean of the centred rewards and divide by their standard deviation + eps.

    Over rows, as TRL's RLOO `normalize_advantages` and its GDPO (`whiten_tokens` is what verl and
    OpenRLHF do). All 0 where the centred rewards span at most 1e-6.

    Args:
      hold_tied: whether a tied group that is centred to 0 stays at exactly 0. After `group_mean` or
        `leave_one_out` the batch mean is 0 but for rounding, which this keeps out. After
        `baseline.none` it must be False: a group of zeros is then one that failed, below the mean.
    """
    ok = scorable(reward)
    tied = spread(centered, ok) <= TIED
    divisor = jnp.where(tied, 1, masked_std(centered, ok, ddof=ddof) + eps)
    held = _at_rest(centered, reward, ok) & hold_tied
    whitened = (centered - masked_mean(centered, ok)) / divisor
    return jnp.where(ok & ~held & ~tied, whitened, 0)


def whiten_tokens(
    centered: Float[Array, "N G"],
    reward: Float[Array, "N G"],
    *,
    length: Int[Array, "N G"],
    ddof: Knob,
    eps: Knob,
    hold_tied: bool | Array,
) -> Float[Array, "N G"]:
    """`(centered - M) / sqrt(V + eps)`, M and V over all tokens (REINFORCE++, arXiv:2501.03262).

    A row counts once a token, so long rows weigh more, and the mean of the advantages over tokens
    is 0. `eps` stands inside the root here. `ddof` is of the count of tokens: 1 in verl, 0 in
    OpenRLHF. All 0 where the centred rewards of the rows that have tokens span at most 1e-6.

    Args:
      length: tokens of each row.
      hold_tied: whether a tied group that is centred to 0 stays at exactly 0. False in verl
        and OpenRLHF: M is not 0 where rewards go with length, even after a group's mean, and then
        pushes the rows of tied groups, all of them one way. After `baseline.none` it must be False
        (see `whiten`).
    """
    ok = scorable(reward)
    n = jnp.where(ok, length, 0).astype(centered.dtype)
    count = n.sum()
    mean = masked_sum(n * centered, ok) / jnp.maximum(count, 1)
    square = masked_sum(n * (centered - mean) ** 2, ok)
    variance = jnp.where(count > ddof, square / jnp.maximum(count - ddof, 1), 0)
    tied = spread(centered, ok & (n > 0)) <= TIED
    held = _at_rest(centered, reward, ok) & hold_tied
    whitened = (centered - mean) / jnp.where(tied, 1, jnp.sqrt(variance + eps))
    return jnp.where(ok & ~held & ~tied, whitened, 0)


def _at_rest(
    centered: Float[Array, "N G"], reward: Float[Array, "N G"], ok: Bool[Array, "N G"]
) -> Bool[Array, "N G"]:
    """Rows that a group baseline has centred to 0 because all of their group are equal."""
    return (spread(reward, ok, 1, keepdims=True) <= TIED) & (centered == 0)
