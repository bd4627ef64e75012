"""The update: one rollout's batch in, a few optimizer steps out.

Denominators are global: `Algorithm.aggregation` weighs the tokens of the whole minibatch once, and
micro-batches (a `lax.scan`) only add up. How a minibatch is cut can't change loss or gradient, not
even under a rule that compares its rows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Int

from grpo_jax.knobs import knobs, with_knobs
from grpo_jax.loss import SUMS, policy_loss
from grpo_jax.models.llama import Model
from grpo_jax.optim import Optimizer
from grpo_jax.policy import PolicySettings, TokenStats, cut, stats_by_parts, token_stats, whole
from grpo_jax.rules import asks
from grpo_jax.sharding import ONE_DEVICE, Placement, specs
from grpo_jax.types import Algorithm, Batch, Params, TrainState

UPDATE = 2  # stream of the run's root key, for rules that draw at random (the rollout's is 1)


@dataclass(frozen=True)
class Update:
    """An optimizer step. Its program takes every number that is no structure as an argument."""

    program: jax.stages.Wrapped
    knobs: dict[str, float]  # the algorithm's
    numbers: Callable  # the optimizer's, given its state

    def __call__(
        self, state: TrainState, batch: Batch, rows, entropy_coef=None, reference=None, base=None
    ) -> tuple[TrainState, dict[str, Array]]:
        given = state, batch, rows, entropy_coef, reference, base
        return self.program(*given, self.knobs, self.numbers(state.opt_state))

    def lower(
        self, state: TrainState, batch: Batch, rows, entropy_coef=None, reference=None, base=None
    ) -> jax.stages.Lowered:
        """The program that a call with arrays of these shapes runs, not compiled."""
        given = state, batch, rows, entropy_coef, reference, base
        numbers = jax.eval_shape(self.numbers, state.opt_state)
        return self.program.lower(*given, self.knobs, numbers)


def make_update(
    algorithm: Algorithm,
    model: Model,
    optimizer: optax.GradientTransformation | Optimizer,
    settings: PolicySettings,
    group: int = 1,
    jit: Callable = jax.jit,
    place: Placement = ONE_DEVICE,
) -> Update:
    """(state, batch, rows, entropy_coef=None, reference=None, base=None) -> (state, metrics): one
    optimizer step on those rows, jitted.

    `rows` i32[b] index the batch, `group` of one prompt after the other (1: of any).
    `entropy_coef` is the bonus's at this step (None: the algorithm's). `reference` holds the
    reference's parameters, for a KL that needs its distributions (`kl=exact`) and where the state
    itself has none. `base` holds the frozen parameters where the state's are adapters beside them
    (LoRA): no gradient, never donated.

    `state` is donated. A step whose loss or gradient is not finite leaves parameters and optimizer
    as they were and says so in metrics["nonfinite"]; so does one with no token to learn from
    (metrics["empty"]), since Adam would move on momentum alone.

    The algorithm's numbers (`knobs.py`) and the optimizer's are arguments of the program, so that
    one is compiled for all of them. `jit`: what makes it, as `jax.jit` does. `place`: the devices
    that b rows are spread over (they divide b), each with its share of the state.
    """

    @partial(jit, donate_argnums=0)
    def update(state: TrainState, batch: Batch, rows, entropy_coef, reference, base, free, numbers):
        gradient = make_gradient(with_knobs(algorithm, free), model, settings, group, place)
        batch = jax.tree.map(lambda a: a[rows], batch)
        if state.reference is not None:
            reference = whole(base, state.reference)
        key = jax.random.fold_in(jax.random.fold_in(state.key, UPDATE), state.step)
        value, sums, grad = gradient(state.trainable, batch, entropy_coef, reference, key, base)
        norm = optax.tree.norm(grad)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        empty = sums["tokens"] == 0

        def step(trainable, opt_state):
            steps, opt_state = optimizer.update(grad, opt_state, trainable, **numbers)
            return optax.apply_updates(trainable, steps), opt_state

        # not a `where`: it needs the old moments beside the new ones, for which XLA copies them
        held = state.trainable, state.opt_state
        trainable, opt_state = lax.cond(finite & ~empty, step, lambda *held: held, *held)
        metrics = _metrics(algorithm, value, norm, sums) | {"nonfinite": ~finite, "empty": empty}
        new_state = TrainState(trainable, opt_state, state.step + 1, state.key, state.reference)
        return place.constrain(new_state), place.everywhere(metrics)

    numbers = optimizer.numbers if isinstance(optimizer, Optimizer) else lambda opt_state: {}
    return Update(update, knobs(algorithm), numbers)


def make_gradient(
    algorithm: Algorithm,
    model: Model,
    settings: PolicySettings,
    group: int = 1,
    place: Placement = ONE_DEVICE,
) -> Callable:
    """(trainable, batch, entropy_coef, reference, key, base=None) -> (loss, sums of `policy_loss`,
    gradient in `trainable`) of a whole minibatch, computed a micro-batch at a time; not jitted.
    `group` as in `token_stats`, `place` as in `make_update`."""

    def forward(base, reference, trainable: Params, rollout) -> TokenStats:
        exact = algorithm.kl.exact and algorithm.kl.where == "loss"
        params = whole(base, trainable)
        reference = reference if exact else None
        return token_stats(model, settings, params, rollout, reference, group)

    def of_rows(trainable, base, reference, entropy_coef, key, *rows):
        """What one device does: with its share of the rows, or if rows are compared with all."""
        ahead = partial(forward, base, reference)
        value = partial(loss, algorithm, entropy_coef, key)
        how = _all_rows_at_once if algorithm.sees_all_rows else partial(_part_by_part, live)
        return how(ahead, value, settings, place, trainable, *rows)

    def gradient(trainable: Params, batch: Batch, entropy_coef, reference, key, base=None):
        mask = batch.rollout.mask & batch.keep[:, None]
        rows = batch, mask, algorithm.aggregation(mask, batch.group)
        given = trainable, base, reference, entropy_coef, key
        everywhere = PartitionSpec()
        results = everywhere, everywhere, specs(trainable)
        if algorithm.sees_all_rows:
            return place.by_rows(of_rows, (*given, *rows), (), results)
        return place.by_rows(of_rows, given, rows, results)

    def live(batch: Batch, mask) -> Array | None:
        if not settings.skip_silent:
            return None
        signal = mask & (batch.advantage != 0)[:, None] if algorithm.silent_when_tied else mask
        return place.agreed(signal.any())

    return gradient


def loss(algorithm: Algorithm, entropy_coef, key, stats: TokenStats, batch: Batch, mask, weight):
    """`policy_loss` of a batch, or of some of its rows, whose tokens `mask` counts."""
    return policy_loss(
        algorithm,
        stats.logp,
        old_logp=batch.old_logp,
        sampler_logp=batch.rollout.sampler_logp,
        ref_logp=batch.ref_logp,
        advantage=batch.advantage,
        mask=mask,
        weight=weight,
        entropy=stats.entropy if algorithm.needs_entropy else None,
        entropy_coef=entropy_coef,
        exact_kl=stats.exact_kl,
        key=key,
    )


def _part_by_part(
    live, forward, loss, settings: PolicySettings, place: Placement, params: Params, *rows
):
    """Forward, loss and backward of one micro-batch after the other. A silent one, of which `live`
    says False, is nothing but its tokens in `sums["tokens"]`; `sums["seen"]` counts the others'.
    Devices add up at the very end."""

    def of(params, batch, *rest):
        value, sums = loss(forward(params, batch.rollout), batch, *rest)
        return value, sums | {"seen": sums["tokens"]}

    def whole_of(batch, mask, *rest):
        (value, sums), grad = jax.value_and_grad(of, has_aux=True)(params, batch, mask, *rest)
        return value, sums, grad

    def silent(batch, mask, *rest):
        value, sums, grad = nothing()
        tokens = mask.sum().astype(sums["tokens"].dtype)
        return value, sums | {"tokens": tokens, "selected": tokens}, grad

    def one(batch, mask, *rest):
        is_live = live(batch, mask)
        if is_live is None:
            return whole_of(batch, mask, *rest)
        return lax.cond(is_live, whole_of, silent, batch, mask, *rest)

    def add(total, micro):
        return jax.tree.map(jnp.add, total, one(*micro)), None

    micro = cut(rows, settings.micro_batch_rows)
    first = jax.tree.map(lambda a: a[0], micro)

    def nothing():  # made where it is needed: as a constant it would be one gradient more in memory
        zero = jnp.float32(0)
        return zero, dict.fromkeys((*SUMS, "seen"), zero), jax.tree.map(jnp.zeros_like, params)

    if len(micro[1]) == 1:  # nothing to add up, which takes two more copies of the gradient
        value, sums, grad = one(*first)
    else:
        value, sums, grad = lax.scan(add, nothing(), micro)[0]
    return *place.total((value, sums)), place.sum_gradient(grad)


def _all_rows_at_once(
    forward, loss, settings: PolicySettings, place: Placement, params: Params, batch: Batch, *rest
):
    """For rules that compare rows: a forward pass by micro-batches, the loss of all rows together
    (cheap: [b, T] numbers, on every device the same), and its gradient handed back through each
    micro-batch. One forward pass more than `_part_by_part`, and the same result for every cut."""
    rollout = place.own_rows(batch.rollout)
    stats = place.all_rows(stats_by_parts(partial(forward, params), settings, rollout))
    (value, sums), pull = jax.value_and_grad(loss, has_aux=True)(stats, batch, *rest)

    def add(total, micro):
        rollout, pull = micro
        _, back = jax.vjp(lambda params: forward(params, rollout), params)
        return jax.tree.map(jnp.add, total, back(pull)[0]), None

    zero = jax.tree.map(jnp.zeros_like, params)
    micro = cut((rollout, place.own_rows(pull)), settings.micro_batch_rows)
    grad, _ = lax.scan(add, zero, micro)
    return value, sums | {"seen": sums["tokens"]}, place.sum_gradient(grad)


def _metrics(algorithm: Algorithm, value, norm, sums: dict[str, Array]) -> dict[str, Array]:
    """Means over the minibatch's tokens, under TRL's names."""
    tokens = jnp.maximum(sums["tokens"], 1)
    metrics = {
        "loss": value,
        "grad_norm": norm,
        "clip_ratio/low_mean": sums["clip_low"] / tokens,
        "clip_ratio/high_mean": sums["clip_high"] / tokens,
        "ratio_mean": sums["ratio"] / jnp.maximum(sums["seen"], 1),
    }
    if algorithm.kl.active and algorithm.kl.where == "loss":
        metrics["kl"] = sums["kl"] / tokens
    if asks(algorithm.select, "entropy"):
        metrics["select/fraction"] = sums["selected"] / tokens
    return metrics


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
