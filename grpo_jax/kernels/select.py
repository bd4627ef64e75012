"""Axis `select`: which tokens have a policy term.

Every value is `(mask bool[B, T]) -> bool[B, T]`, False behind the mask. The KL penalty, the entropy
bonus and all denominators go on as if every token were selected. A value that asks for `entropy`
[B, T] gets that of the current policy at each token (nats), without gradient.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.kernels.masked import Knob
from grpo_jax.rules import across_rows


def none(mask: Bool[Array, "B T"]) -> Bool[Array, "B T"]:
    """Every token of the mask."""
    return mask


@across_rows
def top_entropy(
    mask: Bool[Array, "B T"], *, entropy: Float[Array, "B T"], share: Knob
) -> Bool[Array, "B T"]:
    """The tokens where the policy was least sure ("80/20", arXiv:2506.01939).

    Those with an entropy of at least the quantile 1 - `share` (linear between neighbours) of all
    tokens of the minibatch; TRL takes the quantile of a micro-batch. More than `share` of them
    where many are tied, as all are that have entropy 0 and a `share` that reaches them.

    Args:
      share: of the tokens, 0 to 1: 0 keeps the one of highest entropy, 1 keeps all.
    """
    threshold = _quantile(entropy, mask, 1 - jnp.asarray(share, entropy.dtype))
    return mask & ~(entropy < threshold)  # so that a NaN is selected, and seen


def _quantile(
    x: Float[Array, "B T"], mask: Bool[Array, "B T"], q: Float[Array, ""]
) -> Float[Array, ""]:
    """As numpy's, over the entries in the mask; any number if there are none."""
    order = jnp.sort(jnp.where(mask, x, jnp.finfo(x.dtype).max).reshape(-1))  # the masked come last
    last = jnp.maximum(mask.sum() - 1, 0)
    place = _snap(q * last, last)
    below = jnp.floor(place).astype(int)
    above = jnp.minimum(below + 1, last)
    return order[below] + (order[above] - order[below]) * (place - below)


def _snap(place: Float[Array, ""], last: Int[Array, ""]) -> Float[Array, ""]:
    """To the whole number that rounding missed: 0.8 * 40 a little above 32 would lose token 32."""
    nearest = jnp.round(place)
    slack = 4 * jnp.finfo(place.dtype).eps * last
    return jnp.where(jnp.abs(place - nearest) <= slack, nearest, place)
