"""What can't work is refused, what would do nothing is announced: before anything loads."""

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

from grpo_jax import tokenizer
from grpo_jax.assemble import Run

KERNELS = "grpo_jax.kernels."
SEEDS = 2**32  # JAX keeps 32 bits of a seed: 2**32 would be 0 again
AXES_WITH_CONSTANTS = (
    *("shaping", "combine", "baseline", "scale", "clip", "select", "aggregation"),
    *("kl", "correction", "entropy"),
)
ABOVE_ZERO = (
    *("limit", "length", "cap", "delta", "share", "rows", "k"),
    *("tau_positive", "tau_negative", "refresh_mix"),
)
AT_MOST_ONE = ("buffer_share", "share", "refresh_mix")
# In a run, by attribute.
AT_LEAST = {
    0: (
        "seed",
        "rollout.top_k",
        "eval.every",
        "eval.seed",
        "checkpoint.every",
        "checkpoint.rollouts_every",
        "logger.completions_every",
        "warmstart.steps",
        "warmstart.warmup_steps",
        "optim.warmup_updates",
        "optim.weight_decay",
        "optim.eps",
    ),
    1: (
        "rollout.prompts",
        "rollout.max_prompt_length",
        "rollout.max_completion_length",
        "train.steps",
        "train.epochs",
        "train.minibatches",
        "train.micro_batch_rows",
        "train.vocab_chunk",
        "train.max_nonfinite",
        "eval.prompts",
        "eval.samples",
        "eval.forced_prompts",
        "checkpoint.keep",
        "warmstart.batch",
        "warmstart.max_tokens",
    ),
}
POSITIVE = ("rollout.temperature", "optim.lr", "warmstart.lr")
CLIP_NORMS = ("optim.clip_norm", "warmstart.clip_norm")
SHARES = (
    "optim.final_share",
    "warmstart.clean_share",
    "warmstart.decay_share",
    "warmstart.final_share",
)
DECAYS = ("optim.b1", "optim.b2", "warmstart.b2")
MODES = {
    "optim.schedule": ("constant", "linear", "cosine"),
    "checkpoint.resume": ("auto", "never"),
    "logger.wandb": ("offline", "online", "disabled"),
    "model.dtype": ("float32", "bfloat16"),
    "model.base_dtype": ("float32", "bfloat16"),
}
AXIS_MODES = {
    "kl.where": ("loss", "reward"),
    "filter.on_exhausted": ("partial", "skip", "error"),
    "filter.surplus": ("drop", "keep"),
}
# A random model with more tokens than this was not meant: the character tokenizer has 83.
RANDOM_VOCABULARY = 1024
# Rules made for one kind of ratio: with another they are something that no paper has.
MADE_FOR = {
    "gmpo": "token",
    "dppo_tv": "token",
    "dppo_kl": "token",
    "kl_cov": "token",
    "vespo": "sequence_sum",
}


class ConfigError(ValueError):
    """A configuration that can't be run. The message is for the user, and fits on a screen."""


def check(run: Run) -> None:
    """Raise ConfigError with every problem found, one a line."""
    # what has to agree is looked at once every value makes sense by itself
    problems = [*_values(run), *_axis_values(run.config)] or [*_fits(run)]
    if problems:
        raise ConfigError("\n".join(problems))


def check_axes(config: dict[str, Any]) -> None:
    """The constants of the axes alone (for `load_algorithm`, which has no run)."""
    problems = [*_axis_values(config)]
    if problems:
        raise ConfigError("\n".join(problems))


def announce(run: Run) -> list[str]:
    """One line for each knob of this run that does nothing, or not what its name suggests."""
    lines = [*_announce_ratios(run)]
    if run.rollout.top_p < 1 or run.rollout.top_k > 0:
        lines.append(
            "rollout.top_p or top_k is on: the sampler's log-probs are renormalised and the "
            "trainer's are not, so ratios are biased (by the mass that was cut)"
        )
    lines += [*_announce_kl(run.config["kl"]), *_announce_filter(run.config["filter"])]
    lines += [*_announce_rows(run)]
    updates = run.train.steps * run.train.updates_per_rollout
    if run.optim.warmup_updates >= updates:
        lines.append(
            f"optim.warmup_updates={run.optim.warmup_updates}: the run has {updates} updates, and "
            "ends before optim.lr is reached"
        )
    if run.optim.schedule == "constant" and run.optim.final_share:
        lines.append("optim.final_share does nothing under optim.schedule=constant")
    if run.lora.targets and not run.lora.active:
        lines.append("lora.rank=0: no adapters; all parameters are trained")
    return lines


