"""Reductions over the entries that count, and the mask of a completion."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Knob = int | float | Array  # a constant of a rule: a plain number, or a traced scalar of a sweep

TIED = 1e-6  # rewards that differ by no more than this are one reward
LOG_LIMIT = 20.0  # exp(20) = 4.9e8: beyond any ratio that means something, below any overflow


def masked_sum(
    x: Float[Array, "..."],
    mask: Bool[Array, "..."],
    axis: int | None = None,
    keepdims: bool = False,
) -> Float[Array, "..."]:
    """Sum of the entries where `mask` is True; what lies elsewhere (NaN, inf) cannot reach it."""
    return jnp.where(mask, x, 0).sum(axis, keepdims=keepdims)


def masked_mean(
    x: Float[Array, "..."],
    mask: Bool[Array, "..."],
    axis: int | None = None,
    keepdims: bool = False,
) -> Float[Array, "..."]:
    """Mean of the entries where `mask` is True; 0 where there are none."""
    count = mask.sum(axis, keepdims=keepdims)
    return masked_sum(x, mask, axis, keepdims) / jnp.maximum(count, 1)


def masked_std(
    x: Float[Array, "..."],
    mask: Bool[Array, "..."],
    axis: int | None = None,
    keepdims: bool = False,
    *,
    ddof: Knob = 0,
) -> Float[Array, "..."]:
    """Root of the squared deviations over `count - ddof`; 0 where `count <= ddof`."""
    mean = masked_mean(x, mask, axis, keepdims=True)
    square = masked_sum((jnp.where(mask, x, 0) - mean) ** 2, mask, axis, keepdims)
    freedom = mask.sum(axis, keepdims=keepdims) - ddof
    return jnp.where(freedom > 0, jnp.sqrt(square / jnp.maximum(freedom, 1)), 0)


def spread(
    x: Float[Array, "..."],
    mask: Bool[Array, "..."],
    axis: int | None = None,
    keepdims: bool = False,
) -> Float[Array, "..."]:
    """Largest minus smallest entry where `mask` is True; 0 where there are none.

    Equal floats have a spread of exactly 0, while their standard deviation in float32 need not be
    0 (eight times 0.7: the mean is off by one rounding). Every test for a tied group uses this.
    """
    high = jnp.where(mask, x, -jnp.inf).max(axis, keepdims=keepdims)
    low = jnp.where(mask, x, jnp.inf).min(axis, keepdims=keepdims)
    return jnp.where(mask.any(axis, keepdims=keepdims), high - low, 0)


def scorable(reward: Float[Array, "..."]) -> Bool[Array, "..."]:
    """False where a completion could not be scored, which a reward says with NaN."""
    return ~jnp.isnan(reward)


def bounded_exp(x: Float[Array, "..."]) -> Float[Array, "..."]:
    """exp(x) with x held in ±20, as verl and OpenRLHF do; outside, the gradient is 0.

    Without the bound an overflow to inf meets a gradient of 0 in a clipped branch, and inf * 0 is
    NaN. A NaN input stays NaN.
    """
    return jnp.exp(jnp.clip(x, -LOG_LIMIT, LOG_LIMIT))


def first_eos(
    ids: Int[Array, "B T"], eos_ids: tuple[int, ...] | Int[Array, "E"]
) -> Int[Array, "B"]:
    """Position of the first EOS in a row; T where a row has none (a truncated completion).

    Args:
      ids: completion token ids, right-padded.
      eos_ids: every id that ends a completion (Llama 3 has three).
    """
    hit = jnp.isin(ids, jnp.asarray(eos_ids, ids.dtype))
    return jnp.where(hit.any(1), hit.argmax(1), ids.shape[1])


def completion_mask(
    ids: Int[Array, "B T"], eos_ids: tuple[int, ...] | Int[Array, "E"]
) -> Bool[Array, "B T"]:
    """True through the first EOS, inclusive.

    From positions, never from `ids != pad`: a model whose pad id is its EOS id would lose the EOS,
    or keep all that follows it.
    """
    return jnp.arange(ids.shape[1]) <= first_eos(ids, eos_ids)[:, None]
