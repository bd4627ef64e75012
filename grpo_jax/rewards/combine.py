"""Score completions with a weighted, named list of reward functions.

A reward function is plain Python: `f(completion, answer, **columns) -> float | None`. It is called
once a row with the completion and the gold answer, in this order, and by name with those data
columns that its signature asks for (all of them if it takes `**columns`). A constant bound by
`functools.partial` wins over a column of the same name.

An object that also has a method `batch(completions, answers, **columns)` is called by it, once for
all rows, with columns as lists, and returns a list: for scorers that work in parallel.

Three outcomes are kept apart. A number is a score; one that is 0 or less is *wrong*. None or NaN is
*unscorable*: the function says that this row cannot be judged (a gold it cannot read, say). An
exception is a *failure* of the scorer, and so is an infinite score: the row is as unscorable as the
other, the count is another, the first error is kept, and the run goes on. A batch may say so of
single rows with `Failure`, whose `value` such a row scores; if it raises, all its rows failed.
"""

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from numbers import Real
from typing import Any

import numpy as np

from grpo_jax.rewards.workers import Failure

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
    failed: dict[str, int]  # rows that it failed on; disjoint from `unscorable`
    errors: dict[str, str]  # the first failure of each part that had one, with its row
    lost: dict[str, np.ndarray] = field(default_factory=dict)  # bool[B]: which rows those are

    def take(self, rows: np.ndarray) -> "RewardTable":
        """Those rows, in that order, with their counts; the errors stay."""
        parts = {name: values[rows] for name, values in self.parts.items()}
        lost = {name: failed[rows] for name, failed in self.lost.items()}
        return _counted(self.total[rows], parts, lost, self.errors)

    def as_json(self) -> dict[str, Any]:
        """`from_json` makes the same table of it, bit for bit."""
        columns = {"total": self.total, **{f"part/{n}": a for n, a in self.parts.items()}}
        columns |= {f"lost/{n}": a for n, a in self.lost.items()}
        return {"errors": self.errors} | {name: a.tolist() for name, a in columns.items()}

    @staticmethod
    def from_json(columns: Mapping[str, Any]) -> "RewardTable":
        def under(prefix: str, dtype: Any) -> dict[str, np.ndarray]:
            found = [name for name in columns if name.startswith(prefix)]
            return {name.removeprefix(prefix): np.array(columns[name], dtype) for name in found}

        total = np.array(columns["total"], np.float32)
        return _counted(total, under("part/", np.float32), under("lost/", bool), columns["errors"])

    @staticmethod
    def concatenate(tables: "Sequence[RewardTable]") -> "RewardTable":
        """One after the other; of each part's errors, the first."""
        names = tables[0].parts
        return _counted(
            np.concatenate([table.total for table in tables]),
            {name: np.concatenate([table.parts[name] for table in tables]) for name in names},
            {name: np.concatenate([_lost(table, name) for table in tables]) for name in names},
            {name: text for table in reversed(tables) for name, text in table.errors.items()},
        )


def _lost(table: RewardTable, name: str) -> np.ndarray:
    return table.lost.get(name, np.zeros(len(table.parts[name]), bool))


def _counted(
    total: np.ndarray,
    parts: dict[str, np.ndarray],
    lost: dict[str, np.ndarray],
    errors: dict[str, str],
) -> RewardTable:
    unscorable, failed = {}, {}
    for name, values in parts.items():
        rows = lost.get(name, np.zeros(len(values), bool))
        failed[name] = int(rows.sum())
        unscorable[name] = int((np.isnan(values) & ~rows).sum())
    return RewardTable(total, parts, unscorable, failed, errors, lost)


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
    lost: dict[str, np.ndarray] = {}
    errors: dict[str, str] = {}
    total = np.zeros(len(completions), np.float64)
    for part in parts:
        scored = _score_part(part, completions, answers, columns)
        scores[part.name] = scored.values.astype(np.float32)
        lost[part.name] = scored.failed
        if scored.error is not None:
            errors[part.name] = scored.error
        if part.weight != 0:  # 0 * NaN is NaN, and a part that only watches must not decide
            total += part.weight * scored.values
    return _counted(total.astype(np.float32), scores, lost, errors)


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