def _announce_ratios(run: Run) -> Iterator[str]:
    clip, ratio = run.config["clip"], run.config["ratio"]
    if run.train.updates_per_rollout == 1:
        yield (
            "one update a rollout (train.epochs=1 train.minibatches=1): every ratio is 1, so ratio "
            "and clip are inert; symmetric, higher and cispo have the same gradient"
        )
    if _is(clip, "clip.none") and not _is(ratio, "ratio.token"):
        yield "clip=none takes no ratio: ratio is inert"
    rule = clip["_target_"].rsplit(".", 1)[-1]
    kind = MADE_FOR.get(rule) if clip["_target_"].startswith(KERNELS) else None
    if kind is not None and not _is(ratio, f"ratio.{kind}"):
        yield f"clip.{rule} is made for ratio={kind}; with another it is not what its paper has"
    if not clip["_target_"].startswith(KERNELS) or "high" not in clip:
        return
    high = clip["high"]
    if _is(ratio, "ratio.token") and high < 0.01:
        yield (
            f"clip.high={high:g} is a range for whole answers (GSPO), and ratio=token: nearly "
            "every token that moves is clipped"
        )
    if _is(ratio, "ratio.sequence") and high >= 0.1:
        yield (
            f"clip.high={high:g} is a range for tokens, and ratio=sequence moves about a thousand "
            "times less: nothing is clipped (GSPO has 3e-4 and 4e-4: clip=sequence)"
        )


def _announce_rows(run: Run) -> Iterator[str]:
    rows = run.rollout.prompts * run.rollout.group_size // run.train.minibatches
    aggregation, config = run.config["aggregation"], run.config
    if _is(aggregation, "aggregation.local"):
        if aggregation["rows"] >= rows:
            yield (
                f"aggregation.rows={aggregation['rows']} covers the minibatch of {rows} rows: "
                "local denominators are the global ones (lower train.micro_batch_rows)"
            )
        else:
            yield "aggregation=local reproduces a bug on purpose: denominators of each micro-batch"
    shaped = not _is(config["shaping"], "shaping.none")
    if _is(config["baseline"], "baseline.greedy") and (shaped or config["kl"]["where"] == "reward"):
        yield (
            "baseline=greedy is the reward of the greedy answer alone; shaping and a KL in the "
            "reward are in the sampled ones only"
        )
    weights = [part.weight for part in run.reward if part.weight]
    if _is(config["combine"], "combine.normalize_then_sum") and len(weights) == 1:
        yield (
            "combine=normalize_then_sum and one reward part that counts: it only adds a whitening "
            "(and shaping or a KL in the reward becomes a part of its own)"
        )


def _announce_kl(kl: dict[str, Any]) -> Iterator[str]:
    if _is(kl["estimator"], "kl.none") and kl["coef"]:
        yield f"kl=none estimates nothing: kl.coef={kl['coef']:g} does nothing (kl=k3, say)"
    if _is(kl["estimator"], "kl.k3_weighted") and kl["where"] == "reward" and kl["coef"]:
        yield "kl=k3_weighted in the reward is k3: on the rollout's own policy the ratio is 1"
    if not kl["coef"] and kl.get("refresh_every"):
        yield "kl.coef=0: kl.refresh_every does nothing"
    if _is(kl["estimator"], "kl.k1") and kl["where"] == "loss" and kl["coef"]:
        yield "k1 in the loss: its mean gradient is zero (use kl.where=reward, k2 or k3)"


def _announce_filter(node: dict[str, Any]) -> Iterator[str]:
    if not _is(node["rule"], "filter.none"):
        if node["max_rounds"] == 1:
            yield "filter.max_rounds=1: dropped groups are masked, not replaced"
            if node.get("surplus", "drop") == "keep" and node["on_exhausted"] != "skip":
                yield "filter.max_rounds=1: there is no surplus to keep"
    elif (node["on"], node["max_rounds"], node["on_exhausted"]) != (None, 1, "partial"):
        yield "filter=none keeps every group: filter.on, max_rounds and on_exhausted do nothing"
    elif node.get("surplus", "drop") == "keep":
        yield "filter=none has no surplus: filter.surplus does nothing"


def _axis_values(config: dict[str, Any]) -> Iterator[str]:
    for where, known in AXIS_MODES.items():
        axis, key = where.split(".")
        if config[axis].get(key, known[0]) not in known:
            yield f"{where}={config[axis][key]!r}: one of {', '.join(known)}"
    for axis in AXES_WITH_CONSTANTS:
        yield from _nested_constants(axis, config[axis])
    yield from _filter_values(config["filter"])
    yield from _axes_fit(config)


