"""What can't work is refused, what would do nothing is announced: before anything loads."""

import math
from collections.abc import Iterator
from functools import reduce
from typing import Any

from grpo_jax import names, tokenizer
from grpo_jax.assemble import Run
from grpo_jax.engine.sampler import RESERVED
from grpo_jax.models.attention_kernels import NAMES
from grpo_jax.sharding import AXES, misfits

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
        "model.unroll_layers",
        "logger.completions_every",
        "warmstart.steps",
        "warmstart.warmup_steps",
        "optim.warmup_updates",
        "optim.weight_decay",
        "optim.eps",
    ),
    1: (
        *("rollout.prompts", "rollout.max_prompt_length", "rollout.max_completion_length"),
        *("rollout.length_buckets", "rollout.slots"),
        "model.attention_block",
        "train.steps",
        "train.epochs",
        "train.minibatches",
        "train.micro_batch_rows",
        "train.vocab_chunk",
        "train.max_nonfinite",
        "mesh.start_seconds",
        "mesh.heartbeat_seconds",
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
    *("optim.final_share", "warmstart.clean_share"),
    *("warmstart.decay_share", "warmstart.final_share"),
)
DECAYS = ("optim.b1", "optim.b2", "warmstart.b2")
MODES = {
    "optim.schedule": ("constant", "linear", "cosine"),
    "checkpoint.resume": ("auto", "never"),
    "logger.wandb": ("offline", "online", "disabled"),
    "model.dtype": ("float32", "bfloat16"),
    "model.base_dtype": ("float32", "bfloat16"),
    "model.attention": NAMES,
    "model.remat": (False, True, "dots"),
    "model.turn_weights": ("auto", False, True),
    "engine.kind": ("jax", "vllm"),
}
AXIS_MODES = {
    "kl.where": ("loss", "reward"),
    "filter.on_exhausted": ("partial", "skip", "error"),
    "filter.surplus": ("drop", "keep"),
}
# A random model with more tokens than this was not meant: the character tokenizer has 83.
RANDOM_VOCABULARY = 1024


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
    if is_rule(scale, "scale.pass_at_k_std"):
        if not is_rule(baseline, "baseline.pass_at_k"):
            yield "scale=pass_at_k_std goes with baseline=pass_at_k"
        else:
            for key in ("k", "right"):
                if baseline[key] != scale[key]:
                    yield f"scale.{key}={scale[key]:g} is not baseline.{key}={baseline[key]:g}"
    if scale.get("hold_tied") and is_rule(baseline, "baseline.none"):
        yield (
            "scale.hold_tied=true with baseline=none: groups in which every answer got 0 would be "
            "left alone, where they are below the mean"
        )
    clip, correction = config["clip"], config["correction"]
    if is_rule(clip, "clip.vespo"):
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
    if is_rule(correction, "correction.batch_normalised") and is_rule(
        correction["rule"], "correction.off_policy_sequence"
    ):
        yield "correction.rule: off_policy_sequence can hold batch_normalised, and not be in it"
    alone = is_rule(config["combine"], "combine.normalize_then_sum")
    if alone and is_rule(baseline, "baseline.greedy"):
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
    free = any(is_rule(node, f"clip.{rule}") for rule in ("gmpo", "dppo_tv", "dppo_kl"))
    ordered = not free and (axis != "clip" or low < 1)
    if high < low and ordered:
        yield f"{axis}.high={high:g} is below {axis}.low={low:g}"
    if is_rule(node, "clip.dual") and node["cap"] <= 1:
        yield f"clip.cap={node['cap']:g}: a dual clip caps ratios above 1"
    if node.get("ddof", 0) not in (0, 1):
        yield f"{axis}.ddof={node['ddof']}: 0 (numpy) or 1 (torch)"
    if node.get("covariance_high", 1) < node.get("covariance_low", 0):
        yield f"{axis}.covariance_high is below {axis}.covariance_low"


def _filter_values(node: dict[str, Any]) -> Iterator[str]:
    rule = node["rule"]
    if node["max_rounds"] < 1:
        yield f"filter.max_rounds={node['max_rounds']}: at least 1"
    if is_rule(rule, "filter.mixed") and rule.get("tol", 0) < 0:
        yield f"filter.rule.tol={rule['tol']:g} is negative: every group would be kept"
    if is_rule(rule, "filter.pass_range") and not rule["low"] < rule["high"]:
        yield f"filter.rule.high={rule['high']:g} is not above filter.rule.low={rule['low']:g}"


