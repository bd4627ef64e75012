"""Axis `clip`: the objective of a token, and whether the rule has taken its gradient away.

Every value is `(log_ratio [B, T], advantage [B, 1] or [B, T], logp [B, T], mask [B, T]) ->
(objective [B, T], clipped bool[B, T])`. The objective is maximised. `clipped` marks the entries
where the trust region is at work: on its low side where the advantage is negative, on its high side
where it is positive. Both are 0 / False behind the mask. A ratio is exp(log_ratio), the exponent
held in ±20 (`masked.bounded_exp`).
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_jax.kernels.masked import Knob, bounded_exp

Clipped = tuple[Float[Array, "B T"], Bool[Array, "B T"]]


def bounded(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: Knob,
    high: Knob,
) -> Clipped:
    """PPO's min(ratio A, clip(ratio, 1 - low, 1 + high) A) (arXiv:1707.06347, eq. 7).

    low = high is the symmetric clip of GRPO; high > low is clip-higher (DAPO, eq. 8); with a
    sequence ratio and constants near 3e-4 it is the clip of GSPO.
    """
    ratio = _ratio(log_ratio, mask)
    too_low, too_high = _outside(ratio, advantage, mask, low, high)
    # The same function as the min of the two products, but exactly on the edge the gradient is
    # whole, where a `minimum` of a `clip` would halve it twice.
    kept = jnp.where(too_high, 1 + high, jnp.where(too_low, 1 - low, ratio))
    return _objective(kept * advantage, mask), too_low | too_high


def dual(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: Knob,
    high: Knob,
    cap: Knob,
) -> Clipped:
    """`bounded`, with the ratio also capped where A < 0 (dual-clip PPO, arXiv:1912.09729).

    max(min(ratio A, clip(ratio) A), cap A) for A < 0. verl has it always on with cap 3; it is TRL's
    `delta` as long as delta >= 1 + high. An entry at the cap is not `clipped`: that word is kept
    for the two sides of the trust region, which the clip fractions report.

    Args:
      cap: the largest ratio for a negative advantage, > 1.
    """
    ratio = _ratio(log_ratio, mask)
    too_low, too_high = _outside(ratio, advantage, mask, low, high)
    kept = jnp.where(too_high, 1 + high, jnp.where(too_low, 1 - low, ratio))
    kept = jnp.where((advantage < 0) & (kept > cap), cap, kept)
    return _objective(kept * advantage, mask), too_low | too_high


def cispo(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: Knob,
    high: Knob,
) -> Clipped:
    """sg(clip(ratio, 1 - low, 1 + high)) A log p (CISPO, MiniMax-M1, arXiv:2506.13585).

    The weight is clipped, and no token loses its gradient, which flows through log p alone.
    `high` is relative, as in verl and SkyRL: the cap is 1 + high. TRL reads its `epsilon_high` as
    the absolute cap and has no lower bound: its `epsilon_high=5` is `low=1, high=4` here. The value
    is of the order of log p, not a surrogate of the return.
    """
    ratio = _ratio(log_ratio, mask)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1 - low, 1 + high))
    too_low, too_high = _outside(ratio, advantage, mask, low, high)
    objective = weight * advantage * jnp.where(mask, logp, 0)
    return _objective(objective, mask), too_low | too_high


def none(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Clipped:
    """A log p, with no ratio and no trust region (REINFORCE)."""
    return _objective(advantage * jnp.where(mask, logp, 0), mask), jnp.zeros_like(mask)


def importance(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Clipped:
    """ratio A: importance sampling with no trust region."""
    return _objective(_ratio(log_ratio, mask) * advantage, mask), jnp.zeros_like(mask)


def _ratio(log_ratio: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    return bounded_exp(jnp.where(mask, log_ratio, 0))


def _outside(
    ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    mask: Bool[Array, "B T"],
    low: Knob,
    high: Knob,
) -> tuple[Bool[Array, "B T"], Bool[Array, "B T"]]:
    too_low = mask & (advantage < 0) & (ratio < 1 - low)
    too_high = mask & (advantage > 0) & (ratio > 1 + high)
    return too_low, too_high


def _objective(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.where(mask, x, 0)
