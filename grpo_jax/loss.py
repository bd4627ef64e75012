"""The loss of every algorithm."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Key

from grpo_jax.kernels.masked import Knob, bounded_exp, masked_sum
from grpo_jax.rules import asks, call
from grpo_jax.types import Algorithm

# what `policy_loss` adds up, by name
SUMS = "tokens", "selected", "clip_low", "clip_high", "ratio", "kl", "objective", "penalty", "bonus"


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
    entropy: Float[Array, "B T"] | None = None,
    entropy_coef: Knob | None = None,
    exact_kl: Float[Array, "B T"] | None = None,
    key: Key[Array, ""] | None = None,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]]]:
    """The loss of one micro-batch (of any rows of the minibatch that `weight` was made over).

    Losses and gradients add up over micro-batches to those of the minibatch, unless a rule compares
    rows (`algorithm.sees_all_rows`), which has to be given all of them. What lies behind the mask
    (NaN, inf) reaches neither. A gradient flows through `logp`, `entropy` and `exact_kl` only.

    Args:
      logp, old_logp, sampler_logp, ref_logp: of the sampled tokens, under the policy, at rollout,
        as the sampler reported it, and under the reference (None: no KL acts in the loss).
      advantage: one a row, or one a token.
      weight: `algorithm.aggregation(mask, group)` of the whole minibatch, these rows of it.
      entropy: of the policy at each token, nats. Needed by a bonus and by some `select`.
      entropy_coef: of the bonus at this step; None: `algorithm.entropy.coef`.
      exact_kl: full-vocabulary KL(policy || reference) at each token, nats (`kl=exact`).
      key: for a rule that draws at random (`clip=clip_cov`).

    Returns:
      The loss, and `SUMS`, which add up too: over tokens `tokens`, `selected`, `clip_low`,
      `clip_high` (clipped, by the sign of the advantage), `ratio`, `kl` (nats, no coefficient);
      under `weight` `objective`, `penalty`, `bonus`, so that loss = penalty - objective - bonus.

    Raises ValueError where a rule needs an argument that is None.
    """
    logp = jnp.where(mask, logp, 0)
    old_logp, sampler_logp = _fixed(old_logp, mask), _fixed(sampler_logp, mask)
    rows = mask.any(1, keepdims=True)
    advantage = _fixed(advantage[:, None], rows) if advantage.ndim == 1 else _fixed(advantage, mask)
    entropy = None if entropy is None else jnp.where(mask, entropy, 0)

    log_ratio = algorithm.ratio(logp, old_logp, mask)
    before = old_logp, sampler_logp
    objective, clipped = _objective(algorithm, log_ratio, advantage, logp, mask, *before, key)
    selected = _selected(algorithm, entropy, mask)
    objective = jnp.where(selected, objective, 0)
    kl = _kl(algorithm, logp, ref_logp, log_ratio, exact_kl, mask)
    bonus = _bonus(algorithm, entropy, entropy_coef, mask)
    terms = {"objective": objective, "penalty": algorithm.kl.coef * kl, "bonus": bonus}
    total = {name: masked_sum(weight * term, mask) for name, term in terms.items()}
    loss = total["penalty"] - total["objective"] - total["bonus"]
    low, high = clipped & (advantage < 0), clipped & (advantage > 0)
    count = {"tokens": mask, "selected": selected, "clip_low": low, "clip_high": high}
    sums = {name: (which & mask).sum().astype(logp.dtype) for name, which in count.items()} | total
    sums |= {"ratio": masked_sum(bounded_exp(log_ratio), mask), "kl": masked_sum(kl, mask)}
    return loss, jax.lax.stop_gradient(sums)


def _objective(algorithm, log_ratio, advantage, logp, mask, old_logp, sampler_logp, key):
    """The clip's objective under the sampler's correction, and what the clip holds back."""
    correction = call(
        algorithm.correction,
        *(old_logp, sampler_logp, mask),
        logp=jax.lax.stop_gradient(logp),
        advantage=advantage,
    )
    objective, clipped = call(
        algorithm.clip,
        *(log_ratio, advantage, logp, mask),
        correction=correction,
        key=_needed(key, algorithm.clip, "key"),
    )
    if not asks(algorithm.clip, "correction"):
        objective = correction * objective
    return objective, clipped


def _selected(
    algorithm: Algorithm, entropy: Float[Array, "B T"] | None, mask: Bool[Array, "B T"]
) -> Bool[Array, "B T"]:
    seen = _needed(entropy, algorithm.select, "entropy")
    seen = None if seen is None else jax.lax.stop_gradient(seen)
    return call(algorithm.select, mask, entropy=seen)


def _fixed(x: Float[Array, "B #T"], mask: Bool[Array, "B #T"]) -> Float[Array, "B #T"]:
    return jax.lax.stop_gradient(jnp.where(mask, x, 0))


def _needed(value: Any, rule: Callable, name: str) -> Any:
    """`value`, or an error where `rule` asks for it and there is none."""
    if value is None and asks(rule, name):
        raise ValueError(f"the algorithm has a rule that needs `{name}`, and got None")
    return value


def _bonus(
    algorithm: Algorithm,
    entropy: Float[Array, "B T"] | None,
    coef: Knob | None,
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    if not algorithm.entropy.active:
        return jnp.zeros(mask.shape)
    if entropy is None:
        raise ValueError("the algorithm has an entropy bonus, and got no entropy")
    return (algorithm.entropy.coef if coef is None else coef) * entropy


def _kl(
    algorithm: Algorithm,
    logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"] | None,
    log_ratio: Float[Array, "B T"],
    exact_kl: Float[Array, "B T"] | None,
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T"]:
    kl = algorithm.kl
    if not (kl.active and kl.where == "loss"):
        return jnp.zeros_like(logp)
    if ref_logp is None:
        raise ValueError("the algorithm has a KL in its loss, and the batch no ref_logp")
    exact = _needed(exact_kl, kl.estimator, "exact")
    exact = None if exact is None else jnp.where(mask, exact, 0)
    return kl(logp, _fixed(ref_logp, mask), log_ratio=log_ratio, exact=exact)
