"""Composed configurations for the tests, each made once, and algorithms as text."""

from dataclasses import fields
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
    """An axis value as text: `function(constants)`, for comparison."""
    if isinstance(value, partial):
        constants = ", ".join(f"{k}={v:g}" for k, v in sorted(value.keywords.items()))
        return f"{value.func.__name__}({constants})" if constants else value.func.__name__
    inner = [described(v) if callable(v) else v for v in vars(value).values()]
    return " ".join(str(v) for v in inner)


def row(algorithm):
    return {field.name: described(getattr(algorithm, field.name)) for field in fields(Algorithm)}
