"""An evaluation as Markdown tables, made from what `eval.json` holds."""

from collections.abc import Iterable, Sequence
from typing import Any

from grpo_jax.report import markdown

MISSING = "–"
NOTE = (
    "Mean over problems [95 % interval over problems: bootstrap, or Wilson's where every problem "
    "is 0 or 1]. greedy: at temperature 0. mean@n: right answers among n samples. pass@k: unbiased "
    "chance that one of k is right. maj@k: the vote of the first k. An answer without a score is "
    "not right."
)
ANSWERS_NOTE = (
    "Of the samples (of the greedy answers where nothing is sampled): length in tokens; truncated: "
    "share cut off at the budget; no EOS: those, and what a stop string ended. Counts over all "
    "answers, by part of the reward: unscorable (the reward declined) and failed (its scorer "
    "did). Left out: problems that were dropped at load."
)
DECIMALS = {"length": 1}  # else three


def tables(result: dict[str, Any]) -> str:
    """Scores by set and level, all k, and how the answers were, with what the columns mean."""
    sets = result["sets"]
    first = next(iter(sets.values()))["metrics"]
    scores = [name for name in first if name == "greedy" or name.startswith("mean@")]
    ks = [name for name in first if name.startswith(("pass@", "maj@"))]
    widest = [last for kind in ("pass@", "maj@") if (last := _last(ks, kind))]
    parts = [NOTE, markdown(score_table(sets, [*scores, *widest]))]
    if set(ks) - {*widest, "pass@1"}:
        parts.append(markdown(score_table(sets, ks, levels=False)))
    return "\n\n".join([*parts, ANSWERS_NOTE, markdown(answer_table(sets))])


def score_table(
    sets: dict[str, Any], metrics: Sequence[str], levels: bool = True
) -> list[list[str]]:
    """A row a set, its levels below it; and the plain mean of the sets, where there are several."""
    rows = [["set", "problems", *metrics]]
    for name, one in sets.items():
        rows.append([name, str(one["problems"]), *_cells(one["metrics"], metrics)])
        for level, part in one["levels"].items() if levels else ():
            label = f"{name}, level {level}"
            rows.append([label, str(part["problems"]), *_cells(part["metrics"], metrics)])
    if len(sets) > 1:
        means = [_mean_of_sets(sets.values(), metric) for metric in metrics]
        rows.append(["(mean of the sets)", "", *means])
    return rows


def answer_table(sets: dict[str, Any]) -> list[list[str]]:
    """A row a set: how long answers are, how they end, and what could not be scored."""
    rows = [["set", "length", "truncated", "no EOS", "reward", "unscorable", "failed", "left out"]]
    for name, one in sets.items():
        metrics = one["metrics"]
        prefix = "" if "length" in metrics else "greedy/"
        shown = [prefix + key for key in ("length", "truncated", "no_eos", "reward")]
        counts = [_counts(one[kind]) for kind in ("unscorable", "failed", "dropped")]
        rows.append([name, *_cells(metrics, shown), *counts])
    return rows


def cell(name: str, metric: dict[str, Any] | None) -> str:
    """ "0.812 [0.780, 0.850]" """
    if metric is None or metric["value"] is None:
        return MISSING
    pattern = f"z.{DECIMALS.get(name.rpartition('/')[2], 3)}f"  # z: no "-0.00"
    text = format(metric["value"], pattern)
    if metric["low"] is None:
        return text
    return f"{text} [{metric['low']:{pattern}}, {metric['high']:{pattern}}]"


def _cells(metrics: dict[str, Any], names: Sequence[str]) -> list[str]:
    return [cell(name, metrics.get(name)) for name in names]


def _mean_of_sets(sets: Iterable[dict[str, Any]], metric: str) -> str:
    values = [one["metrics"][metric]["value"] for one in sets]
    return f"{sum(values) / len(values):.3f}"


def _counts(counts: dict[str, int]) -> str:
    """ "0", or which: "correct 3"."""
    return ", ".join(f"{name} {count}" for name, count in counts.items() if count) or "0"


def _last(names: Sequence[str], kind: str) -> str | None:
    return next((name for name in reversed(names) if name.startswith(kind)), None)
