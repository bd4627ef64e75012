"""Algorithms and batches for the tests of the loss: GRPO unless an axis says otherwise."""

from functools import partial

import jax.numpy as jnp
import numpy as np

from grpo_jax.kernels import (
    aggregation,
    baseline,
    clip,
    combine,
    correction,
    filter,
    kl,
    ratio,
    scale,
    select,
    shaping,
    truncation,
)
from grpo_jax.types import Algorithm, Entropy, Filter, Kl

RATIO = {
    "token": ratio.token,
    "sequence": ratio.sequence,
    "sequence_sum": ratio.sequence_sum,
}
CLIP = {
    "symmetric": partial(clip.bounded, low=0.2, high=0.2),
    "higher": partial(clip.bounded, low=0.2, high=0.28),
    "dual": partial(clip.dual, low=0.2, high=0.2, cap=3.0),
    "cispo": partial(clip.cispo, low=1.0, high=0.28),
    "none": clip.none,
    "importance": clip.importance,
}
AGGREGATION = {
    "sequence_mean": aggregation.sequence_mean,
    "token_mean": aggregation.token_mean,
    "prompt_mean": aggregation.prompt_mean,
    "constant": partial(aggregation.constant, length=16),
    "sequence_sum": aggregation.sequence_sum,
}
KL = {name: Kl(getattr(kl, name), 0.04, "loss") for name in ("k1", "k2", "k3")}
CORRECTION = {
    "none": correction.none,
    "token_truncate": partial(correction.token_truncate, cap=1.1),
    "token_mask": partial(correction.token_mask, low=0.9, high=1.1),
    "sequence_truncate": partial(correction.sequence_truncate, cap=1.1),
    "sequence_mask": partial(correction.sequence_mask, low=0.9, high=1.1),
}
AXES = {  # those that act in the loss
    "ratio": RATIO,
    "clip": CLIP,
    "aggregation": AGGREGATION,
    "kl": KL,
    "correction": CORRECTION,
}


def make_algorithm(**axes) -> Algorithm:
    """GRPO of the article (ddof 0, eps 1e-8, symmetric clip, no KL), with `axes` replaced."""
    article = {
        "shaping": shaping.none,
        "filter": Filter(filter.none, on=None, max_rounds=1, on_exhausted="partial"),
        "baseline": baseline.group_mean,
        "scale": partial(scale.group_std, ddof=0, eps=1e-8),
        "ratio": RATIO["token"],
        "clip": CLIP["symmetric"],
        "aggregation": AGGREGATION["sequence_mean"],
        "kl": Kl(kl.none, 0.0, "loss"),
        "correction": correction.none,
        "truncation": truncation.keep,
        "combine": combine.sum_then_normalize,
        "select": select.none,
        "entropy": Entropy(0.0, None),
    }
    return Algorithm(**{**article, **axes})


def one_axis_at_a_time() -> dict[str, Algorithm]:
    """The article's algorithm with each value of each axis of the loss put in, one by one."""
    return {
        f"{axis}={name}": make_algorithm(**{axis: value})
        for axis, values in AXES.items()
        for name, value in values.items()
    }


def together() -> dict[str, Algorithm]:
    """A few algorithms in which every value of every axis of the loss occurs at least once."""
    rows = {}
    for i in range(max(map(len, AXES.values()))):
        names = {axis: list(values)[i % len(values)] for axis, values in AXES.items()}
        rows["-".join(names.values())] = make_algorithm(
            **{axis: AXES[axis][name] for axis, name in names.items()}
        )
    return rows


def make_batch(seed: int = 4, prompts: int = 3, group: int = 4, width: int = 6) -> dict:
    """Arrays of a minibatch in the float dtype of the moment, with ratios on both sides of a clip.

    Uneven lengths from 1 to `width`, a hole in row 1, and a last row that is wholly masked.
    """
    rng = np.random.default_rng(seed)
    rows = prompts * group
    length = rng.integers(1, width + 1, rows)
    length[1] = width
    mask = np.arange(width) < length[:, None]
    mask[1, 2] = False
    mask[-1] = False
    logp = -rng.exponential(1.0, (rows, width)) - 0.02
    old = logp + rng.normal(0, 0.3, (rows, width))
    return {
        "logp": jnp.asarray(logp, float),
        "old_logp": jnp.asarray(old, float),
        "sampler_logp": jnp.asarray(old + rng.normal(0, 0.1, (rows, width)), float),
        "ref_logp": jnp.asarray(logp + rng.normal(0, 0.4, (rows, width)), float),
        "advantage": jnp.asarray(rng.normal(0, 1, rows), float),
        "mask": jnp.asarray(mask),
        "group": jnp.repeat(jnp.arange(prompts), group),
    }
