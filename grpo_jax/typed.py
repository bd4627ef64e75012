"""Values of a configuration against annotations: no unknown key, no wrong type, no conversions."""

import difflib
import math
import re
import types
import typing
from collections.abc import Collection
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from grpo_jax.check import ConfigError

_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    type(None): "null",
    tuple: "a list",
    dict: "a mapping",
}


def typed(kind: Any, values: Any, where: str) -> Any:
    """A dataclass from a mapping: no unknown key, no missing one, no wrong type.

    Raises ConfigError, which names the key from `where` on.
    """
    if not isinstance(values, dict):
        known = ", ".join(field.name for field in fields(kind))
        raise ConfigError(f"{where}: expected a section with {known}")
    refuse_unknown(where, values, {field.name for field in fields(kind)})
    hints = typing.get_type_hints(kind)
    made = {}
    for field in fields(kind):
        name = f"{where}.{field.name}"
        if field.name in values:
            made[field.name] = value_of(hints[field.name], values[field.name], name)
        elif field.default is MISSING and field.default_factory is MISSING:
            raise ConfigError(f"{name} is missing")
    try:
        return kind(**made)
    except (ValueError, ArithmeticError) as error:
        raise ConfigError(f"{where}: {error}") from error


def value_of(hint: Any, value: Any, where: str) -> Any:
    """`value` as the annotation asks, without conversions beyond int -> float and list -> tuple."""
    options = options_of(hint)
    if value is None and type(None) in options:
        return None
    for option in options:
        origin = typing.get_origin(option) or option
        if is_dataclass(origin) and isinstance(value, dict):
            return typed(origin, value, where)
        if origin is tuple and isinstance(value, list):
            item, *_ = typing.get_args(option)  # tuple[item, ...]
            return tuple(value_of(item, v, f"{where}[{i}]") for i, v in enumerate(value))
        if origin is dict and isinstance(value, dict):
            return dict(value)
        if isinstance(value, bool) and origin is not bool:
            continue  # true is no 1
        if origin is float and isinstance(value, int | float):
            if math.isnan(value):
                raise ConfigError(f"{where} is not a number (nan)")
            return float(value)
        if origin in (bool, int, str) and isinstance(value, origin):
            return value
    origins = [typing.get_origin(option) or option for option in options]
    wanted = " or ".join(_NAMES.get(o, getattr(o, "__name__", str(o))) for o in origins)
    zero = isinstance(value, str) and re.match(r"[-+]?0\d", value)
    why = "; a number can't begin with a 0: YAML takes it for text" if zero else ""
    raise ConfigError(f"{where}={value!r:.60} should be {wanted}{why}")


def options_of(hint: Any) -> tuple[Any, ...]:
    """The members of a union, or the one type; `int | float` is one thing, a number."""
    union = typing.get_origin(hint) in (types.UnionType, typing.Union)
    options = typing.get_args(hint) if union else (hint,)
    return tuple(o for o in options if not (o is int and float in options))


def refuse_unknown(
    where: str, values: dict[str, Any], known: Collection[str], hint: str = ""
) -> None:
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(str(key), known, 1)
            meant = f"did you mean {close[0]}?" if close else f"known: {', '.join(sorted(known))}"
            raise ConfigError(f"unknown key {where}{'.' if where else ''}{key}; {meant}{hint}")
