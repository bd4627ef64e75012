"""Axis `aggregation`: how much each token counts.

Every value is `(mask bool[B, T], group i32[B]) -> weight [B, T]`, and the contract is
`loss = -sum(weight * objective)`. The weight is made once per optimizer step, over the whole global
minibatch, before micro-batching and sharding, so that neither can change the loss or its gradient.
It is 0 behind the mask, and finite (all zeros) for a batch with nothing in it.

A wholly masked row still counts in B, as in TRL, and a wholly masked group in the number of groups:
masking a row takes away its own terms and rescales no other row. `token_mean` has no such count.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.kernels.masked import Knob


def sequence_mean(mask: Bool[Array, "B T"], group: Int[Array, "B"]) -> Float[Array, "B T"]:
    """1 / (B n_i): the mean over rows of the mean over a row's tokens (GRPO, arXiv:2402.03300).

    The length bias: a token of a long answer weighs less than a token of a short one.
    """
    return _weigh(mask, 1 / (len(mask) * _at_least_one(mask.sum(1, keepdims=True))))


def token_mean(mask: Bool[Array, "B T"], group: Int[Array, "B"]) -> Float[Array, "B T"]:
    """1 / sum(n): the mean over all tokens of the batch (DAPO as it is coded, in verl and TRL)."""
    return _weigh(mask, 1 / _at_least_one(mask.sum()))


def prompt_mean(mask: Bool[Array, "B T"], group: Int[Array, "B"]) -> Float[Array, "B T"]:
    """The mean over groups of the mean over a group's tokens (DAPO as printed, arXiv:2503.14476,
    eq. 8: the sum over one prompt's answers divided by their total length).

    "Prompt average" in ScaleRL (arXiv:2510.13786), `prompt_mean` in SkyRL, and what is elsewhere
    called a token mean per group: all one and the same.

    Args:
      group: any ids; rows with the same id are one group.
    """
    size = len(mask)
    _, index = jnp.unique(group, size=size, return_inverse=True)
    tokens = jax.ops.segment_sum(mask.sum(1), index, num_segments=size)[index]
    groups = index.max() + 1
    return _weigh(mask, 1 / (groups * _at_least_one(tokens[:, None])))


def constant(
    mask: Bool[Array, "B T"], group: Int[Array, "B"], *, length: Knob
) -> Float[Array, "B T"]:
    """1 / (B length): every token weighs the same in every batch (Dr. GRPO, arXiv:2503.20783).

    Args:
      length: tokens, a constant of the run (the completion budget), never the width of the batch.
    """
    return _weigh(mask, 1 / (len(mask) * _float(length)))


def sequence_sum(mask: Bool[Array, "B T"], group: Int[Array, "B"]) -> Float[Array, "B T"]:
    """1 / B: the mean over rows of the sum over a row's tokens (the policy gradient itself)."""
    return _weigh(mask, 1 / _float(len(mask)))


def token_sum(mask: Bool[Array, "B T"], group: Int[Array, "B"]) -> Float[Array, "B T"]:
    """1: the plain sum over tokens (verl's "token-sum"). Grows with batch and answers: the learning
    rate, or a bound on the gradient's norm, has to know both."""
    return _weigh(mask, _float(1))


def local(
    mask: Bool[Array, "B T"],
    group: Int[Array, "B"],
    *,
    rows: int,
    rule: Callable[[Array, Array], Array],
) -> Float[Array, "B T"]:
    """ABLATION, a known mistake: `rule` within each micro-batch, then the mean over micro-batches.

    What TRL's `bnpo` and verl's older actor do where `rule` is `token_mean`: a token's weight
    depends on which rows happen to share its micro-batch, and the result on how memory was spent.
    Nothing to train with; it shows what global denominators are for.

    Args:
      rows: of a micro-batch at most; taken as the learner cuts, B's largest divisor up to it, in
        consecutive rows.
      rule: another aggregation. Those that only count rows (`sequence_mean`) come out as they were.

    Raises:
      ValueError: `rows` is below 1.
    """
    if rows < 1:
        raise ValueError(f"rows={rows} should be 1 or more")
    size, width = mask.shape
    rows = next(n for n in range(min(rows, size), 0, -1) if size % n == 0)
    weight = jax.vmap(rule)(mask.reshape(-1, rows, width), group.reshape(-1, rows))
    return weight.reshape(size, width) * (rows / size)


def _float(x: Knob) -> Float[Array, "..."]:
    return jnp.asarray(x, jnp.result_type(float))  # float32, or float64 where x64 is on


def _at_least_one(count: Int[Array, "..."]) -> Float[Array, "..."]:
    return jnp.maximum(_float(count), 1)


def _weigh(mask: Bool[Array, "B T"], weight: Float[Array, "..."]) -> Float[Array, "B T"]:
    return jnp.where(mask, weight, 0)
