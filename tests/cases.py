"""Algorithms and batches for the tests of the loss: GRPO unless an axis says otherwise."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.kernels import (
    aggregation,
    baseline,
    clip,
    clip_covariance,
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
    "sequence_token": ratio.sequence_token,
}
DPPO = {"low": 0.05, "high": 0.05, "cap": 1.2}
VESPO = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}
COVARIANCE = {"covariance_low": 0.1, "covariance_high": 5.0}
CLIP = {
    "symmetric": partial(clip.bounded, low=0.2, high=0.2),
    "higher": partial(clip.bounded, low=0.2, high=0.28),
    "dual": partial(clip.dual, low=0.2, high=0.2, cap=3.0),
    "cispo": partial(clip.cispo, low=1.0, high=0.28),
    "none": clip.none,
    "importance": clip.importance,
    "delta": partial(clip.delta, low=0.2, high=0.2, delta=1.5),
    "cispo_cap": partial(clip.cispo_cap, cap=1.2),
    "sapo": partial(clip.sapo, tau_positive=1.0, tau_negative=1.05),
    "gmpo": partial(clip.gmpo, low=0.4, high=0.4),
    "vespo": partial(clip.vespo, correction_level="token", **VESPO),
    "dppo_tv": partial(clip.dppo_tv, **DPPO),
    "dppo_kl": partial(clip.dppo_kl, **DPPO),
    "clip_cov": partial(clip_covariance.clip_cov, low=0.2, high=0.2, share=0.1, **COVARIANCE),
    "kl_cov": partial(clip_covariance.kl_cov, share=0.1, coef=0.5),
}
SELECT = {"none": select.none, "top_entropy": partial(select.top_entropy, share=0.4)}
AGGREGATION = {
    "sequence_mean": aggregation.sequence_mean,
    "token_mean": aggregation.token_mean,
    "prompt_mean": aggregation.prompt_mean,
    "constant": partial(aggregation.constant, length=16),
    "sequence_sum": aggregation.sequence_sum,
    "token_sum": aggregation.token_sum,
    "local": partial(aggregation.local, rows=4, rule=aggregation.token_mean),
}
KL = {
    name: Kl(getattr(kl, name), 0.04, "loss")
    for name in ("k1", "k2", "k3", "k3_weighted", "k3_plus", "absolute", "exact")
}
TRUNCATE = partial(correction.token_truncate, cap=1.1)
CORRECTION = {
    "none": correction.none,
    "token_truncate": TRUNCATE,
    "token_mask": partial(correction.token_mask, low=0.9, high=1.1),
    "sequence_truncate": partial(correction.sequence_truncate, cap=1.1, low=0.9),
    "sequence_mask": partial(correction.sequence_mask, low=0.9, high=1.1),
    "off_policy_sequence": partial(correction.off_policy_sequence, threshold=0.05, rule=TRUNCATE),
    "batch_normalised": partial(correction.batch_normalised, rule=TRUNCATE, by_row=False),
    "by_row_in_off_policy_sequence": partial(
        correction.off_policy_sequence,
        threshold=0.05,
        rule=partial(correction.batch_normalised, rule=TRUNCATE, by_row=True),
    ),
}
ENTROPY = {"none": Entropy(0.0, None), "bonus": Entropy(0.01, None)}
AXES = {  # those that act in the loss
    "ratio": RATIO,
    "clip": CLIP,
    "select": SELECT,
    "aggregation": AGGREGATION,
    "kl": KL,
    "correction": CORRECTION,
    "entropy": ENTROPY,
}
BY_PLACE = ("clip=clip_cov", "aggregation=local")  # where a row stands in the batch matters


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


def together(across_rows: bool = True) -> dict[str, Algorithm]:
    """A few algorithms in which every value of every axis of the loss occurs at least once.

    Without `across_rows`, only the values that may be shown any part of a minibatch.
    """
    axes = {
        axis: {
            name: value
            for name, value in values.items()
            if across_rows or not make_algorithm(**{axis: value}).sees_all_rows
        }
        for axis, values in AXES.items()
    }
    rows = {}
    for i in range(max(map(len, axes.values()))):
        # turned a little further each round, so that axes of equal size don't go in step
        at = {axis: (i + n * (i // len(axes[axis]))) for n, axis in enumerate(axes)}
        names = {axis: list(values)[at[axis] % len(values)] for axis, values in axes.items()}
        rows["-".join(names.values())] = make_algorithm(
            **{axis: axes[axis][name] for axis, name in names.items()}
        )
    return rows


def make_batch(seed: int = 4, prompts: int = 3, group: int = 4, width: int = 6) -> dict:
    """Arrays of a minibatch in the float dtype of the moment, with ratios on both sides of a clip.

    Uneven lengths from 1 to `width`, a hole in row 1, and a last row that is wholly masked. The
    key is for rules that draw; all else has a row for each of `prompts * group` (`rows_of`).
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
        "entropy": jnp.asarray(rng.exponential(0.5, (rows, width)), float),
        "exact_kl": jnp.asarray(rng.exponential(0.1, (rows, width)), float),
        "key": jax.random.key(seed),
    }


def rows_of(batch: dict, at) -> dict:
    """Those rows of a batch of `make_batch`, in that order."""
    # by numpy: each slice would be one more program to compile
    return {n: x if n == "key" else jnp.asarray(np.asarray(x)[at]) for n, x in batch.items()}