@dataclass
class _Scored:
    """A part's rows as they come in."""

    part: RewardPart
    completions: Sequence[str]
    answers: Sequence[str]

    def __post_init__(self) -> None:
        self.values = np.full(len(self.completions), np.nan)
        self.failed = np.zeros(len(self.completions), bool)
        self.error: str | None = None

    def take(self, row: int, value: object) -> None:
        """TypeError for what is no score."""
        if isinstance(value, Failure):
            self.fail(row, value.text)
            self.values[row] = self._number(row, value.value)
            return
        number = self._number(row, value)
        if abs(number) > _LARGEST:
            self.fail(row, f"score {number} is not a float32")
        else:
            self.values[row] = number

    def fail(self, row: int, error: str) -> None:
        self.failed[row] = True
        if self.error is None:
            self.error = f"{error[:_SHOWN]} ({self._example(row)})"

    def _number(self, row: int, value: object) -> float:
        if value is None:
            return math.nan
        if not isinstance(value, Real | np.bool_):
            raise TypeError(
                f"reward {self.part.name!r} must return a number or None for each completion, "
                f"got {type(value).__name__} from {_named(self.part.function)} "
                f"({self._example(row)})"
            )
        try:
            return float(value)
        except OverflowError:  # an int or a Fraction that no float holds
            return math.inf

    def _example(self, row: int) -> str:
        return (
            f"row {row}: completion {self.completions[row][:_SHOWN]!r}, "
            f"answer {self.answers[row][:_SHOWN]!r}"
        )


def _score_part(
    part: RewardPart,
    completions: Sequence[str],
    answers: Sequence[str],
    columns: Mapping[str, Sequence[Any]],
) -> _Scored:
    scored = _Scored(part, completions, answers)
    batch = getattr(part.function, "batch", None)
    if batch is not None:
        _score_batch(batch, scored, columns)
        return scored
    names = wanted_columns(part, columns)
    for row, (completion, answer) in enumerate(zip(completions, answers, strict=True)):
        extra = {name: columns[name][row] for name in names}
        try:
            value = part.function(completion, answer, **extra)
        except Exception as error:
            scored.fail(row, f"{type(error).__name__}: {error}")
            continue
        scored.take(row, value)
    return scored


def _score_batch(
    batch: Callable[..., Any], scored: _Scored, columns: Mapping[str, Sequence[Any]]
) -> None:
    names = wanted_columns(scored.part, columns)
    if not scored.completions:
        return
    extra = {name: list(columns[name]) for name in names}
    try:
        values = batch(list(scored.completions), list(scored.answers), **extra)
    except Exception as error:
        for row in range(len(scored.completions)):
            scored.fail(row, f"{type(error).__name__}: {error}")
        return
    name = f"reward {scored.part.name!r} ({_named(scored.part.function)}.batch)"
    if isinstance(values, str | Mapping) or not isinstance(values, Sequence | np.ndarray):
        raise TypeError(f"{name} must return a list, one value a row; got {type(values).__name__}")
    if len(values) != len(scored.completions):
        raise ValueError(
            f"{name} returned {len(values)} values for {len(scored.completions)} completions"
        )
    for row, value in enumerate(values):
        scored.take(row, value)


def _named(function: Any) -> str:
    """Where a user finds it: `my.module.f`."""
    function = function.func if isinstance(function, partial) else function
    named = function if hasattr(function, "__qualname__") else type(function)
    return f"{named.__module__}.{named.__qualname__}"


def wanted_columns(part: RewardPart, columns: Collection[str]) -> list[str]:
    """Those of `columns` that the function's signature asks for; TypeError if one is not there."""
    function: Callable[..., Any] = getattr(part.function, "batch", part.function)
    signature = inspect.signature(function)
    parameters = signature.parameters.values()
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    taken = set(positional[:2])  # the completion and the answer, whatever they are called here
    if isinstance(function, partial):
        taken |= function.keywords.keys()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        asked = set(columns)
    else:
        asked = {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}
    names = [name for name in columns if name in asked - taken]
    try:
        signature.bind("", "", **dict.fromkeys(names))
    except TypeError as error:
        raise TypeError(
            f"reward {part.name!r} ({_named(part.function)}) cannot be called with (completion, "
            f"answer) and the columns {sorted(columns)}: {error}"
        ) from error
    return names
