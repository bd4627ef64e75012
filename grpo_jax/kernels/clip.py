"""Axis `clip`: the objective of a token, and whether the rule has taken its gradient away.

Every value is `(log_ratio [B, T], advantage [B, 1] or [B, T], logp [B, T], mask [B, T]) ->
(objective [B, T], clipped bool[B, T])`. The objective is maximised. `clipped` marks the entries
where the trust region is at work: on its low side where the advantage is negative, on its high side
where it is positive. Both are 0 / False behind the mask. A ratio is exp(log_ratio), the exponent
held in ±20 (`masked.bounded_exp`).

A rule may ask for more by name (`rules.py`): `correction` [B, T], the weights of the sampler's
correction, which the rule then folds in itself (for all others the loss multiplies by them), and
`key`, a PRNG key of the optimizer step. The rules that compare tokens across the batch are in
`clip_covariance.py`.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_jax.kernels.masked import LOG_LIMIT, Knob, bounded_exp, masked_mean, masked_sum

LOG_FLOOR = math.log(1e-8)  # below it a weight of VESPO counts as this

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

    max(min(ratio A, clip(ratio) A), cap A) for A < 0. verl has it always on with cap 3; it is
    `delta` as long as that is >= 1 + high. An entry at the cap is not `clipped`: that word is kept
    for the two sides of the trust region, which the clip fractions report.

    Args:
      cap: the largest ratio for a negative advantage, > 1.
    """
    ratio = _ratio(log_ratio, mask)
    too_low, too_high = _outside(ratio, advantage, mask, low, high)
    kept = jnp.where(too_high, 1 + high, jnp.where(too_low, 1 - low, ratio))
    kept = jnp.where((advantage < 0) & (kept > cap), cap, kept)
    return _objective(kept * advantage, mask), too_low | too_high


