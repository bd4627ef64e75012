"""Score completions with a weighted, named list of reward functions.

A reward function is plain Python: `f(completion, answer, **columns) -> float | None`. It is called
once a row with the completion and the gold answer, in this order, and by name with those data
columns that its signature asks for (all of them if it takes `**columns`). A constant bound by
`functools.partial` wins over a column of the same name.

Three outcomes are kept apart. A number is a score, 0 included. None or NaN is *unscorable*: the
function says that this row cannot be judged (a gold it cannot read, say). An exception is a
*failure* of the scorer, and so is an infinite score: the row is as unscorable as the other, the
count is another, the first error is kept, and the run goes on.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

RewardFunction = Callable[..., float | None]

_LARGEST = float(np.finfo(np.float32).max)
_SHOWN = 200  # characters of a text that an error message quotes


@dataclass(frozen=True)
class RewardPart:
    """One term of the reward: what it is called in the logs, its function and its weight.

    A part of weight 0 is scored and logged, and plays no part in the total.
    """

    name: str
    function: RewardFunction
    weight: float = 1.0

    def __post_init__(self) -> None:
        if not math.isfinite(self.weight):
            raise ValueError(f"reward part {self.name!r}: weight {self.weight} is not finite")


@dataclass(frozen=True, eq=False)
class RewardTable:
    """The scores of B rows. NaN marks a row without a score."""

    total: np.ndarray  # float32[B], the weighted sum; NaN where a part with weight != 0 is NaN
    parts: dict[str, np.ndarray]  # float32[B] each, unweighted
    unscorable: dict[str, int]  # rows that the function declined (None or NaN)
    failed: dict[str, int]  # rows that it raised on; disjoint from `unscorable`
    errors: dict[str, str]  # the first failure of each part that had one, with its row


def score(
    parts: Sequence[RewardPart],
    completions: Sequence[str],
    answers: Sequence[str],
    columns: Mapping[str, Sequence[Any]] | None = None,
) -> RewardTable:
    """Score B completions against B gold answers; `columns` hold B further values each.

    Raises ValueError for lengths that differ, part names that repeat, no parts at all or a column
    called "completion" or "answer"; TypeError for a function that needs a column that is not there,
    or that returns something other than a number or None. Never raises for what a completion holds.
    """
    columns = columns or {}
    _check(parts, completions, answers, columns)
    scores: dict[str, np.ndarray] = {}
    unscorable: dict[str, int] = {}
    failed: dict[str, int] = {}
    errors: dict[str, str] = {}
    total = np.zeros(len(completions), np.float64)
    for part in parts:
        values, failures = _score_part(part, completions, answers, columns)
        scores[part.name] = values.astype(np.float32)
        failed[part.name] = len(failures)
        unscorable[part.name] = int(np.isnan(values).sum()) - len(failures)
        if failures:
            errors[part.name] = failures[0]
        if part.weight != 0:  # 0 * NaN is NaN, and a part that only watches must not decide
            total += part.weight * values
    return RewardTable(total.astype(np.float32), scores, unscorable, failed, errors)


def _check(
    parts: Sequence[RewardPart],
    completions: Sequence[str],
    answers: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
) -> None:
    names = [part.name for part in parts]
    if not names:
        raise ValueError("a reward needs at least one part")
    if len(set(names)) < len(names):
        raise ValueError(f"reward parts must have different names, got {names}")
    reserved = {"completion", "answer"} & columns.keys()
    if reserved:
        raise ValueError(f"data columns may not be called {sorted(reserved)}")
    for name, values in [("answers", answers), *columns.items()]:
        if len(values) != len(completions):
            raise ValueError(f"{len(completions)} completions but {len(values)} {name!r}")


def _score_part(
    part: RewardPart,
    completions: Sequence[str],
    answers: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
) -> tuple[np.ndarray, list[str]]:
    """(float64[B] with NaN for rows without a score, one text for each failure)."""
    names = _wanted_columns(part, columns)
    values = np.full(len(completions), np.nan)
    failures = []
    for row, (completion, answer) in enumerate(zip(completions, answers, strict=True)):
        extra = {name: columns[name][row] for name in names}
        try:
            value = part.function(completion, answer, **extra)
        except Exception as error:
            failures.append(_describe(f"{type(error).__name__}: {error}", row, completion, answer))
            continue
        number = _number(value, part.name)
        if abs(number) > _LARGEST:
            failures.append(_describe(f"score {number} is not a float32", row, completion, answer))
        else:
            values[row] = number
    return values, failures


def _wanted_columns(part: RewardPart, columns: Mapping[str, Sequence[Any]]) -> list[str]:
    """The columns that the function's signature asks for; TypeError if one is not there."""
    signature = inspect.signature(part.function)
    parameters = signature.parameters.values()
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    taken = set(positional[:2])  # the completion and the answer, whatever they are called here
    if isinstance(part.function, partial):
        taken |= part.function.keywords.keys()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        asked = set(columns)
    else:
        asked = {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}
    names = [name for name in columns if name in asked - taken]
    try:
        signature.bind("", "", **dict.fromkeys(names))
    except TypeError as error:
        raise TypeError(
            f"reward {part.name!r} cannot be called with (completion, answer) and the columns "
            f"{sorted(columns)}: {error}"
        ) from error
    return names


def _number(value: object, name: str) -> float:
    if value is None:
        return math.nan
    if not isinstance(value, Real | np.bool_):
        raise TypeError(
            f"reward {name!r} must return a number or None for each completion, "
            f"got {type(value).__name__}"
        )
    try:
        return float(value)
    except OverflowError:  # an int or a Fraction that no float holds
        return math.inf


def _describe(error: str, row: int, completion: str, answer: str) -> str:
    return (
        f"{error[:_SHOWN]} (row {row}: completion {completion[:_SHOWN]!r}, "
        f"answer {answer[:_SHOWN]!r})"
    )
