"""The loss of every algorithm."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_jax.kernels.masked import bounded_exp, masked_sum
from grpo_jax.types import Algorithm


def policy_loss(
    algorithm: Algorithm,
    logp: Float[Array, "B T"],
    *,
    old_logp: Float[Array, "B T"],
    sampler_logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"] | None,
    advantage: Float[Array, "B"] | Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    weight: Float[Array, "B T"],
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss of one micro-batch (of any rows of the minibatch that `weight` was made over).

    Losses, and so gradients, add up over micro-batches to those of the whole minibatch. Whatever
    lies behind the mask (NaN, inf) reaches neither the value nor the gradient.

    Args:
      algorithm: the axes; `ratio`, `clip`, `correction` and `kl` act here.
      logp: of the sampled tokens under the policy that is trained; the only input with a gradient.
      old_logp: the same at rollout, stored then.
      sampler_logp: what the sampler itself reported.
      ref_logp: under the reference; may be None when no KL acts in the loss.
      advantage: one a row, or one a token.
      mask: the tokens that count.
      weight: `algorithm.aggregation(mask, group)` of the whole minibatch, these rows of it.

    Returns:
      The loss, and sums that add up over micro-batches, without gradient: over tokens `tokens`,
      `clip_low` and `clip_high` (clipped, by the sign of the advantage), `ratio`, `kl` (in nats,
      before the coefficient); under `weight`, `objective` and `penalty`, so that
      loss = penalty - objective.

    Raises:
      ValueError: a KL acts in the loss and `ref_logp` is None.
    """
    logp = jnp.where(mask, logp, 0)
    old_logp, sampler_logp = _fixed(old_logp, mask), _fixed(sampler_logp, mask)
    if advantage.ndim == 1:
        advantage = _fixed(advantage[:, None], mask.any(1, keepdims=True))
    else:
        advantage = _fixed(advantage, mask)

    log_ratio = algorithm.ratio(logp, old_logp, mask)
    objective, clipped = algorithm.clip(log_ratio, advantage, logp, mask)
    objective = algorithm.correction(old_logp, sampler_logp, mask) * objective
    kl = _kl(algorithm, logp, ref_logp, mask)
    penalty = algorithm.kl.coef * kl
    loss = -masked_sum(weight * (objective - penalty), mask)

    sums = {
        "tokens": mask.sum().astype(logp.dtype),
        "clip_low": (clipped & (advantage < 0) & mask).sum().astype(logp.dtype),
        "clip_high": (clipped & (advantage > 0) & mask).sum().astype(logp.dtype),
        "ratio": masked_sum(bounded_exp(log_ratio), mask),
        "kl": masked_sum(kl, mask),
        "objective": masked_sum(weight * objective, mask),
        "penalty": masked_sum(weight * penalty, mask),
    }
    return loss, jax.lax.stop_gradient(sums)


def _fixed(x: Float[Array, "B #T"], mask: Bool[Array, "B #T"]) -> Float[Array, "B #T"]:
    return jax.lax.stop_gradient(jnp.where(mask, x, 0))


def _kl(
    algorithm: Algorithm,
    logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"] | None,
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    if not (algorithm.kl.active and algorithm.kl.where == "loss"):
        return jnp.zeros_like(logp)
    if ref_logp is None:
        raise ValueError("the algorithm has a KL in its loss, and the batch no ref_logp")
    return algorithm.kl(logp, _fixed(ref_logp, mask))
