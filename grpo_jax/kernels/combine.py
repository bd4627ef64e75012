"""Axis `combine`: one advantage from several reward parts.

Every value is `(parts [K, N, G], weight [K], normalise) -> [N, G]`, where `normalise`, [N, G] ->
[N, G], is what `baseline` and `scale` make of a reward: 0 in NaN rows, which leave the statistics.
A value that asks for `length` [N, G] gets the completions' tokens. A part of weight 0 plays no
part, not even by NaN; a row that is NaN (unscorable) in any other part has no reward, and advantage
0. TRL instead adds up the parts that it could score.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from grpo_jax.kernels.masked import scorable
from grpo_jax.rules import call

Normalise = Callable[[Array], Array]


def sum_then_normalize(
    parts: Float[Array, "K N G"], weight: Float[Array, "K"], normalise: Normalise
) -> Float[Array, "N G"]:
    """The advantage of the weighted sum: one reward (TRL's default, and everyone's with one part).

    A part with a large spread drowns the others, and different rewards with equal sums are one.
    """
    return normalise(_weighted_sum(parts, weight))


def normalize_then_sum(
    parts: Float[Array, "K N G"],
    weight: Float[Array, "K"],
    normalise: Normalise,
    *,
    length: Int[Array, "N G"],
    whiten: Callable[..., Array],
) -> Float[Array, "N G"]:
    """Each part normalised alone, then their weighted sum whitened (GDPO, arXiv:2601.05242).

    What counts is a row's place in its group in each part, and the weights alone say how much. A
    part that is equal within its groups adds nothing.

    Args:
      length: tokens of each row, for a `whiten` that asks for them.
      whiten: a value of `kernels/scale.py`, constants bound; it gets the sum as the centred reward
        and as the reward, NaN in unscorable rows. TRL whitens over rows, verl over tokens.
    """
    ok = scorable(_weighted_sum(parts, weight))
    alone = jax.vmap(normalise)(jnp.where(ok, parts, jnp.nan))
    total = jnp.where(ok, _weighted_sum(alone, weight), jnp.nan)
    return jnp.where(ok, call(whiten, total, total, length=length), 0)


def _weighted_sum(parts: Float[Array, "K N G"], weight: Float[Array, "K"]) -> Float[Array, "N G"]:
    weight = weight[:, None, None]
    return jnp.where(weight == 0, 0, weight * parts).sum(0)
