"""What can't work is refused, what would do nothing is announced: before anything loads."""

import math
from collections.abc import Iterator
from typing import Any

from grpo_jax.assemble import Run

MODES = {
    "kl.where": ("loss", "reward"),
    "filter.on_exhausted": ("partial", "skip", "error"),
    "optim.schedule": ("constant", "linear", "cosine"),
    "checkpoint.resume": ("auto", "never"),
    "logger.wandb": ("offline", "online", "disabled"),
    "model.dtype": ("float32", "bfloat16"),
}
# constants of the axes that can't be negative, whatever function they belong to
NOT_NEGATIVE = ("eps", "low", "high", "cap", "coef", "tol", "penalty")


class ConfigError(ValueError):
    """A configuration that can't be run. The message is for the user, and fits on a screen."""


def check(run: Run) -> None:
    """Raise ConfigError with every problem found, one a line."""
    problems = [*_modes(run.config), *_ranges(run), *_fits(run)]
    if problems:
        raise ConfigError("\n".join(problems))


def check_axes(config: dict[str, Any]) -> None:
    """The constants of the axes alone (for `load_algorithm`, which has no run)."""
    problems = [*_axis_constants(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def announce(run: Run) -> list[str]:
    """One line for each knob of this run that does nothing, or not what its name suggests."""
    clip, ratio, kl = (run.config[axis] for axis in ("clip", "ratio", "kl"))
    lines = []
    if run.train.updates_per_rollout == 1:
        lines.append(
            "one update a rollout (train.epochs=1 train.minibatches=1): every ratio is 1, so ratio "
            "and clip are inert; symmetric, higher and cispo have the same gradient"
        )
    high, bounded = clip.get("high"), clip["_target_"].endswith("clip.bounded")
    by_token = ratio["_target_"].endswith("ratio.token")
    if bounded and by_token and high < 0.01:
        lines.append(
            f"clip.high={high:g} is a range for whole answers (GSPO), and ratio=token: nearly "
            "every token that moves is clipped"
        )
    if bounded and high >= 0.1 and ratio["_target_"].endswith("ratio.sequence"):
        lines.append(
            f"clip.high={high:g} is a range for tokens, and ratio=sequence moves about a thousand "
            "times less: nothing is clipped (GSPO has 3e-4 and 4e-4: clip=sequence)"
        )
    if clip["_target_"].endswith("clip.none") and not by_token:
        lines.append("clip=none takes no ratio: ratio is inert")
    if run.rollout.top_p < 1 or run.rollout.top_k > 0:
        lines.append(
            "top_p or top_k is on: the sampler's log-probs are renormalised and the trainer's are "
            "not, so ratios are biased (by the mass that was cut)"
        )
    if kl["estimator"]["_target_"].endswith("kl.k1") and kl["where"] == "loss" and kl["coef"]:
        lines.append("k1 in the loss: its mean gradient is zero (use kl.where=reward, k2 or k3)")
    rule = run.algorithm.filter
    if rule.max_rounds == 1 and not run.config["filter"]["rule"]["_target_"].endswith(".none"):
        lines.append("filter.max_rounds=1: dropped groups are masked, not replaced")
    return lines


def _modes(config: dict[str, Any]) -> Iterator[str]:
    for where, known in MODES.items():
        section, key = where.split(".")
        if config[section][key] not in known:
            yield f"{where}={config[section][key]!r}: one of {', '.join(known)}"


def _axis_constants(config: dict[str, Any]) -> Iterator[str]:
    for axis, constants in _numbers(config):
        for key, value in constants.items():
            if key in NOT_NEGATIVE and value < 0:
                yield f"{axis}.{key}={value:g} is negative"
            if not math.isfinite(value):
                yield f"{axis}.{key}={value} is not finite"
    clip, scale, shaping = config["clip"], config["scale"], config["shaping"]
    if clip.get("high", 0) < clip.get("low", 0) and clip["_target_"].startswith("grpo_jax."):
        yield f"clip.high={clip['high']:g} is below clip.low={clip['low']:g}"
    if clip.get("cap", 2) <= 1:
        yield f"clip.cap={clip['cap']:g}: a dual clip caps ratios above 1"
    if scale.get("ddof", 0) not in (0, 1):
        yield f"scale.ddof={scale['ddof']}: 0 (numpy) or 1 (torch)"
    if not 0 < shaping.get("buffer_share", 1) <= 1:
        yield f"shaping.buffer_share={shaping['buffer_share']:g}: a share of the limit, in (0, 1]"
    correction = config["correction"]
    if correction.get("high", 1) < correction.get("low", 0):
        yield "correction.high is below correction.low"


def _numbers(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, float]]]:
    for axis in ("shaping", "baseline", "scale", "ratio", "clip", "aggregation", "correction"):
        yield axis, _of_numbers(config[axis])
    yield "filter.rule", _of_numbers(config["filter"]["rule"])
    yield "kl", _of_numbers(config["kl"])


