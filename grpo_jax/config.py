"""Configuration: Hydra's YAML in, frozen dataclasses out, mistakes refused before anything loads.

The only module that knows Hydra and OmegaConf. `compose` and `load_algorithm` do in Python what the
command line does. Types and names are checked here, values in `check.py`.
"""

import difflib
import inspect
import math
import pkgutil
import re
import secrets
import typing
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException, InstantiationException
from hydra.utils import instantiate
from jaxtyping import Array
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_jax import confidential
from grpo_jax.answers import RolloutSettings
from grpo_jax.assemble import (
    CheckpointSettings,
    LoggerSettings,
    ModelSettings,
    Run,
    TrainingError,
    TrainSettings,
)
from grpo_jax.check import ConfigError, check, check_axes
from grpo_jax.engine.sampler import EngineSettings
from grpo_jax.evaluate import EvalSettings
from grpo_jax.models.lora import LoraSettings
from grpo_jax.names import folder_name, refused_word
from grpo_jax.optim import OptimSettings
from grpo_jax.plan import devices, report
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.sharding import MeshSettings
from grpo_jax.tasks.base import Task
from grpo_jax.typed import options_of, refuse_unknown, typed, value_of
from grpo_jax.types import Algorithm, Entropy, Filter, Kl
from grpo_jax.warmstart import WarmstartSettings

CONF = Path(__file__).resolve().parent.parent / "conf"
SECTIONS = {
    "model": ModelSettings,
    "lora": LoraSettings,
    "warmstart": WarmstartSettings,
    "rollout": RolloutSettings,
    "engine": EngineSettings,
    "mesh": MeshSettings,
    "train": TrainSettings,
    "optim": OptimSettings,
    "eval": EvalSettings,
    "checkpoint": CheckpointSettings,
    "logger": LoggerSettings,
}
# The axes, what the pipeline passes to each, and what it passes to a rule that asks by name
# (`grpo_jax/rules.py`); the rest of a signature is configuration.
AXES = {
    "shaping": ("reward", "length", "truncated"),
    "filter": ("score",),
    "truncation": ("truncated",),
    "combine": ("parts", "weight", "normalise"),
    "baseline": ("reward", "length"),
    "scale": ("centered", "reward"),
    "ratio": ("logp", "old_logp", "mask"),
    "clip": ("log_ratio", "advantage", "logp", "mask"),
    "select": ("mask",),
    "aggregation": ("mask", "group"),
    "kl": ("logp", "ref_logp"),
    "correction": ("old_logp", "sampler_logp", "mask"),
    "entropy": ("coef", "entropy"),
}
OFFERED = {
    "combine": ("length",),
    "baseline": ("greedy",),
    "scale": ("length",),
    "clip": ("correction", "key"),
    "select": ("entropy",),
    "kl": ("log_ratio", "exact"),
    "correction": ("logp", "advantage"),
}
# Axes that are more than a function: a record that holds one.
RECORDS = {"filter": Filter, "kl": Kl, "entropy": Entropy}


def compose(*overrides: str, name: str = "train") -> DictConfig:
    """The configuration that `scripts/train.py OVERRIDES` would run (name="eval": eval.py); raises
    ConfigError."""
    if not CONF.is_dir():
        raise ConfigError(f"no {CONF}: grpo_jax runs from a checkout (pip install -e .)")
    check_choices(overrides)
    outer = GlobalHydra.instance().hydra  # of a Hydra application that calls us, if one does
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return hydra_compose(name, list(overrides))
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise ConfigError(str(error)) from error  # a ValueError is Hydra's for `experiment=null`
    finally:
        GlobalHydra.instance().hydra = outer


def check_choices(words: Iterable[str]) -> None:
    """Raise ConfigError, in a line, for a `group=value` that there is no file for (Hydra's own text
    has a line for each file there is), and for what must not get as far as Hydra: a credential,
    which it writes down, and a log file elsewhere."""
    for word in words:
        told = confidential.refused_word(word) or refused_word(word)
        if told is not None:
            raise ConfigError(told)
        group, _, values = word.partition("=")
        ours = group and not group.startswith("hydra/")  # plugins bring launchers of their own
        files = sorted(path.stem for path in (CONF / group).glob("*.yaml")) if ours else []
        for value in values.split(",") if files else []:
            if re.fullmatch(r"[\w-]+", value) and value not in (*files, "null"):
                close = difflib.get_close_matches(value, files, 1)
                meant = f"did you mean {close[0]}? " if close else ""
                raise ConfigError(f"{group}={value}: {meant}there are {', '.join(files)}")


def load_algorithm(name: str = "grpo", *overrides: str) -> Algorithm:
    """A preset with overrides, as on the command line: `load_algorithm("dapo", "clip=symmetric")`.

    The fields are the axis functions with their constants bound. Raises ConfigError.
    """
    return make_algorithm(resolved(compose(f"algorithm={name}", *overrides)))


