"""What a rollout says about itself, as flat names -> floats. Host side, numpy.

Names follow TRL's where it has one, with two flaws mended: `frac_reward_zero_std` is always of the
raw rewards' spread inside a group, and `reward_std` (over all rewards, as TRL) has
`reward_group_std` (mean over groups) beside it. Ours are under `bias/` and `filter/`.
NaN (nothing to average) is left out.
"""

import math

import numpy as np
from jaxtyping import Bool, Float, Int

TIED = 1e-6  # a group whose rewards differ by no more than this carries no signal


def reward_metrics(
    total: Float[np.ndarray, "N G"], parts: dict[str, Float[np.ndarray, "N G"]]
) -> dict[str, float]:
    """Of everything sampled, before any filter. NaN marks an unscorable row."""
    scorable = ~np.isnan(total)
    spread = _group(np.std, total)
    metrics = {
        "reward": _mean(total[scorable]),
        "reward_std": _std(total[scorable]),
        "reward_group_std": _mean(spread[~np.isnan(spread)]),
        "frac_reward_zero_std": _mean(tied(total)),
        "rewards/unscorable": float((~scorable).sum()),
    }
    for name, values in parts.items():
        known = values[~np.isnan(values)]
        metrics[f"rewards/{name}/mean"] = _mean(known)
        metrics[f"rewards/{name}/std"] = _std(known)
    return known_only(metrics)


def outcome_metrics(
    parts: dict[str, Float[np.ndarray, "B"]], lost: dict[str, Bool[np.ndarray, "B"]]
) -> dict[str, float]:
    """Rows of each part that are wrong, could not be scored, or that the scorer failed on.

    Three counters, disjoint: `rewards/<part>/wrong` (a score of 0 or less), `/unscorable` (the
    function declined) and `/failed` (`lost`: it raised, hung or crashed, whatever such a row
    scores). A scorer that is broken must not look like a policy that is.
    """
    metrics = {}
    for name, values in parts.items():
        failed = lost.get(name, np.zeros(len(values), bool))
        metrics[f"rewards/{name}/wrong"] = float(((values <= 0) & ~failed).sum())
        metrics[f"rewards/{name}/unscorable"] = float((np.isnan(values) & ~failed).sum())
        metrics[f"rewards/{name}/failed"] = float(failed.sum())
    return metrics


def tied(total: Float[np.ndarray, "N G"]) -> Bool[np.ndarray, "N"]:
    """Groups without signal: all scorable rewards equal, or none scorable."""
    spread = _group(np.max, total) - _group(np.min, total)
    return np.isnan(spread) | (spread <= TIED)


def length_metrics(
    lengths: Int[np.ndarray, "B"],
    truncated: Bool[np.ndarray, "B"],
    correct: Bool[np.ndarray, "B"] | None,
    styles: list[str] | None,
) -> dict[str, float]:
    """Completion lengths in tokens; right and wrong answers apart, and by style within each.

    Read the lengths of wrong answers within a style: the mix of styles changes in training, and
    with it the plain mean, whatever each style does.
    """
    metrics = {
        "completions/mean_length": _mean(lengths),
        "completions/min_length": float(lengths.min()),
        "completions/max_length": float(lengths.max()),
        "completions/clipped_ratio": _mean(truncated),
        "completions/mean_terminated_length": _mean(lengths[~truncated]),
    }
    label = None if styles is None else np.asarray(styles)
    if correct is not None:
        for side, chosen in (("right", correct), ("wrong", ~correct)):
            metrics[f"bias/length_{side}"] = _mean(lengths[chosen])
            for style in sorted(set(styles or [])):
                metrics[f"bias/length_{side}/{style}"] = _mean(lengths[chosen & (label == style)])
    for style in sorted(set(styles or [])):
        metrics[f"style/{style}"] = _mean(label == style)
    return known_only(metrics)


