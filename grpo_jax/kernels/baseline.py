"""Axis `baseline`: what is subtracted from a reward.

Every value is `(reward [N, G], length [N, G]) -> [N, G]`. A value that asks for `greedy` [N, 1]
gets the reward of a greedy answer to each prompt. Unscorable rows (NaN) are left out of the
statistics. Where the rewards that a baseline averages are all equal (they span at most 1e-6), the
baseline of a row is its own reward, so that the centred reward is exactly 0: the rounded mean of
eight float32 rewards of 0.7 is not 0.7, and a division by `std + 1e-8` makes 0.8 of the difference.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.kernels.draws import chance_all_wrong, tally
from grpo_jax.kernels.masked import TIED, Knob, masked_mean, masked_sum, scorable, spread


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


def greedy(
    reward: Float[Array, "N G"], length: Int[Array, "N G"], *, greedy: Float[Array, "N 1"]
) -> Float[Array, "N G"]:
    """Reward of the greedy answer to the same prompt (ReMax, arXiv:2310.10505).

    A row within 1e-6 of it is its own baseline, and so is every row of a prompt whose greedy answer
    could not be scored (NaN). Not a group baseline: answers that are all better than the greedy one
    are all pushed up.
    """
    far = jnp.abs(reward - greedy) > TIED  # False where either is NaN
    return jnp.where(far, greedy.astype(reward.dtype), reward)


def best_of_group(reward: Float[Array, "N G"], length: Int[Array, "N G"]) -> Float[Array, "N G"]:
    """The second best reward for the best row of the group, its own for any other row.

    Only the best row learns, by its lead (verl's `grpo_passk`, which cites arXiv:2503.19595): the
    advantages of a group do not sum to 0. A lead of at most 1e-6 is none, and so is that of a row
    which has no other scorable row beside it.
    """
    ok = scorable(reward)
    ranked = jnp.sort(jnp.where(ok, reward, -jnp.inf), axis=1)
    second = ranked[:, -2:-1] if reward.shape[1] > 1 else jnp.full_like(ranked, -jnp.inf)
    leads = (reward - second > TIED) & jnp.isfinite(second)
    return jnp.where(leads, second, reward)


def pass_at_k(
    reward: Float[Array, "N G"], length: Int[Array, "N G"], *, k: Knob, right: Knob
) -> Float[Array, "N G"]:
    """What centres a row's share in Pass@k (Pass@k Training, arXiv:2508.10751, analytic form).

    With miss = C(W, k) / C(W + R, k), the chance that k of the group's R right and W wrong answers
    are all wrong, `reward - pass_at_k` is the paper's numerator: miss for a right row, and for a
    wrong one miss - C(W-1, k-1) / C(W+R-1, k-1), which is -miss * R / W. It is exactly 0 in groups
    where the k answers are never or always all wrong; with k = 1 and rewards of 0 and 1 it is the
    distance from the group's mean. How much a reward is above `right` makes no difference.

    Args:
      k: answers drawn, from 1 to the size of the group. A group with fewer scorable rows has all of
        them drawn, and so no advantages.
      right: a row is right where its reward is above this.
    """
    is_right, rights, wrongs = tally(reward, right)
    miss = chance_all_wrong(reward, k=k, right=right)
    share = jnp.where(is_right, miss, -miss * rights / jnp.maximum(wrongs, 1))
    return reward - share


def _or_own(
    reward: Float[Array, "N G"], baseline: Float[Array, "N #G"], ok: Bool[Array, "N G"]
) -> Float[Array, "N G"]:
    return jnp.where(spread(reward, ok, 1, keepdims=True) <= TIED, reward, baseline)
