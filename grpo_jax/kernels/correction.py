"""Axis `correction`: weights for a sampler whose probabilities are not quite the trainer's.

Every value is `(old_logp, sampler_logp, mask: [B, T]) -> weight [B, T]`, under stop-gradient. With
rho = exp(old_logp - sampler_logp), the log held in ±20, the weight multiplies the policy term only
(not the KL), and no denominator changes. 1 behind the mask, whatever lies there.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_jax.kernels.masked import Knob, bounded_exp


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
) -> Float[Array, "B T"]:
    """min(rho, cap) by token (truncated importance sampling, TIS)."""
    return _weight(jnp.minimum(bounded_exp(_log(old_logp, sampler_logp, mask)), cap), mask)


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
) -> Float[Array, "B T"]:
    """min(product of the row's rho, cap), the same for each token of the row."""
    return _weight(jnp.minimum(_row(old_logp, sampler_logp, mask), cap), mask)


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


def _log(
    old_logp: Float[Array, "B T"], sampler_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    return jnp.where(mask, old_logp, 0) - jnp.where(mask, sampler_logp, 0)


def _row(
    old_logp: Float[Array, "B T"], sampler_logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B 1"]:
    return bounded_exp(_log(old_logp, sampler_logp, mask).sum(1, keepdims=True))


def _weight(rho: Float[Array, "B #T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    return jax.lax.stop_gradient(jnp.where(mask, rho, 1))
