"""The optimizer: clip by global norm, AdamW, a schedule with warm-up. All optax."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array


@dataclass(frozen=True)
class OptimSettings:
    """`optim` in the config. Updates are optimizer steps, not rollouts."""

    lr: float  # peak learning rate
    schedule: str  # constant, linear or cosine (both to `final_share` of the peak)
    warmup_updates: int  # linear from lr / warmup_updates
    final_share: float  # what linear and cosine have come down to when the run is over
    b1: float
    b2: float
    eps: float
    weight_decay: float  # decoupled (AdamW), on matrices only
    clip_norm: float  # gradient clipping by global norm


def make_schedule(settings: OptimSettings, updates: int) -> optax.Schedule:
    """updates -> learning rate over a run of `updates` optimizer steps. The first one is not 0."""
    peak, warm = settings.lr, settings.warmup_updates
    rest = max(updates - warm, 1)
    if settings.schedule == "constant":
        main = optax.constant_schedule(peak)
    elif settings.schedule == "linear":
        main = optax.linear_schedule(peak, peak * settings.final_share, rest)
    elif settings.schedule == "cosine":
        main = optax.cosine_decay_schedule(peak, rest, settings.final_share)
    else:
        raise ValueError(f"optim.schedule={settings.schedule!r}: constant, linear or cosine")
    if warm == 0:
        return main
    ramp = optax.linear_schedule(peak / warm, peak, max(warm - 1, 1))
    return optax.join_schedules([ramp, main], [warm])


def updates_made(opt_state: optax.OptState) -> int:
    """How many updates the optimizer has made; skipped ones don't count."""
    counts = optax.tree_utils.tree_get_all_with_path(opt_state, "count")
    return max((int(count) for _, count in counts), default=0)


class Optimizer(NamedTuple):
    """An optax transformation, and those of its numbers that a compiled step takes as arguments:
    another learning rate, schedule or number of steps is then no other program."""

    init: Callable[[Any], Any]
    update: Callable[..., tuple[Any, Any]]  # optax's, and `numbers` by name
    numbers: Callable[[Any], dict[str, float | Array]]  # optimizer state -> for the next update


def make_optimizer(settings: OptimSettings, schedule: optax.Schedule) -> Optimizer:
    """Float32 moments whatever the gradients' dtype is.

    The numbers are `lr` (f32, computed without waiting for the device), `clip_norm`, and
    `weight_decay` unless it is 0. Left out, an update has them as constants. b1, b2 and eps always
    are: 1 - b2 has few right digits in float32.
    """

    def matrices(params):
        # by name: a stacked norm scale is [L, D]; only what a dot contracts is decayed
        def is_matrix(path, leaf):
            return path[-1].key not in ("scale", "qkv_bias")

        return jax.tree_util.tree_map_with_path(is_matrix, params)

    def chain(lr: optax.Schedule, clip_norm, weight_decay=0.0) -> optax.GradientTransformation:
        return optax.chain(
            optax.clip_by_global_norm(clip_norm),
            optax.adamw(
                lr,
                b1=settings.b1,
                b2=settings.b2,
                eps=settings.eps,
                weight_decay=weight_decay,
                mask=matrices,
            ),
        )

    fixed = {"clip_norm": settings.clip_norm}
    if settings.weight_decay:
        fixed["weight_decay"] = settings.weight_decay
    plain = chain(schedule, **fixed)

    def update(gradient, state, params=None, *, lr=None, **numbers):
        if lr is None:
            return plain.update(gradient, state, params)
        return chain(lambda count: lr, **numbers).update(gradient, state, params)

    def numbers(state) -> dict[str, float | Array]:
        count = state[1][-1].count  # the schedule's own: of updates that were made, not skipped
        return {"lr": jnp.asarray(schedule(count), jnp.float32), **fixed}

    return Optimizer(plain.init, update, numbers)
