"""The update: one rollout's batch in, a few optimizer steps out.

Denominators are global: `Algorithm.aggregation` weighs the tokens of the whole minibatch once, and
micro-batches (a `lax.scan`) only add up. How a minibatch is cut can't change loss or gradient.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jaxtyping import Array, Int

from grpo_jax.loss import policy_loss
from grpo_jax.models.llama import Model
from grpo_jax.policy import PolicySettings, cut, sequence_logprobs
from grpo_jax.types import Algorithm, Batch, Params, TrainState


def make_update(
    algorithm: Algorithm,
    model: Model,
    optimizer: optax.GradientTransformation,
    settings: PolicySettings,
) -> Callable[[TrainState, Batch, Int[Array, "b"]], tuple[TrainState, dict[str, Array]]]:
    """Jitted (state, batch, rows) -> (state, metrics): one optimizer step on those rows.

    `state` is donated. A step whose loss or gradient is not finite leaves parameters and optimizer
    as they were and says so in metrics["nonfinite"]; so does one with no token to learn from
    (metrics["empty"]), since Adam would move on momentum alone.
    """

    def loss(params: Params, batch: Batch, mask, weight):
        logp, _ = sequence_logprobs(model, settings, params, batch.rollout)
        return policy_loss(
            algorithm,
            logp,
            old_logp=batch.old_logp,
            sampler_logp=batch.rollout.sampler_logp,
            ref_logp=batch.ref_logp,
            advantage=batch.advantage,
            mask=mask,
            weight=weight,
        )

    def gradient(params: Params, batch: Batch):
        mask = batch.rollout.mask & batch.keep[:, None]
        weight = algorithm.aggregation(mask, batch.group)

        def add(total, micro):
            (value, sums), grad = jax.value_and_grad(loss, has_aux=True)(params, *micro)
            return jax.tree.map(jnp.add, total, (value, sums, grad)), None

        micro = cut((batch, mask, weight), settings.micro_batch_rows)
        first = jax.tree.map(lambda a: a[0], micro)
        (value, sums), grad = jax.eval_shape(jax.value_and_grad(loss, has_aux=True), params, *first)
        zero = jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), (value, sums, grad))
        return lax.scan(add, zero, micro)[0]

    @partial(jax.jit, donate_argnums=0)
    def update(state: TrainState, batch: Batch, rows: Int[Array, "b"]):
        batch = jax.tree.map(lambda a: a[rows], batch)
        value, sums, grad = gradient(state.trainable, batch)
        norm = optax.tree.norm(grad)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        empty = sums["tokens"] == 0
        steps, opt_state = optimizer.update(grad, state.opt_state, state.trainable)
        trainable = optax.apply_updates(state.trainable, steps)
        new, old = (trainable, opt_state), (state.trainable, state.opt_state)
        trainable, opt_state = jax.tree.map(partial(jnp.where, finite & ~empty), new, old)
        metrics = _metrics(value, norm, sums) | {"nonfinite": ~finite, "empty": empty}
        if algorithm.kl.active and algorithm.kl.where == "loss":
            metrics["kl"] = sums["kl"] / jnp.maximum(sums["tokens"], 1)
        return TrainState(trainable, opt_state, state.step + 1, state.key), metrics

    return update


def _metrics(value, norm, sums: dict[str, Array]) -> dict[str, Array]:
    """Means over the minibatch's tokens, under TRL's names."""
    tokens = jnp.maximum(sums["tokens"], 1)
    return {
        "loss": value,
        "grad_norm": norm,
        "clip_ratio/low_mean": sums["clip_low"] / tokens,
        "clip_ratio/high_mean": sums["clip_high"] / tokens,
        "ratio_mean": sums["ratio"] / tokens,
    }


def minibatches(
    rows: int, group_size: int, epochs: int, count: int, rng: np.random.Generator
) -> list[Int[np.ndarray, "b"]]:
    """Row indices of each optimizer step: `count` minibatches an epoch, whole groups together.

    rows = groups * group_size; `count` must divide the groups. Groups are shuffled anew each epoch.
    """
    groups = rows // group_size
    steps = []
    for _ in range(epochs):
        for part in np.split(rng.permutation(groups), count):
            index = part[:, None] * group_size + np.arange(group_size)
            steps.append(index.reshape(-1).astype(np.int32))
    return steps
