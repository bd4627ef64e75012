"""Which objectives to replay: a recorded run's algorithm with presets or single axes changed.

Everything but the axes is the run's own: its budget (`aggregation=constant` divides by it), its
reward, its temperature.
"""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import yaml

from grpo_jax.assemble import Run
from grpo_jax.check import ConfigError
from grpo_jax.config import AXES, check_choices, compose, make_run
from grpo_jax.recording import Moment
from grpo_jax.replay import Objective

OWN = "(run)"  # the name of the run's own objective
PRESET = "algorithm"
BRACKETS = {"(": ")", "[": "]", "{": "}"}
Overrides = dict[str, str]  # key, with Hydra's "+" if it had one -> value


def objectives(moment: Moment, arguments: Sequence[str]) -> tuple[list[Objective], list[str]]:
    """(what `arguments` ask for, what to tell the user about it). Raises ConfigError; nothing is
    compiled.

    An argument is a Hydra override (`clip=higher`, `clip.high=0.3`), or a list of values to try
    (`clip=symmetric,higher`); several multiply, as in a sweep. An argument that holds several
    overrides, with spaces between them, multiplies within itself only. A selected preset replaces
    all of the run's axes; without one, the run's own are changed. The run's own objective comes
    first, unless it is among those asked for.
    """
    wanted = combinations(arguments)
    names, made = labels(wanted), [changed(moment.config, overrides) for overrides in wanted]
    own = recorded_run(moment)
    if not any(_axes(run) == _axes(own) for run, _ in made):
        names, made = [OWN, *names], [(own, []), *made]
    found, notes = [], []
    for name, (run, ignored) in zip(names, made, strict=True):
        # by this step, the run's own coefficient of the bonus may have moved
        same = run.config["entropy"] == own.config["entropy"]
        found.append(Objective(name, run.algorithm, moment.entropy_coef if same else None))
        if ignored:
            notes.append(f"{name}: {', '.join(ignored)} is not replayed, the answers are the run's")
    return found, notes


def recorded_run(moment: Moment) -> Run:
    """The run that was recorded, as `make_run` gives it. Raises ConfigError."""
    return changed(moment.config, {})[0]


def combinations(arguments: Sequence[str]) -> list[Overrides]:
    """One set of overrides for each objective, none twice. Raises ConfigError."""
    split = [argument.split() for argument in arguments]
    together = [words[0] for words in split if len(words) == 1]
    alone = [words for words in split if len(words) > 1]
    sets: list[Overrides] = []
    for words in [together, *alone] if together else alone:
        choices = dict[str, list[str]]()
        for word in words:
            key, values = _choices(word)
            if key in choices:
                raise ConfigError(f"{key} comes twice: {key}=A,B tries both values")
            choices[key] = values
        for values in product(*choices.values()):
            overrides = dict(zip(choices, values, strict=True))
            if overrides not in sets:
                sets.append(overrides)
    return sets


def labels(sets: Sequence[Overrides]) -> list[str]:
    """What tells each from the others: `dapo`, or `dapo clip=symmetric` where several keys vary."""
    keys = list(dict.fromkeys(key for overrides in sets for key in overrides))
    keys.sort(key=lambda key: key != PRESET)
    varied = [key for key in keys if len({overrides.get(key) for overrides in sets}) > 1] or keys
    names = []
    for overrides in sets:
        mine = {key: overrides[key] for key in varied if key in overrides}
        bare = len(varied) == 1  # the one key that varies goes without saying
        texts = [v if bare or key == PRESET else f"{key}={v}" for key, v in mine.items()]
        names.append(" ".join(texts) or OWN)
    return names


def changed(config: dict[str, Any], overrides: Overrides) -> tuple[Run, list[str]]:
    """(a run of this resolved configuration with other axes, checked; what a preset sets beside
    the axes, which is left out). Raises ConfigError."""
    selected = {key for key in overrides if "." not in key}
    check_choices(f"{key}={overrides[key]}" for key in selected)
    anew = set(AXES) if PRESET in selected else selected
    composed, kept = [], {axis: deepcopy(config[axis]) for axis in AXES if axis not in anew}
    for key, value in overrides.items():
        axis, *place = key.lstrip("+").split(".")
        if axis in kept:
            _put(kept[axis], place, value, key)
        else:
            composed.append(f"{key}={value}")
    made = compose(*composed) if composed else deepcopy(_plain())
    beside = []
    for key, section in {**config, **kept}.items():
        if key not in anew:
            if key not in AXES and made[key] != _plain()[key]:
                new, old = made[key], _plain()[key]
                beside += [
                    f"{key}.{name}={new[name]}" for name in new if new[name] != old.get(name)
                ]
            made[key] = section
    return make_run(made, Path(config["name"])), beside


@cache
def _plain() -> Any:
    return compose()


def _put(node: dict[str, Any], place: list[str], value: str, key: str) -> None:
    """Set a constant of a resolved axis; only a key with "+" may be new."""
    *above, last = place
    for step in above:
        if not isinstance(node.get(step), dict):
            raise ConfigError(f"{key}: the run's own axis has no {step}")
        node = node[step]
    if last not in node and not key.startswith("+"):
        known = ", ".join(name for name in node if not name.startswith("_"))
        raise ConfigError(f"{key}: the run's own axis has no {last} ({known or 'no constants'})")
    node[last] = _parsed(value)


def _parsed(text: str) -> Any:
    value = yaml.safe_load(text)
    try:
        return float(value) if isinstance(value, str) else value  # YAML takes 3e-3 for text
    except ValueError:
        return value


def _choices(word: str) -> tuple[str, list[str]]:
    """`key=a,b` -> (key, [a, b]). Commas within brackets or quotes part nothing."""
    key, equals, text = word.partition("=")
    axis = key.lstrip("+").split(".")[0]
    if not equals or not (axis in AXES or key == PRESET):
        raise ConfigError(
            f"{word}: only axes are replayed ({PRESET}=, {'=, '.join(AXES)}=, and their constants);"
            " all else is the recorded run's"
        )
    values, open_until = [""], []
    for letter in text:
        if open_until and letter == open_until[-1]:
            open_until.pop()
        elif letter in BRACKETS or (letter in "'\"" and not open_until):
            open_until.append(BRACKETS.get(letter, letter))
        if letter == "," and not open_until:
            values.append("")
        else:
            values[-1] += letter
    return key, values


def _axes(run: Run) -> dict[str, Any]:
    return {axis: run.config[axis] for axis in AXES}