def _level(correction: dict[str, Any]) -> str | None:
    """Whether a correction has weights of tokens or of whole answers; None: it has none."""
    if "rule" in correction:
        return _level(correction["rule"])
    name = correction["_target_"].rsplit(".", 1)[-1].split("_")[0]
    return name if name in ("token", "sequence") else None


def _nested_constants(where: str, node: dict[str, Any]) -> Iterator[str]:
    """Of this project's own functions. What a user's function means by `low` is not known here."""
    if node["_target_"].startswith(("grpo_jax.kernels.", "grpo_jax.types.")):
        yield from _constants(where, node)
    for key, value in node.items():
        if isinstance(value, dict) and "_target_" in value:
            yield from _nested_constants(f"{where}.{key}", value)


def _axes_fit(config: dict[str, Any]) -> Iterator[str]:
    """What has to agree between axes."""
    baseline, scale = config["baseline"], config["scale"]
    if _is(scale, "scale.pass_at_k_std"):
        if not _is(baseline, "baseline.pass_at_k"):
            yield "scale=pass_at_k_std goes with baseline=pass_at_k"
        else:
            for key in ("k", "right"):
                if baseline[key] != scale[key]:
                    yield f"scale.{key}={scale[key]:g} is not baseline.{key}={baseline[key]:g}"
    if scale.get("hold_tied") and _is(baseline, "baseline.none"):
        yield (
            "scale.hold_tied=true with baseline=none: groups in which every answer got 0 would be "
            "left alone, where they are below the mean"
        )
    clip, correction = config["clip"], config["correction"]
    if _is(clip, "clip.vespo"):
        level = clip["correction_level"]
        if level not in ("token", "sequence"):
            yield f"clip.correction_level={level!r}: token or sequence"
        elif correction["_target_"].startswith(f"{KERNELS}correction.") and (
            _level(correction) not in (level, None)
        ):
            yield (
                f"clip.correction_level={level} beside a correction by {_level(correction)}: they "
                "have to agree"
            )
    if _is(correction, "correction.batch_normalised") and _is(
        correction["rule"], "correction.off_policy_sequence"
    ):
        yield "correction.rule: off_policy_sequence can hold batch_normalised, and not be in it"
    alone = _is(config["combine"], "combine.normalize_then_sum")
    if alone and _is(baseline, "baseline.greedy"):
        yield (
            "baseline=greedy knows the total reward of the greedy answer, and "
            "combine=normalize_then_sum needs a baseline for each part"
        )


def _constants(axis: str, node: dict[str, Any]) -> Iterator[str]:
    for key, value in node.items():
        if isinstance(value, int | float) and not isinstance(value, bool):
            if value < 0 or not math.isfinite(value):
                yield f"{axis}.{key}={value:g}: not negative, and finite"
            elif value == 0 and key in ABOVE_ZERO:
                yield f"{axis}.{key}=0: above 0"
            elif value > 1 and key in AT_MOST_ONE:
                yield f"{axis}.{key}={value:g}: a share, at most 1"
    # `low` from 1 on is no bound: a ratio is never below 0
    low, high = node.get("low", 0), node.get("high", math.inf)
    free = any(_is(node, f"clip.{rule}") for rule in ("gmpo", "dppo_tv", "dppo_kl"))
    ordered = not free and (axis != "clip" or low < 1)
    if high < low and ordered:
        yield f"{axis}.high={high:g} is below {axis}.low={low:g}"
    if _is(node, "clip.dual") and node["cap"] <= 1:
        yield f"clip.cap={node['cap']:g}: a dual clip caps ratios above 1"
    if node.get("ddof", 0) not in (0, 1):
        yield f"{axis}.ddof={node['ddof']}: 0 (numpy) or 1 (torch)"
    if node.get("covariance_high", 1) < node.get("covariance_low", 0):
        yield f"{axis}.covariance_high is below {axis}.covariance_low"


def _filter_values(node: dict[str, Any]) -> Iterator[str]:
    rule = node["rule"]
    if node["max_rounds"] < 1:
        yield f"filter.max_rounds={node['max_rounds']}: at least 1"
    if _is(rule, "filter.mixed") and rule.get("tol", 0) < 0:
        yield f"filter.rule.tol={rule['tol']:g} is negative: every group would be kept"
    if _is(rule, "filter.pass_range") and not rule["low"] < rule["high"]:
        yield f"filter.rule.high={rule['high']:g} is not above filter.rule.low={rule['low']:g}"


