"""Composed configurations for the tests, each made once, and algorithms as text."""

from dataclasses import fields, is_dataclass
from functools import cache, partial
from pathlib import Path

from grpo_jax.config import compose, make_run
from grpo_jax.types import Algorithm


@cache
def composed(*overrides):
    return compose(*overrides)


@cache
def run_of(*overrides):
    return make_run(composed(*overrides), Path("runs/test"))


def described(value):
    """A value as text: `function(constants)` of a rule, the fields one by one of a record."""
    if isinstance(value, partial):
        constants = ", ".join(f"{k}={described(v)}" for k, v in sorted(value.keywords.items()))
        return f"{value.func.__name__}({constants})" if constants else value.func.__name__
    if isinstance(value, bool | str | None):
        return str(value)
    if isinstance(value, int | float):
        return f"{value:g}"
    if is_dataclass(value):
        return " ".join(described(getattr(value, field.name)) for field in fields(value))
    return value.__name__


def row(algorithm):
    return {field.name: described(getattr(algorithm, field.name)) for field in fields(Algorithm)}
