"""Axis `correction`: weights for a sampler whose probabilities are not quite the trainer's.

Every value is `(old_logp, sampler_logp, mask: [B, T]) -> weight [B, T]`, under stop-gradient. With
rho = exp(old_logp - sampler_logp), the log held in ±20, the weight multiplies the policy term only
(not the KL), and no denominator changes. 1 behind the mask, whatever lies there. A value that needs
more asks for it by name: `logp` [B, T] of the current policy, or `advantage` ([B, 1] or [B, T]).

A NaN of the sampler within the mask says that it could not tell: that token has rho 1, as in TRL. A
NaN of the trainer stays one.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_jax.kernels.masked import Knob, bounded_exp, masked_mean
from grpo_jax.rules import across_rows, call


def none(
    old_logp: Float[Array, "B T"], sampler_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """1: the sampler is the trainer's own policy."""
    return jnp.ones_like(old_logp)


def token_truncate(
    old_logp: Float[Array, "B T"],
    sampler_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    cap: Knob,
    low: Knob = 0.0,
) -> Float[Array, "B T"]:
    """rho held in [low, cap] by token (truncated importance sampling, TIS). `low` 0 bounds nothing:
    a lower bound is OpenRLHF's ([0.5, 5]) and TRL's choice (`clip_min`)."""
    rho = bounded_exp(_log(old_logp, sampler_logp, mask))
    return _weight(jnp.clip(rho, low, cap), mask)


def token_mask(
    old_logp: Float[Array, "B T"],
    sampler_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: Knob,
    high: Knob,
) -> Float[Array, "B T"]:
    """rho by token where low <= rho <= high, else 0 (IcePop)."""
    rho = bounded_exp(_log(old_logp, sampler_logp, mask))
    return _weight(jnp.where((low <= rho) & (rho <= high), rho, 0), mask)


def sequence_truncate(
    old_logp: Float[Array, "B T"],
    sampler_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    cap: Knob,
    low: Knob = 0.0,
) -> Float[Array, "B T"]:
    """The product of the row's rho held in [low, cap], the same for each token of the row."""
    return _weight(jnp.clip(_row(old_logp, sampler_logp, mask), low, cap), mask)


def sequence_mask(
    old_logp: Float[Array, "B T"],
    sampler_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: Knob,
    high: Knob,
) -> Float[Array, "B T"]:
    """The product of the row's rho where it lies within [low, high], else 0 for the whole row (MIS,
    the default of TRL with vLLM: low 0, high 3)."""
    rho = _row(old_logp, sampler_logp, mask)
    return _weight(jnp.where((low <= rho) & (rho <= high), rho, 0), mask)


def off_policy_sequence(
    old_logp: Float[Array, "B T"],
    sampler_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    logp: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    threshold: Knob,
    rule: Callable[..., Array],
) -> Float[Array, "B T"]:
    """0 for a bad answer that the policy has moved away from, else the weight of `rule`
    (DeepSeek-V3.2, arXiv:2512.02556, eq. 9; TRL's `off_policy_mask_threshold`).

    A row is dropped where its advantage is below 0 and the mean over its tokens of sampler_logp -
    logp exceeds `threshold`. Both the updates since the rollout and the sampler's own mismatch
    count. With advantages by token, the tokens below 0 of such a row are dropped.

    Args:
      threshold: nats a token. The paper gives no number.
      rule: another value of this axis, which may ask for `logp` and `advantage` as well.
    """
    moved = masked_mean(_known(sampler_logp, logp) - logp, mask, 1, keepdims=True)
    weight = call(rule, old_logp, sampler_logp, mask, logp=logp, advantage=advantage)
    return _weight(jnp.where((advantage < 0) & (moved > threshold), 0, weight), mask)


@across_rows
def batch_normalised(
    old_logp: Float[Array, "B T"],
    sampler_logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    rule: Callable[..., Array],
    by_row: bool,
) -> Float[Array, "B T"]:
    """The weights of `rule` over their mean in the minibatch (verl's `rollout_is_batch_normalize`),
    so that a correction changes how tokens compare and not the size of the step.

    Args:
      rule: another value of this axis, one that asks for nothing more.
      by_row: the mean over rows of a row's mean, rows without a token left out (verl: for weights
        of whole sequences); else over tokens. Weights that are all 0 stay 0.
    """
    weight = rule(old_logp, sampler_logp, mask)
    if by_row:
        mean = masked_mean(masked_mean(weight, mask, 1), mask.any(1))
    else:
        mean = masked_mean(weight, mask)
    return _weight(weight / jnp.where(mean > 0, mean, 1), mask)


def _log(
    old_logp: Float[Array, "B T"], sampler_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    sampler_logp = _known(sampler_logp, old_logp)
    return jnp.where(mask, old_logp, 0) - jnp.where(mask, sampler_logp, 0)


def _known(sampler_logp: Float[Array, "B T"], other: Float[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.where(jnp.isnan(sampler_logp), other, sampler_logp)


def _row(
    old_logp: Float[Array, "B T"], sampler_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B 1"]:
    return bounded_exp(_log(old_logp, sampler_logp, mask).sum(1, keepdims=True))


def _weight(rho: Float[Array, "B #T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    return jax.lax.stop_gradient(jnp.where(mask, rho, 1))