def is_rule(node: dict[str, Any], name: str) -> bool:
    """Whether a `_target_` node names that rule of grpo_jax.kernels ("clip.dual")."""
    return node["_target_"] == KERNELS + name


def _values(run: Run) -> Iterator[str]:
    def at(where: str) -> Any:
        return reduce(getattr, where.split("."), run)

    for where, known in MODES.items():
        if at(where) not in known:
            yield f"{where}={at(where)!r}: one of {', '.join(map(str, known))}"
    if run.rollout.group_size < 2:
        yield (
            f"rollout.group_size={run.rollout.group_size}: a group of one has nothing to be "
            "compared with; at least 2"
        )
    for least, places in AT_LEAST.items():
        for where in places:
            if at(where) is not None and not least <= at(where) < math.inf:
                yield f"{where}={at(where):g}: at least {least}"
    for axis, size in zip(AXES, run.mesh.sizes, strict=True):
        if size < 1 and size != -1:
            yield f"mesh.{axis}={size}: at least 1, or -1 for all devices that are left"
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
    logger, parts = run.logger, [part.name for part in run.reward]
    said = [("name", run.config["name"]), ("logger.project", logger.project)]
    said += [("logger.group", logger.group), *(("logger.tags", tag) for tag in logger.tags)]
    yield from names.problems(said, parts)
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
    if is_rule(run.config["baseline"], "baseline.pass_at_k") and k >= rollout.group_size:
        yield (
            f"baseline.k={k} of rollout.group_size={rollout.group_size}: k has to be smaller: a "
            "draw of the whole group has no other to be compared with, and every advantage is 0"
        )
    yield from _fits_model(run)
    yield from _fits_lora(run)
    yield from _fits_engine(run)
    yield from _fits_mesh(run)
    if run.eval.forced_prefix == "":
        yield "eval.forced_prefix is empty (null turns the probe off)"
    parts, on = [part.name for part in run.reward], run.algorithm.filter.on
    if on is not None and on not in parts:
        yield f"filter.on={on!r} names no part of the reward; parts: {', '.join(parts)}"


def _fits_model(run: Run) -> Iterator[str]:
    if run.model.attention == "cudnn" and run.model.dtype != "bfloat16":
        yield f"model.attention=cudnn has no {run.model.dtype}: take model.dtype=bfloat16"
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


def _fits_mesh(run: Run) -> Iterator[str]:
    mesh, shape = run.mesh, run.model.shape  # None: once the model is read
    if sum(size == -1 for size in mesh.sizes) > 1:
        yield "mesh: only one of data, fsdp and tensor can be -1, all the devices that are left"
    if mesh.tensor != 1 and run.model.attention != "xla":
        yield f"mesh.tensor cuts heads, which model.attention={run.model.attention} can't have"
    if mesh.distributed and mesh.single:
        yield "mesh.distributed=true with one device: all processes' devices are used (mesh=data)"
    if mesh.distributed and run.checkpoint.rollouts_every:
        yield "checkpoint.rollouts_every with mesh.distributed=true: one process alone records them"
    yield from misfits(mesh.sizes, run.update_rows, shape)


def _fits_engine(run: Run) -> Iterator[str]:
    engine, coldest = run.engine, 0.01
    for name in ("start_seconds", "call_seconds"):
        if not getattr(engine, name) > 0:
            yield f"engine.{name}={getattr(engine, name):g}: above 0"
    if not engine.external:
        return
    if engine.python is None and run.plan is None:
        yield (
            "engine.python is missing: the interpreter of an environment that has vLLM "
            "(docs/engine.md); plan=true needs none"
        )
    if run.mesh.distributed:
        yield f"engine={engine.kind} with mesh.distributed=true: an engine serves one process"
    if run.rollout.temperature < coldest:
        yield f"rollout.temperature={run.rollout.temperature:g}: vLLM takes {coldest} instead"
    for name in sorted({*engine.arguments} & {*RESERVED}):
        yield f"engine.arguments.{name}: not yours to say, the worker does"
    for name, value in engine.environment.items():
        if not isinstance(value, str | int | float) or isinstance(value, bool):
            yield f"engine.environment.{name}={value!r} should be text or a number"
