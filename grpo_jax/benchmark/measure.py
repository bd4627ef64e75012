"""The numbers of a benchmark, from the answers alone. Every one is a mean over problems of one
value a problem, with a 95 % interval over problems (`stats.mean_intervals`).

Right is, as in training's evaluation, an answer whose reward part `correct` (or the total, where no
part is called so) is above 0. One without a score (unscorable, or its scorer failed) is not right;
it is counted apart.

- `greedy`: share of right answers at temperature 0.
- `mean@n`: mean share of right ones among a problem's n samples.
- `pass@k`: chance that one of k of them at least is right, unbiased (`stats.pass_at_k`).
- `maj@k`: the vote of a problem's first k samples (`votes`, `stats.majority_vote`).
- `length`: tokens. `truncated`: share that was cut off at the budget. `no_eos`: share that ends
  without an EOS token: those, and what a stop string ended. `reward`, `reward/PART`: mean over the
  answers that have a score. All four of the samples, and of the greedy answers under `greedy/`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float

from grpo_jax import stats
from grpo_jax.benchmark.sampling import GREEDY, SAMPLED
from grpo_jax.benchmark.votes import vote

Row = dict[str, Any]  # an answer, as `sampling.Bench.run` yields them


@dataclass(frozen=True)
class Measure:
    """One value a problem; NaN where a problem has none."""

    values: Float[np.ndarray, "n"]
    share: bool  # of answers or problems; else in units of its own


def measures(rows: Sequence[Row], pass_k: Sequence[int]) -> dict[str, Measure]:
    """All measures of some problems: `rows` hold all samples and greedy answers to each."""
    found: dict[str, Measure] = {}
    greedy = _by_problem([row for row in rows if row["mode"] == GREEDY])
    sampled = _by_problem([row for row in rows if row["mode"] == SAMPLED])
    if greedy:
        found["greedy"] = _mean(greedy, "correct", share=True)
    if sampled:
        n = len(sampled[0])
        correct = np.array([[row["correct"] for row in answers] for answers in sampled])
        found[f"mean@{n}"] = _mean(sampled, "correct", share=True)
        for k in pass_k:
            found[f"pass@{k}"] = Measure(stats.pass_at_k(n, correct.sum(1), k), share=True)
        votes = [[vote(r["completion"], r["truncated"]) for r in answers] for answers in sampled]
        for k in (k for k in pass_k if k > 1):  # of one vote, nothing is the majority
            elected = [
                stats.majority_vote(vote[:k], row[:k])
                for vote, row in zip(votes, correct, strict=True)
            ]
            found[f"maj@{k}"] = Measure(np.array(elected), share=True)
        found |= _behaviour(sampled)
    if greedy:
        found |= {f"greedy/{name}": measure for name, measure in _behaviour(greedy).items()}
    return found


def summary(found: dict[str, Measure]) -> dict[str, dict[str, float | int | None]]:
    """Mean, interval and number of problems of each measure, as JSON has them."""
    result: dict[str, dict[str, float | int | None]] = {}
    complete = {name: m for name, m in found.items() if not np.isnan(m.values).any()}
    shared = _intervals(complete) if complete else {}
    for name, measure in found.items():
        known = measure.values[~np.isnan(measure.values)]
        if not known.size:
            result[name] = {"value": None, "low": None, "high": None, "problems": 0}
            continue
        if name in shared:
            interval = shared[name]
        else:
            interval = _intervals({name: Measure(known, measure.share)})[name]
        low, high = interval or (None, None)
        size = int(known.size)
        result[name] = {"value": float(known.mean()), "low": low, "high": high, "problems": size}
    return result


def by_level(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """The rows of each difficulty, easiest first; {} where there is but one."""
    levels = {row["level"] for row in rows}
    if len(levels) < 2:
        return {}
    numbers = all(isinstance(level, int) for level in levels)
    ordered = sorted(levels) if numbers else sorted(levels, key=str)
    return {str(level): [row for row in rows if row["level"] == level] for level in ordered}


def _intervals(found: dict[str, Measure]) -> dict[str, tuple[float, float] | None]:
    columns = np.stack([measure.values for measure in found.values()], axis=1)
    shares = [measure.share for measure in found.values()]
    return dict(zip(found, stats.mean_intervals(columns, shares), strict=True))


def _behaviour(problems: list[list[Row]]) -> dict[str, Measure]:
    found = {
        "length": _mean(problems, "length", share=False),
        "truncated": _mean(problems, "truncated", share=True),
        "no_eos": Measure(1 - _mean(problems, "eos", share=True).values, share=True),
        "reward": _mean(problems, "reward", share=False),
    }
    for part in problems[0][0]["parts"]:
        scores = [[row["parts"][part] for row in answers] for answers in problems]
        found[f"reward/{part}"] = Measure(np.array([_known_mean(s) for s in scores]), share=False)
    return found


def _by_problem(rows: Sequence[Row]) -> list[list[Row]]:
    """Rows of each problem, both in order."""
    found: dict[int, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["problem"], row["sample"])):
        found.setdefault(row["problem"], []).append(row)
    return list(found.values())


def _mean(problems: list[list[Row]], name: str, share: bool) -> Measure:
    return Measure(np.array([_known_mean([row[name] for row in p]) for p in problems]), share)


def _known_mean(values: Sequence[float | None]) -> float:
    known = [float(value) for value in values if value is not None]
    return float(np.mean(known)) if known else float("nan")