def make_algorithm(config: dict[str, Any]) -> Algorithm:
    """The axes of a resolved configuration, each checked against its function's signature."""
    for axis, arguments in AXES.items():
        if axis not in config:
            raise ConfigError(f"{axis} is missing: an algorithm has one value on each axis")
        check_target(axis, config[axis], arguments, record=RECORDS.get(axis))
    check_axes(config)
    return Algorithm(**{axis: _made(axis, config[axis]) for axis in AXES})


def make_runs(config: DictConfig, job: Path, sweep: str | None = None) -> list[Run]:
    """The runs of a job: one, in its folder, or `seeds_per_job` of them, in a folder each
    (`folder.seed_folder`). Raises ConfigError.

    `sweep`: of which the job is part, the W&B group of runs that name none; else seeds of one job
    are a group.
    """
    count = value_of(int, config.get("seeds_per_job"), "seeds_per_job")
    if count < 1:
        raise ConfigError(f"seeds_per_job={count}: at least 1")
    if count == 1:
        return [_grouped(make_run(config, job), sweep)]
    runs = []
    for seed in range(first := value_of(int, config.get("seed"), "seed"), first + count):
        own = OmegaConf.merge(config, {"seed": seed, "seeds_per_job": 1})
        run = make_run(cast(DictConfig, own), job / f"seed={seed}")
        runs.append(_grouped(run, sweep or job.name))
    if not runs[0].mesh.single:
        raise ConfigError("seeds_per_job: a mesh is for one run; take mesh=one, or a job a seed")
    if runs[0].engine.external:
        raise ConfigError(
            f"seeds_per_job={count} with engine={runs[0].engine.kind}: each seed would start an "
            "engine of its own beside the others; give each a job (-m seed=0,1,...)"
        )
    return runs


def _grouped(run: Run, group: str | None) -> Run:
    return replace(run, logger=replace(run.logger, group=run.logger.group or group))


def make_run(config: DictConfig, folder: Path) -> Run:
    """A checked, typed run; nothing is loaded or compiled. Raises ConfigError."""
    values = resolved(config)
    refuse_credentials(values)
    known = {*SECTIONS, *AXES, "name", "seed", "cache", "task", "reward"}
    refuse_unknown("", values, known | {"plan", "seeds_per_job"})
    missing = sorted(known - values.keys())
    if missing:
        raise ConfigError(f"missing: {', '.join(missing)}")
    value_of(str, values["name"], "name")
    plan = _plan(values.pop("plan", False))  # no part of what the run is, and nor is:
    if values.pop("seeds_per_job", 1) != 1:
        raise ConfigError("seeds_per_job: this is for one run; scripts/train.py has several")
    sections = {name: typed(kind, values[name], name) for name, kind in SECTIONS.items()}
    algorithm = make_algorithm(values)
    reward = _reward(values["reward"])
    check_target("task", values["task"], ())
    run = Run(
        seed=value_of(int, values["seed"], "seed"),
        folder=folder,
        cache=Path(value_of(str, values["cache"], "cache")).expanduser(),
        algorithm=algorithm,
        task=_task(values["task"]),
        reward=reward,
        config=values,
        plan=plan,
        **sections,
    )
    check(run)
    return run


def refuse_credentials(values: dict[str, Any]) -> None:
    """Raise ConfigError for what a run folder must not keep (`confidential.py`)."""
    told = [*confidential.problems(values)]
    if told:
        raise ConfigError("\n".join(told))


def unique() -> str:
    """Eight letters that no other process draws: two sweeps may start in the same microsecond, on
    two hosts. One configuration, and the jobs of its sweep, have the same."""
    return secrets.token_hex(4)


OmegaConf.register_new_resolver("folder_name", folder_name, replace=True)
OmegaConf.register_new_resolver("unique", unique, replace=True, use_cache=True)


def resolved(config: DictConfig) -> dict[str, Any]:
    """Plain dicts and lists, interpolations replaced. Raises ConfigError."""
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore
    except OmegaConfBaseException as error:  # a `???`, an interpolation that leads nowhere
        raise ConfigError(f"{error.full_key}: {str(error).splitlines()[0]}") from error


def _made(where: str, node: dict[str, Any]) -> Any:
    try:
        return instantiate(node, _convert_="all")  # plain lists and dicts, not OmegaConf's
    except InstantiationException as error:
        raise ConfigError(f"{where}: {error.__cause__ or error}") from error


def _plan(value: Any) -> str | None:
    """`plan=true` or a device -> what the report takes; false -> None."""
    value = value_of(bool | str, value, "plan")
    if isinstance(value, bool):
        return report.EVERY if value else None
    try:
        devices.parse(value)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    return value


def _task(node: dict[str, Any]) -> Callable[[], Task]:
    def load() -> Task:
        try:
            task = instantiate(node, _convert_="all")
        except InstantiationException as error:
            # a value out of range, a file that isn't there, a hub out of reach: the text says what
            # to do. Anything else is a defect of the task
            if isinstance(error.__cause__, ValueError | OSError):
                raise TrainingError(f"task: {error.__cause__}") from error
            raise
        if not isinstance(task, Task):
            raise TrainingError(f"task: {node['_target_']} made no grpo_jax.tasks.base.Task")
        return task

    return load


