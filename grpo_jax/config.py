"""Configuration: Hydra's YAML in, frozen dataclasses out, mistakes refused before anything loads.

The only module that knows Hydra and OmegaConf. `compose` and `load_algorithm` do in Python what the
command line does. Types and names are checked here, values in `check.py`.
"""

import difflib
import inspect
import types
import typing
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from hydra.utils import get_object, instantiate
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from grpo_jax.answers import RolloutSettings
from grpo_jax.assemble import CheckpointSettings, LoggerSettings, ModelSettings, Run, TrainSettings
from grpo_jax.check import ConfigError, check, check_axes
from grpo_jax.evaluate import EvalSettings
from grpo_jax.optim import OptimSettings
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.types import Algorithm
from grpo_jax.warmstart import WarmstartSettings

CONF = Path(__file__).resolve().parent.parent / "conf"
AXES = tuple(field.name for field in fields(Algorithm))
SECTIONS = {
    "model": ModelSettings,
    "warmstart": WarmstartSettings,
    "rollout": RolloutSettings,
    "train": TrainSettings,
    "optim": OptimSettings,
    "eval": EvalSettings,
    "checkpoint": CheckpointSettings,
    "logger": LoggerSettings,
}
# arguments that the pipeline passes to each axis; the rest of a signature is configuration
PASSED = {
    "shaping": 3,
    "filter": 1,
    "baseline": 2,
    "scale": 2,
    "ratio": 3,
    "clip": 4,
    "aggregation": 2,
    "kl": 2,
    "correction": 3,
}


# ------------------------------------------------------------------------------ composing


def compose(*overrides: str) -> DictConfig:
    """The configuration that `scripts/train.py OVERRIDES` would run; raises ConfigError."""
    if not CONF.is_dir():
        raise ConfigError(f"no {CONF}: grpo_jax runs from a checkout (pip install -e .)")
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(CONF), version_base="1.3"):
            return hydra_compose("train", list(overrides))
    except (HydraException, OmegaConfBaseException) as error:
        raise ConfigError(str(error)) from error


def load_algorithm(name: str = "grpo", *overrides: str) -> Algorithm:
    """A preset with overrides, as on the command line: `load_algorithm("dapo", "clip=symmetric")`.

    The fields are the axis functions with their constants bound. Raises ConfigError.
    """
    config = _resolved(compose(f"algorithm={name}", *overrides))
    return make_algorithm(config)


def make_algorithm(config: dict[str, Any]) -> Algorithm:
    """The axes of a resolved configuration, each checked against its function's signature."""
    for axis in AXES:
        check_target(axis, config[axis], PASSED[axis])
    check_axes(config)
    return Algorithm(**{axis: instantiate(config[axis]) for axis in AXES})


def make_run(config: DictConfig, folder: Path) -> Run:
    """A checked, typed run; nothing is loaded or compiled. Raises ConfigError."""
    values = _resolved(config)
    known = {*SECTIONS, *AXES, "name", "seed", "cache", "task", "reward"}
    _refuse_unknown("", values, known)
    sections = {name: typed(kind, values[name], name) for name, kind in SECTIONS.items()}
    algorithm = make_algorithm(values)
    reward = _reward(values["reward"])
    check_target("task", values["task"], 0)
    run = Run(
        seed=_value(int, values["seed"], "seed"),
        folder=folder,
        cache=Path(_value(str, values["cache"], "cache")).expanduser(),
        algorithm=algorithm,
        task=lambda: instantiate(values["task"]),
        reward=reward,
        config=values,
        **sections,
    )
    check(run)
    return run


def _resolved(config: DictConfig) -> dict[str, Any]:
    try:
        return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)  # type: ignore
    except OmegaConfBaseException as error:
        raise ConfigError(str(error)) from error


def _reward(parts: dict[str, Any]) -> tuple[RewardPart, ...]:
    made = []
    for name, part in parts.items():
        if not isinstance(part, dict):
            raise ConfigError(f"reward.{name}: a part has `function` and `weight`")
        _refuse_unknown(f"reward.{name}", part, {"function", "weight"})
        where = f"reward.{name}.function"
        # completion and answer are passed; what else a reward takes may be columns of the data
        check_target(where, part["function"], 2, columns=True)
        weight = _value(float, part.get("weight", 1.0), f"reward.{name}.weight")
        made.append(RewardPart(name, instantiate(part["function"]), weight))
    if not made:
        raise ConfigError("reward: no part at all")
    return tuple(made)


