"""Axis `filter`: which groups are trained on.

Every value is `(score [N, G]) -> keep bool[N]`, where `score` is one *named* reward part before
shaping: a shaped reward nearly always varies within a group, so it would keep groups that carry no
signal. Unscorable rows (NaN) are left out of the decision.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from grpo_jax.kernels.masked import TIED, Knob, masked_mean, scorable, spread


def none(score: Float[Array, "N G"]) -> Bool[Array, "N"]:
    """Every group."""
    return jnp.ones(score.shape[0], bool)


def mixed(score: Float[Array, "N G"], *, tol: Knob = TIED) -> Bool[Array, "N"]:
    """Groups whose answers disagree: dynamic sampling (DAPO, arXiv:2503.14476, eq. 8).

    Args:
      score: the named reward part.
      tol: a group whose scores span no more than this counts as all the same.
    """
    return spread(score, scorable(score), 1) > tol


def pass_range(score: Float[Array, "N G"], *, low: Knob, high: Knob) -> Bool[Array, "N"]:
    """Groups whose mean score lies strictly between `low` and `high` (OpenRLHF's dynamic filter).

    A group with no scorable row is dropped.
    """
    ok = scorable(score)
    mean = masked_mean(score, ok, 1)
    return ok.any(1) & (low < mean) & (mean < high)