def weight_metrics(
    weight: Float[np.ndarray, "B T"],
    advantage: Float[np.ndarray, "B"],
    pass_rate: Float[np.ndarray, "N"] | None,
) -> dict[str, float]:
    """How the loss spreads over answers: the length bias and the difficulty bias as numbers.

    bias/token_weight_long: weight of a token in the longest quarter of answers over that in the
    shortest (1: no length bias). bias/advantage_{hard,medium,easy}: mean |advantage| of groups
    with pass rate up to 1/4, up to 3/4, and above (groups all right or all wrong left out).
    """
    length = (weight > 0).sum(-1)
    rows = np.flatnonzero(length)
    metrics = {"advantage/abs_mean": _mean(np.abs(advantage[rows]))}
    if len(rows) >= 4:
        order = rows[np.argsort(length[rows], kind="stable")]
        quarter = len(rows) // 4
        per_token = weight.sum(-1) / np.maximum(length, 1)
        short, long = per_token[order[:quarter]].mean(), per_token[order[-quarter:]].mean()
        metrics["bias/token_weight_long"] = float(long / short)
    if pass_rate is not None:
        size = np.abs(advantage).reshape(len(pass_rate), -1).mean(-1)
        mixed = (pass_rate > 0) & (pass_rate < 1)
        for name, low, high in (("hard", 0, 0.25), ("medium", 0.25, 0.75), ("easy", 0.75, 1)):
            inside = (pass_rate > low) & (pass_rate <= high)
            metrics[f"bias/advantage_{name}"] = _mean(size[mixed & inside])
    return known_only(metrics)


def gap_metrics(
    old_logp: Float[np.ndarray, "B T"],
    sampler_logp: Float[np.ndarray, "B T"],
    entropy: Float[np.ndarray, "B T"],
    mask: Bool[np.ndarray, "B T"],
) -> dict[str, float]:
    """Sampler against trainer (0 to float tolerance for the built-in sampler), and entropy."""
    gap = np.abs(old_logp - sampler_logp)[mask & ~np.isnan(sampler_logp)]
    return known_only(
        {
            "sampling/sampling_logp_difference/mean": _mean(gap),
            "sampling/sampling_logp_difference/max": float(gap.max()) if gap.size else math.nan,
            "entropy": _mean(entropy[mask]),
        }
    )


def correction_metrics(
    weight: Float[np.ndarray, "B T"],
    old_logp: Float[np.ndarray, "B T"],
    sampler_logp: Float[np.ndarray, "B T"],
    mask: Bool[np.ndarray, "B T"],
) -> dict[str, float]:
    """What a correction makes of that gap, before any update.

    importance_sampling_ratio/{min,mean,max} are of its weights by token (TRL's names, and as there
    behind its bounds). Ours: `effective_sample_size` of the plain ratios exp(old - sampler), a
    share of the tokens (1: sampler and trainer agree), and `corrected_fraction`, the share whose
    weight is neither their own ratio nor their row's: those beyond a bound.
    """
    log = np.where(mask & ~np.isnan(sampler_logp), old_logp - sampler_logp, 0.0)
    token = np.exp(np.clip(log, -20, 20))
    row = np.exp(np.clip(log.sum(-1, keepdims=True), -20, 20)) + 0 * token
    weight, token, row = weight[mask], token[mask], row[mask]
    if not weight.size:
        return {}
    held = ~(np.isclose(weight, token, rtol=1e-4) | np.isclose(weight, row, rtol=1e-4))
    return {
        "sampling/importance_sampling_ratio/min": float(weight.min()),
        "sampling/importance_sampling_ratio/mean": _mean(weight),
        "sampling/importance_sampling_ratio/max": float(weight.max()),
        "sampling/effective_sample_size": float(token.sum() ** 2 / (token**2).sum() / token.size),
        "sampling/corrected_fraction": _mean(held),
    }


def known_only(metrics: dict[str, float]) -> dict[str, float]:
    """Without the entries for which there was nothing to average."""
    return {name: value for name, value in metrics.items() if not math.isnan(value)}


def _mean(values) -> float:
    values = np.asarray(values)
    return float(values.mean()) if values.size else math.nan


def _std(values) -> float:
    values = np.asarray(values)
    return float(values.std()) if values.size else math.nan


def _group(reduce, total: Float[np.ndarray, "N G"]) -> Float[np.ndarray, "N"]:
    """`reduce` over each group's scorable rows; NaN for a group that has none."""
    rows = [row[~np.isnan(row)] for row in total]
    return np.array([reduce(row) if row.size else np.nan for row in rows])