def delta(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: Knob,
    high: Knob,
    delta: Knob,
) -> Clipped:
    """min(min(ratio, delta) A, clip(ratio, 1 - low, 1 + high) A): two-sided clipping (INTELLECT-2,
    arXiv:2505.07291, which has delta 4; off by default in TRL, whose `delta` this is).

    It bounds the loss of a token with A < 0, as `dual` does. They part where delta < 1 + high: this
    rule then caps the ratio where A > 0, and gives way to 1 + high where A < 0. `clipped` are the
    two sides of the region alone. TRL counts them on min(ratio, delta), which is the same unless
    delta <= 1 + high; it doesn't bound the exponent.
    """
    ratio = _ratio(log_ratio, mask)
    too_low, too_high = _outside(ratio, advantage, mask, low, high)
    capped = jnp.where(ratio > delta, delta, ratio)
    inside = jnp.where(ratio > 1 + high, 1 + high, jnp.where(ratio < 1 - low, 1 - low, ratio))
    # Where they are equal, both are the ratio or both are constant: `minimum` halves nothing.
    objective = jnp.minimum(capped * advantage, inside * advantage)
    return _objective(objective, mask), too_low | too_high


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
    `high` is relative, as in the paper, verl and SkyRL: the cap is 1 + high. TRL's is `cispo_cap`.
    The value is of the order of log p, not a surrogate of the return.
    """
    ratio = _ratio(log_ratio, mask)
    weight = jax.lax.stop_gradient(jnp.clip(ratio, 1 - low, 1 + high))
    too_low, too_high = _outside(ratio, advantage, mask, low, high)
    objective = weight * advantage * jnp.where(mask, logp, 0)
    return _objective(objective, mask), too_low | too_high


def cispo_cap(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    cap: Knob,
) -> Clipped:
    """sg(min(ratio, cap)) A log p: CISPO as in TRL and ScaleRL (arXiv:2510.13786).

    `cap` is absolute, TRL's `epsilon_high`, and there is no lower bound: cap = 5 is `cispo` with
    low 1 and high 4. Left out, TRL's is 0.2, below the ratio 1 of an on-policy token, and every
    such weight is 0.2. `clipped` are the entries above the cap with A > 0. TRL doesn't bound the
    exponent.
    """
    ratio = _ratio(log_ratio, mask)
    weight = jax.lax.stop_gradient(jnp.minimum(ratio, cap))
    objective = weight * advantage * jnp.where(mask, logp, 0)
    return _objective(objective, mask), mask & (advantage > 0) & (ratio > cap)


def sapo(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    tau_positive: Knob,
    tau_negative: Knob,
) -> Clipped:
    """(4 / tau) sigmoid(tau (ratio - 1)) A: a gate in place of a clip (SAPO, arXiv:2511.20347).

    tau is `tau_positive` where A > 0, else `tau_negative`. The slope at ratio 1 is A, and falls off
    smoothly on both sides, so nothing is `clipped`. The value at ratio 1 is 2 A / tau. Of the peers
    verl bounds the exponent as here and means over rows (`aggregation=sequence_mean`) whatever is
    asked for; TRL doesn't bound it.
    """
    ratio = _ratio(log_ratio, mask)
    tau = jnp.where(advantage > 0, tau_positive, tau_negative)
    return _objective(4 / tau * jax.nn.sigmoid(tau * (ratio - 1)) * advantage, mask), _nowhere(mask)


def gmpo(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: Knob,
    high: Knob,
) -> Clipped:
    """A exp(mean of the row's clipped log ratios): their geometric mean (GMPO, arXiv:2507.20673).

    The log ratio of a token is clipped itself, to at most `high` where A > 0 and at least -low
    where A < 0; `clipped` tokens have no gradient. Every token of the row gets the row's value, so
    that `aggregation=sequence_mean` makes it a mean over rows. Needs `ratio=token`. One advantage a
    row; of [B, T] the row's mean is taken, and its sign (verl has the sign of each token).

    The paper has low = high = 0.4. TRL counts a wholly masked row with ratio 1 in its loss, a
    constant; verl divides by n + 1e-8. Neither bounds the exponent of the row.
    """
    if advantage.shape[1] > 1:
        advantage = masked_mean(advantage, mask, 1, keepdims=True)
    log_ratio = jnp.where(mask, log_ratio, 0)
    too_low = mask & (advantage < 0) & (log_ratio < -low)
    too_high = mask & (advantage > 0) & (log_ratio > high)
    kept = jnp.where(too_high, high, jnp.where(too_low, -low, log_ratio))
    row = bounded_exp(masked_mean(kept, mask, 1, keepdims=True))
    return _objective(jnp.where(mask, advantage, 0) * row, mask), too_low | too_high


def vespo(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    correction: Float[Array, "B T"],
    correction_level: str,
    k_positive: Knob,
    lambda_positive: Knob,
    k_negative: Knob,
    lambda_negative: Knob,
) -> Clipped:
    """sg(phi(W)) A log p with phi(W) = W^k exp(lambda (1 - W)) (VESPO, arXiv:2602.10693).

    W is the ratio of the whole row between the policy and the sampler: the ratio of this axis,
    which is to be `ratio=sequence_sum`, times the correction's weights. phi is 1 at W = 1 and goes
    to 0 on both sides, so nothing is `clipped`. (k, lambda) are the positive pair where A >= 0.

    log W is held in [log 1e-8, 20], and so is the log of each weight: a weight of 0, from a
    correction that masks, makes phi all but vanish. As in TRL, which also holds the log ratio of
    each token in ±20 (here only their sum is known) and lambda above 1e-4, and turns a NaN into 0.

    Args:
      correction: weights of the axis `correction`, 1 behind the mask.
      correction_level: "token": a weight a token, whose product is the row's (token_truncate,
        token_mask, the two that TRL allows); "sequence": each token carries the weight of its row
        (sequence_truncate, sequence_mask), which counts once. The same without a correction.

    Raises:
      ValueError: another `correction_level`.
    """
    if correction_level not in ("token", "sequence"):
        raise ValueError(f"correction_level is 'token' or 'sequence', not {correction_level!r}")
    weight = jax.lax.stop_gradient(jnp.where(mask, correction, 1))
    log_row = jnp.clip(jnp.log(weight), LOG_FLOOR, LOG_LIMIT)
    if correction_level == "token":
        log_row = masked_sum(log_row, mask, 1, keepdims=True)
    log_row = jax.lax.stop_gradient(jnp.where(mask, log_ratio, 0)) + log_row
    log_row = jnp.clip(log_row, LOG_FLOOR, LOG_LIMIT)
    k = jnp.where(advantage >= 0, k_positive, k_negative)
    rate = jnp.where(advantage >= 0, lambda_positive, lambda_negative)
    log_phi = rate + k * log_row - rate * jnp.exp(log_row)
    phi = jnp.exp(jnp.minimum(log_phi, LOG_LIMIT))  # no floor: far off it is 0
    return _objective(phi * advantage * jnp.where(mask, logp, 0), mask), _nowhere(mask)


def dppo_tv(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: Knob,
    high: Knob,
    cap: Knob,
) -> Clipped:
    """sg(min(ratio, cap)) A log p, without the tokens whose probability has moved too far (DPPO,
    binary total variation, arXiv:2602.04879).

    With p and q the token's probability now and at rollout, it is dropped where A > 0 and
    p - q > high, or A < 0 and p - q < -low: a rare token has room for any ratio. Needs
    `ratio=token`. `clipped` are the dropped tokens; the cap takes no gradient away.

    This is verl's form. SkyRL and prime-rl have ratio A, the gradient flowing through the ratio,
    which is the same gradient up to the cap; in prime-rl q is the sampler's.

    Args:
      low: the largest fall of a probability where A < 0.
      high: the largest rise of a probability where A > 0.
      cap: of the weight.
    """
    p, q = _probabilities(log_ratio, logp, mask)
    dropped = mask & jnp.where(advantage > 0, p - q > high, (advantage < 0) & (p - q < -low))
    return _unless(dropped, log_ratio, advantage, logp, mask, cap), dropped


def dppo_kl(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    low: Knob,
    high: Knob,
    cap: Knob,
) -> Clipped:
    """`dppo_tv` by the binary KL, q log(q / p) + (1 - q) log((1 - q) / (1 - p)).

    A token is dropped where its KL is above `high` and its probability has risen with A > 0, or
    above `low` and it has fallen with A < 0. `low`, `high` in nats. verl's form, with its 1e-8
    inside the second log.
    """
    p, q = _probabilities(log_ratio, logp, mask)
    log_pq = jax.lax.stop_gradient(jnp.where(mask, log_ratio, 0))
    divergence = (1 - q) * jnp.log((1 - q + 1e-8) / (1 - p + 1e-8)) - q * log_pq
    up = (advantage > 0) & (p > q) & (divergence > high)
    down = (advantage < 0) & (p < q) & (divergence > low)
    dropped = mask & (up | down)
    return _unless(dropped, log_ratio, advantage, logp, mask, cap), dropped


def none(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Clipped:
    """A log p, with no ratio and no trust region (REINFORCE)."""
    return _objective(advantage * jnp.where(mask, logp, 0), mask), _nowhere(mask)


def importance(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
) -> Clipped:
    """ratio A: importance sampling with no trust region."""
    return _objective(_ratio(log_ratio, mask) * advantage, mask), _nowhere(mask)


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


def _probabilities(
    log_ratio: Float[Array, "B T"], logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Of the tokens now and at rollout, without gradient; at most 1, whatever rounding did."""
    logp = jax.lax.stop_gradient(jnp.where(mask, logp, 0))
    old_logp = logp - jax.lax.stop_gradient(jnp.where(mask, log_ratio, 0))
    return jnp.exp(jnp.minimum(logp, 0)), jnp.exp(jnp.minimum(old_logp, 0))


def _unless(
    dropped: Bool[Array, "B T"],
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    cap: Knob,
) -> Float[Array, "B T"]:
    weight = jax.lax.stop_gradient(jnp.minimum(_ratio(log_ratio, mask), cap))
    return _objective(weight * advantage * jnp.where(mask, logp, 0), mask & ~dropped)


def _nowhere(mask: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    return jnp.zeros_like(mask)


def _objective(x: Float[Array, "B T"], mask: Bool[Array, "B T"]) -> Float[Array, "B T"]:
    return jnp.where(mask, x, 0)