def _reward(parts: Any) -> tuple[RewardPart, ...]:
    if not isinstance(parts, dict) or not parts:
        raise ConfigError("reward: needs at least one part, each with `function` and `weight`")
    made = []
    for name, part in parts.items():
        where = f"reward.{name}"
        if not isinstance(part, dict) or "function" not in part:
            raise ConfigError(f"{where}.function is missing: a part has `function` and `weight`")
        refuse_unknown(where, part, {"function", "weight"})
        # what else a reward takes may be columns of the data
        check_target(f"{where}.function", part["function"], ("completion", "answer"), columns=True)
        weight = value_of(float, part.get("weight", 1.0), f"{where}.weight")
        if not math.isfinite(weight):
            raise ConfigError(f"{where}.weight={weight:g} is not finite")
        made.append(RewardPart(name, _made(f"{where}.function", part["function"]), weight))
    return tuple(made)


# -------------------------------------------------------------------------------- targets


def check_target(
    where: str,
    node: Any,
    arguments: tuple[str, ...] | None,
    *,
    record: type | None = None,
    columns: bool = False,
) -> None:
    """Check a `_target_` node against the signature of what it names, which is not called.

    Args:
      where: the node's place in the configuration, for messages.
      arguments: what the pipeline passes to a function; its other parameters are the constants. A
        function with arguments is bound (`_partial_: true`). A class is made from its constants
        here, and takes the arguments when called. None: unknown.
      record: the class that it has to be (or to derive from), whose fields may be such nodes.
      columns: parameters without a constant are columns of the data, not missing.

    Raises ConfigError.
    """
    target = _target(where, node)
    if record is not None and not (isinstance(target, type) and issubclass(target, record)):
        raise ConfigError(f"{where}._target_ should be {record.__module__}.{record.__name__}")
    bound = node.get("_partial_", False)
    if arguments is not None and bound is not (bool(arguments) and not isinstance(target, type)):
        raise ConfigError(f"{where}._partial_ should be {str(not bound).lower()}")
    parameters = _constants(where, node, target, (arguments or ()) if bound else ())
    given = {key: value for key, value in node.items() if key not in ("_target_", "_partial_")}
    own = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    if bound:
        own = {n: p for n, p in own.items() if n not in OFFERED.get(_axis(where), ())}
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        foreign = where in AXES and not node["_target_"].startswith("grpo_jax.")
        refuse_unknown(where, given, own, f" ({where}=none brings no constants)" * foreign)
    for key, parameter in own.items():
        name = f"{where}.{key}"
        if key not in given:
            if parameter.default is parameter.empty and not (columns or arguments is None):
                raise ConfigError(f"{name} is missing: {node['_target_']} needs it")
        elif isinstance(given[key], dict) and "_target_" in given[key]:
            check_target(name, given[key], AXES.get(_axis(name)))
        else:
            _check_constant(parameter.annotation, given[key], name)


def _axis(where: str) -> str:
    """The axis whose arguments the rule at this place gets: its own, but for GDPO's whitening."""
    return "scale" if where == "combine.whiten" else where.split(".")[0]


def _constants(
    where: str, node: dict[str, Any], target: Any, arguments: tuple[str, ...]
) -> list[inspect.Parameter]:
    """The parameters that come from the configuration: all but the first ones, the arguments."""
    try:
        signature = inspect.signature(target, eval_str=True)
    except NameError:  # an annotation that only a type checker can read
        signature = inspect.signature(target)
    except ValueError as error:
        raise ConfigError(f"{where}._target_: {error}") from error
    parameters = list(signature.parameters.values())
    if not arguments or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return parameters
    passed, rest = parameters[: len(arguments)], parameters[len(arguments) :]
    by_place = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if len(passed) < len(arguments) or any(p.kind not in by_place for p in passed):
        raise ConfigError(
            f"{where}._target_={node['_target_']} can't be called with ({', '.join(arguments)}), "
            "which is what it gets"
        )
    return rest


def _target(where: str, node: Any) -> Any:
    """What a node names, imported."""
    if not isinstance(node, dict) or not isinstance(node.get("_target_"), str):
        raise ConfigError(f"{where}: needs a _target_, the import path of a function")
    try:
        target = pkgutil.resolve_name(node["_target_"])
    except Exception as error:  # whatever a module raises while it is imported
        text = f"{type(error).__name__}: {error}"
        raise ConfigError(f"{where}._target_={node['_target_']}: not there ({text})") from error
    if not callable(target):
        raise ConfigError(f"{where}._target_={node['_target_']} is no function")
    return target


def _check_constant(annotation: Any, value: Any, where: str) -> None:
    """Against what YAML can say; a traced scalar beside it (`float | Array`) is for sweeps."""
    options = options_of(annotation)
    if value is None and type(None) in options:
        return
    if any((typing.get_origin(o) or o) is Callable for o in options):
        raise ConfigError(f"{where}={value!r}: needs a _target_, the import path of a function")
    plain = [o for o in options if o in (int, float, str, bool, type(None))]
    if plain and all(o in plain or o is Array for o in options):
        value_of(typing.Union[tuple(plain)], value, where)  # noqa: UP007
