"""What an algorithm's gradient is in expectation, and how much it scatters, with no sampling.

On a tree policy (`models/tabular_tree.py`) the groups that a prompt can get are a finite set, so
the expectation over groups of the gradient of `policy_loss` is a sum. Advantages, weights and loss
are those that train a language model. Run it under `jax.enable_x64` for numbers exact to rounding.
"""

from dataclasses import dataclass
from itertools import combinations_with_replacement
from math import factorial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from grpo_jax.kernels.advantage import advantage
from grpo_jax.loss import policy_loss
from grpo_jax.models import tabular_tree
from grpo_jax.models.tabular_tree import Tree
from grpo_jax.types import Algorithm, Leaf, Params


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Groups:
    """Every group of G answers to one prompt, without regard to order."""

    rows: Int[Leaf, "C G"]  # which answers of the tree, ascending
    orders: Float[Leaf, "C"]  # in how many orders they can be drawn


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Comparison:
    """An expected gradient beside the true one, g."""

    scale: Float[Array, ""]  # c of the multiple c * g that is nearest to it
    cosine: Float[Array, ""]
    error: Float[Array, ""]  # its distance from c * g, over the length of c * g: 0 is the direction
    variance: Float[Array, ""]  # trace of the covariance over the squared length of the expectation


def all_groups(answers: int, size: int) -> Groups:
    """The C = binomial(answers + size - 1, size) groups of `size` out of `answers` answers."""
    rows = np.array(list(combinations_with_replacement(range(answers), size)), np.int32)
    again = np.ones(len(rows))  # n! of each run of n equal answers, one factor after the other
    run = np.ones(len(rows))
    for place in range(1, size):
        run = np.where(rows[:, place] == rows[:, place - 1], run + 1, 1)
        again *= run
    return Groups(rows, factorial(size) / again)


def group_probabilities(groups: Groups, answer: Float[Array, "S"]) -> Float[Array, "C"]:
    """The chance of each group, whose answers are drawn independently with probability `answer`."""
    return groups.orders * jnp.prod(answer[groups.rows], axis=1)


def group_advantages(
    algorithm: Algorithm, tree: Tree, rows: Int[Leaf, "C G"], reward: Float[Array, "S"]
) -> Float[Array, "C G"]:
    """The advantages of each group, as the whole batch: its statistics are then the group's."""
    length = jnp.asarray(tree.length)

    def one(rows: Int[Array, "G"]) -> Float[Array, "G"]:
        group = reward[rows][None], length[rows][None]
        return advantage(algorithm.baseline, algorithm.scale, *group)[0]

    return jax.vmap(one)(jnp.asarray(rows))


def gradients(
    algorithm: Algorithm,
    tree: Tree,
    params: Params,
    rows: Int[Leaf, "C G"],
    advantages: Float[Array, "C G"],
    *,
    old: Params,
    sampler: Params,
    weight: Float[Array, "C G T"] | None = None,
) -> Float[Array, "C P V"]:
    """Minus the gradient of the loss in the logits, of each group as a minibatch of its own.

    Args:
      algorithm: every axis from `ratio` on acts. No KL in the loss, and no rule that draws.
      params: the policy, whose gradient it is.
      rows: the answers of each group.
      advantages: theirs.
      old: the policy whose log-probs are the `old_logp` of the ratio.
      sampler: the one whose log-probs are the `sampler_logp` of the correction.
      weight: of each token; None: `algorithm.aggregation` of each group alone.
    """
    mask = jnp.asarray(tree.mask)
    old_logp, sampler_logp = tabular_tree.logps(old, tree), tabular_tree.logps(sampler, tree)

    def loss(params: Params, rows, advantages, weight) -> Float[Array, ""]:
        if weight is None:
            weight = algorithm.aggregation(mask[rows], jnp.zeros(len(rows), jnp.int32))
        return policy_loss(
            algorithm,
            tabular_tree.logps(params, tree)[rows],
            old_logp=old_logp[rows],
            sampler_logp=sampler_logp[rows],
            ref_logp=None,
            advantage=advantages,
            mask=mask[rows],
            weight=weight,
            entropy=tabular_tree.entropies(params, tree)[rows],
        )[0]

    each = jax.vmap(jax.grad(loss), (None, 0, 0, None if weight is None else 0))
    return -each(params, jnp.asarray(rows), advantages, weight)["logits"]


def compare(
    each: Float[Array, "C P V"], probability: Float[Array, "C"], true: Float[Array, "P V"]
) -> tuple[Float[Array, "P V"], Comparison]:
    """The expectation of `each` under `probability`, and how it compares with the gradient `true`.

    An expectation of 0 has no direction: `error` and `variance` are then NaN or inf.
    """
    mean = jnp.tensordot(probability, each, 1)
    square, inner = jnp.sum(mean**2), jnp.sum(mean * true)
    scale = inner / jnp.sum(true**2)
    error = jnp.linalg.norm(mean - scale * true) / jnp.linalg.norm(scale * true)
    cosine = inner / jnp.sqrt(square * jnp.sum(true**2))
    scatter = jnp.dot(probability, jnp.sum(each**2, axis=(1, 2))) - square
    return mean, Comparison(scale, cosine, error, scatter / square)