def _of_numbers(node: dict[str, Any]) -> dict[str, float]:
    return {k: v for k, v in node.items() if isinstance(v, int | float) and not isinstance(v, bool)}


def _ranges(run: Run) -> Iterator[str]:
    rollout, train, optim = run.rollout, run.train, run.optim
    if rollout.group_size < 2:
        yield (
            f"rollout.group_size={rollout.group_size}: a group of one has nothing to be compared "
            "with; at least 2"
        )
    for where, value in {
        "rollout.prompts": rollout.prompts,
        "rollout.max_prompt_length": rollout.max_prompt_length,
        "rollout.max_completion_length": rollout.max_completion_length,
        "train.steps": train.steps,
        "train.epochs": train.epochs,
        "train.minibatches": train.minibatches,
        "train.micro_batch_rows": train.micro_batch_rows,
        "train.vocab_chunk": train.vocab_chunk,
        "train.max_nonfinite": train.max_nonfinite,
        "eval.prompts": run.eval.prompts,
        "eval.samples": run.eval.samples,
        "eval.forced_prompts": run.eval.forced_prompts,
        "checkpoint.keep": run.checkpoint.keep,
        "filter.max_rounds": run.algorithm.filter.max_rounds,
    }.items():
        if value < 1:
            yield f"{where}={value}: at least 1"
    for where, value in {
        "seed": run.seed,
        "rollout.top_k": rollout.top_k,
        "eval.every": run.eval.every,
        "eval.seed": run.eval.seed,
        "checkpoint.every": run.checkpoint.every,
        "logger.completions_every": run.logger.completions_every,
        "warmstart.steps": run.warmstart.steps,
        "optim.warmup_updates": optim.warmup_updates,
        "optim.weight_decay": optim.weight_decay,
    }.items():
        if value < 0:
            yield f"{where}={value} is negative"
    if not (rollout.temperature > 0 and math.isfinite(rollout.temperature)):
        yield f"rollout.temperature={rollout.temperature:g}: above 0 (greedy groups all agree)"
    if not 0 < rollout.top_p <= 1:
        yield f"rollout.top_p={rollout.top_p:g}: in (0, 1]"
    if not (optim.lr > 0 and math.isfinite(optim.lr)):
        yield f"optim.lr={optim.lr:g}: a positive number"
    if not optim.clip_norm > 0:
        yield f"optim.clip_norm={optim.clip_norm:g}: above 0"
    for where, value in {"optim.b1": optim.b1, "optim.b2": optim.b2}.items():
        if not 0 <= value < 1:
            yield f"{where}={value:g}: in [0, 1)"
    yield from _axis_constants(run.config)


def _fits(run: Run) -> Iterator[str]:
    """What has to agree between sections."""
    rows, train = run.rollout.prompts * run.rollout.group_size, run.train
    if train.minibatches >= 1 and run.rollout.prompts % train.minibatches:
        yield (
            f"rollout.prompts={run.rollout.prompts} can't be cut into "
            f"train.minibatches={train.minibatches} of whole groups"
        )
    elif train.minibatches >= 1 and train.micro_batch_rows >= 1:
        for size in (rows, rows // train.minibatches):
            if size % min(train.micro_batch_rows, size):
                yield (
                    f"{size} rows can't be cut into micro-batches of "
                    f"train.micro_batch_rows={train.micro_batch_rows}"
                )
                break
    if run.config["scale"].get("ddof", 0) >= run.rollout.group_size > 1:
        yield "scale.ddof must be below rollout.group_size"
    if (run.model.path is None) == (run.model.shape is None):
        yield "model: give either a path or a shape"
    if run.model.path is not None and run.warmstart.steps:
        yield "warmstart: a pretrained model has no warm start (warmstart=none)"
    if run.eval.forced_prefix == "":
        yield "eval.forced_prefix is empty (null turns the probe off)"
    names, on = [part.name for part in run.reward], run.algorithm.filter.on
    if on is not None and on not in names:
        yield f"filter.on={on!r} names no part of the reward; parts: {', '.join(names)}"
