"""The optimizer: clip by global norm, AdamW, a schedule with warm-up. All optax."""

from dataclasses import dataclass

import jax
import optax


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


def make_optimizer(
    settings: OptimSettings, schedule: optax.Schedule
) -> optax.GradientTransformation:
    """Float32 moments whatever the gradients' dtype is."""

    def matrices(params):
        # by name: a stacked norm scale is [L, D]; only what a dot contracts is decayed
        def is_matrix(path, leaf):
            return path[-1].key not in ("scale", "qkv_bias")

        return jax.tree_util.tree_map_with_path(is_matrix, params)

    return optax.chain(
        optax.clip_by_global_norm(settings.clip_norm),
        optax.adamw(
            schedule,
            b1=settings.b1,
            b2=settings.b2,
            eps=settings.eps,
            weight_decay=settings.weight_decay,
            mask=matrices,
        ),
    )
