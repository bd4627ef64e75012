"""The numbers of an algorithm apart from its structure: one compiled update serves all of them.

A constant of a rule is such a number where its parameter may be an array (`kernels/masked.Knob`).
What isn't (sizes, names, flags, rules within rules) is structure, which a program is compiled for.
So is a coefficient of exactly 0 (`Kl.active`, `Entropy.active`): without a KL there is no reference
to pass. The axes that make advantages run an operation at a time, and take numbers as they are.
"""

import inspect
import typing
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from jaxtyping import Array

from grpo_jax.types import Algorithm, Entropy, Kl

COMPILED = ("ratio", "clip", "select", "aggregation", "kl", "correction", "entropy")  # the axes

Change = Callable[[str, float], Any]


def knobs(algorithm: Algorithm) -> dict[str, float]:
    """The numbers by dotted name: {"clip.low": 0.2, "kl.coef": 0.04, ...}.

    Python floats: as arguments of `jax.jit` they keep the weak type that they have as constants. In
    float32 arithmetic on a knob is rounded once more than on a constant (`1 + high`).
    """
    found: dict[str, float] = {}

    def note(name: str, value: float) -> float:
        found[name] = float(value)
        return value

    _changed(algorithm, note)
    return found


def with_knobs(algorithm: Algorithm, values: dict[str, Any]) -> Algorithm:
    """The algorithm with these numbers, which may be traced; `values` has the names of `knobs`."""
    return _changed(algorithm, lambda name, value: values[name])


def _changed(algorithm: Algorithm, change: Change) -> Algorithm:
    axes = {axis: _mapped(axis, getattr(algorithm, axis), change) for axis in COMPILED}
    return replace(algorithm, **axes)


def _mapped(name: str, value: Any, change: Change) -> Any:
    """A rule, a record of the axes or a constant, with `change` made of all numbers within it."""
    if isinstance(value, partial):
        keywords = {
            key: change(f"{name}.{key}", bound)
            if _is_number(bound) and _admits_arrays(value.func, key)
            else _mapped(f"{name}.{key}", bound, change)
            for key, bound in value.keywords.items()
        }
        return partial(value.func, *value.args, **keywords)
    if not isinstance(value, Kl | Entropy):
        return value
    if isinstance(value, Kl):
        value = replace(value, estimator=_mapped(f"{name}.estimator", value.estimator, change))
    if value.active and _is_number(value.coef):
        value = replace(value, coef=change(f"{name}.coef", value.coef))
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _admits_arrays(function: Callable, name: str) -> bool:
    """Whether the annotation of a parameter says that it may be a traced scalar."""
    try:
        parameters = inspect.signature(function, eval_str=True).parameters
    except (NameError, TypeError, ValueError):  # one that only a type checker can read, or none
        return False
    return name in parameters and Array in typing.get_args(parameters[name].annotation)