# ---------------------------------------------------------------------------------- types


def typed(kind: type, values: Any, where: str) -> Any:
    """A dataclass from a mapping: no unknown key, no missing one, no wrong type."""
    if not isinstance(values, dict):
        raise ConfigError(
            f"{where}: expected a section of {', '.join(f.name for f in fields(kind))}"
        )
    _refuse_unknown(where, values, {field.name for field in fields(kind)})
    hints = typing.get_type_hints(kind)
    made = {}
    for field in fields(kind):
        if field.name in values:
            made[field.name] = _value(
                hints[field.name], values[field.name], f"{where}.{field.name}"
            )
        elif field.default is MISSING:
            raise ConfigError(f"{where}.{field.name} is missing")
    try:
        return kind(**made)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from error


def _value(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotation asks, without conversions beyond int -> float."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if value is None and type(None) in options:
        return None
    for option in options:
        origin = typing.get_origin(option) or option
        if is_dataclass(origin) and isinstance(value, dict):
            return typed(origin, value, where)
        if origin is tuple and isinstance(value, list):
            return tuple(value)
        if origin is bool and isinstance(value, bool):
            return value
        if isinstance(value, bool):
            continue
        if origin is float and isinstance(value, int | float):
            return float(value)
        if origin in (int, str) and isinstance(value, origin):
            return value
    names = " or ".join(getattr(o, "__name__", str(o)) for o in options if o is not type(None))
    hint_text = ""
    if isinstance(value, str) and value.strip("0").isdigit() and value.startswith("0"):
        hint_text = " (a number can't begin with a 0: YAML reads it as text)"
    raise ConfigError(
        f"{where}={value!r} should be a {names}, and is a {type(value).__name__}{hint_text}"
    )


def _refuse_unknown(where: str, values: dict[str, Any], known: set[str]) -> None:
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            meant = (
                f"; did you mean {close[0]}?" if close else f"; known: {', '.join(sorted(known))}"
            )
            raise ConfigError(f"unknown key {f'{where}.' if where else ''}{key}{meant}")


def check_target(where: str, node: Any, passed: int, *, columns: bool = False) -> None:
    """Check a `_target_` node's constants against the signature of what it names."""
    if not isinstance(node, dict) or "_target_" not in node:
        raise ConfigError(f"{where}: needs a _target_, the import path of a function")
    name = node["_target_"]
    try:
        target = get_object(name)
    except Exception as error:
        raise ConfigError(f"{where}._target_={name}: can't be imported ({error})") from error
    parameters = inspect.signature(target).parameters
    nested = is_dataclass(target)
    first = 0 if nested else passed
    own = dict(list(parameters.items())[first:])
    given = {k: v for k, v in node.items() if k not in ("_target_", "_partial_")}
    if not any(p.kind is p.VAR_KEYWORD for p in own.values()):
        _refuse_unknown(where, given, set(own))
    for key, parameter in own.items():
        if key not in given:
            if (
                parameter.default is parameter.empty
                and not columns
                and parameter.kind
                not in (
                    parameter.VAR_KEYWORD,
                    parameter.VAR_POSITIONAL,
                )
            ):
                raise ConfigError(f"{where}.{key} is missing: {name} needs it")
            continue
        if isinstance(given[key], dict):
            check_target(f"{where}.{key}", given[key], passed)
        else:
            _check_constant(parameter.annotation, given[key], f"{where}.{key}")


def _check_constant(annotation: Any, value: Any, where: str) -> None:
    """Against plain annotations only; `float | Array` counts as float, a missing one as anything."""
    options = (
        typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
    )
    plain = [o for o in options if o in (int, float, str, bool, type(None))]
    if plain and len(plain) == len([o for o in options if o in plain or _is_array(o)]):
        union = plain[0]
        for option in plain[1:]:
            union = union | option
        _value(union, value, where)


def _is_array(option: Any) -> bool:
    return getattr(option, "__name__", "") in ("Array", "ndarray")