def _is(node: dict[str, Any], name: str) -> bool:
    return node["_target_"] == KERNELS + name


def _values(run: Run) -> Iterator[str]:
    def at(where: str) -> Any:
        return reduce(getattr, where.split("."), run)

    for where, known in MODES.items():
        if at(where) not in known:
            yield f"{where}={at(where)!r}: one of {', '.join(known)}"
    if run.rollout.group_size < 2:
        yield (
            f"rollout.group_size={run.rollout.group_size}: a group of one has nothing to be "
            "compared with; at least 2"
        )
    for least, places in AT_LEAST.items():
        for where in places:
            if not least <= at(where) < math.inf:
                yield f"{where}={at(where):g}: at least {least}"
    for where in ("seed", "eval.seed"):
        if at(where) >= SEEDS:
            yield f"{where}={at(where)}: below 2**32 (JAX keeps 32 bits of it)"
    for where in POSITIVE:
        if not 0 < at(where) < math.inf:
            yield f"{where}={at(where):g}: above 0, and finite"
    for where in CLIP_NORMS:
        if not at(where) > 0:
            yield f"{where}={at(where):g}: above 0 (inf clips nothing)"
    for where in SHARES:
        if not 0 <= at(where) <= 1:
            yield f"{where}={at(where):g}: a share, from 0 to 1"
    for where in DECAYS:
        if not 0 <= at(where) < 1:
            yield f"{where}={at(where):g}: from 0 to below 1"
    if not 0 < run.rollout.top_p <= 1:
        yield f"rollout.top_p={run.rollout.top_p:g}: above 0, at most 1 (which is off)"
    if not any(part.weight for part in run.reward):
        yield "reward: every weight is 0, so every reward is"


def _fits(run: Run) -> Iterator[str]:
    """What has to agree between sections."""
    rollout, train = run.rollout, run.train
    if rollout.prompts % train.minibatches:
        yield (
            f"rollout.prompts={rollout.prompts} can't be cut into "
            f"train.minibatches={train.minibatches} of whole groups"
        )
    if run.config["scale"].get("ddof", 0) >= rollout.group_size:
        yield "scale.ddof must be below rollout.group_size"
    k = run.config["baseline"].get("k", 0)
    if _is(run.config["baseline"], "baseline.pass_at_k") and k >= rollout.group_size:
        yield (
            f"baseline.k={k} of rollout.group_size={rollout.group_size}: k has to be smaller: a "
            "draw of the whole group has no other to be compared with, and every advantage is 0"
        )
    yield from _fits_model(run)
    yield from _fits_lora(run)
    if run.eval.forced_prefix == "":
        yield "eval.forced_prefix is empty (null turns the probe off)"
    names, on = [part.name for part in run.reward], run.algorithm.filter.on
    if on is not None and on not in names:
        yield f"filter.on={on!r} names no part of the reward; parts: {', '.join(names)}"


def _fits_model(run: Run) -> Iterator[str]:
    shape, words = run.model.shape, tokenizer.char_tokenizer().vocab_size
    if run.model.path is None:
        if shape is None:
            yield "model: give either model.path or model.shape"
            return
        if shape.vocab_size < words:
            yield f"model.shape.vocab_size={shape.vocab_size}: the character tokenizer has {words}"
        if run.model.chat_arguments:
            yield "model.chat_arguments: the character tokenizer's template takes none"
        if shape.vocab_size <= RANDOM_VOCABULARY:
            return
        if run.plan is None:
            tokens = f"{shape.vocab_size:,} tokens are a pretrained model's"
            yield f"model.path=null: {tokens}; give model.path=FOLDER (plan=true needs no weights)"
    if run.warmstart.steps:
        yield "warmstart: a pretrained model has no warm start (warmstart=none)"


def _fits_lora(run: Run) -> Iterator[str]:
    kl, dtype = run.algorithm.kl, run.model.base_dtype
    if dtype != "float32" and not run.lora.active:
        yield f"model.base_dtype={dtype} is for a frozen base: lora=all_linear, or float32"
    if run.lora.active and kl.active and kl.refresh_every and kl.refresh_mix != 1:
        yield (
            f"kl.refresh_mix={kl.refresh_mix:g} with lora: mixed adapters are no mix of weights; "
            "kl.refresh_mix=1 puts the reference where the policy is"
        )
