"""Compare the runs in a folder: a table with intervals, paired differences, curves.

    python scripts/compare.py FOLDER [--metric NAME] [--baseline NAME] [--partial] [--wandb]

Reads run folders only (no W&B, no accelerator) and may be repeated at any time, also while a sweep
runs. Prints the tables and writes into FOLDER: report.md, summary.csv (one row a run),
learning_curve.png/.svg, length.png/.svg. The tables hold no path, date or wall time: the same sweep
run twice gives the same tables. `--wandb` also logs tables and plots as a W&B run beside the
sweep's own: always the same one of a folder, which stays offline unless `--wandb online`.
"""

import argparse
import csv
import io
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import yaml

from grpo_jax import report, stats
from grpo_jax.markdown import code, literal
from grpo_jax.screen import say

METRICS = (
    "eval/accuracy",
    "eval/greedy_accuracy",
    "reward",
    "completions/mean_length",
    "bias/length_right",
    "bias/length_wrong",
    "num_tokens",
    "clip_ratio/low_mean",
    "clip_ratio/high_mean",
    "probe/forced_length",
    "exact/probability",
)
RESAMPLES = 10_000
MISSING = "–"
FINAL_NOTE = (
    "IQM over seeds [95 % percentile-bootstrap interval]. A run's final value is the last one it "
    "logged. With fewer than about eight seeds this interval is too narrow: prefer the paired "
    "differences."
)
PAIRED_NOTE = (
    "Mean difference on common seeds [95 % t interval]. p: two-sided sign-flip test, at best "
    "2 / 2^n with n seeds, and not corrected for the number of rows. P(higher): the chance that a "
    "run of the group is above one of the baseline."
)
FIGURE_NOTE = (
    "Line: IQM over seeds; band: 95 % percentile-bootstrap interval. Each run of more than "
    f"{report.CURVE_POINTS} logged steps is first averaged over bins of consecutive ones."
)


def with_interval(value: float, interval: tuple[float, float] | None) -> str:
    """ "0.812 [0.780, 0.850]": three significant digits of the largest number, the same for all."""
    numbers = [value, *(interval or ())]
    largest = max(map(abs, numbers))
    size = math.floor(math.log10(largest)) if largest > 0 else 0
    pattern = "z.2e" if not -5 <= size < 7 else f"z.{max(0, 2 - size)}f"  # z: no "-0.00"
    first, *bounds = (format(number, pattern) for number in numbers)
    return f"{first} [{', '.join(bounds)}]" if bounds else first


class Final(NamedTuple):
    """A metric of a group at the end of its runs."""

    metric: str
    group: str
    n: int  # runs that have it
    iqm: float
    low: float | None  # None: one seed has no interval
    high: float | None


class Difference(NamedTuple):
    """A metric of a group against the baseline, on common seeds."""

    metric: str
    group: str
    n: int
    difference: float
    low: float
    high: float
    p: float
    higher: float


def final_values(sweep: report.Sweep, metrics: Sequence[str]) -> dict[tuple[str, str], Final]:
    """By metric and the group's label; nothing where no run of the group has the metric."""
    found = {}
    for metric in metrics:
        for group in sweep.groups:
            values = group.finals(metric)
            if values:
                interval = stats.bootstrap_interval(values, resamples=RESAMPLES)
                low, high = (None, None) if interval is None else map(float, interval)
                facts = (len(values), float(stats.iqm(values)), low, high)
                found[metric, group.label] = Final(metric, group.label, *facts)
    return found


def differences(
    sweep: report.Sweep, metrics: Sequence[str], baseline: report.Group
) -> list[Difference]:
    """One a metric and group other than the baseline, where two common seeds have both."""
    found = []
    for metric in metrics:
        reference = baseline.by_seed(metric)
        for group in sweep.groups:
            values = group.by_seed(metric)
            common = sorted(set(values) & set(reference))
            x, y = [values[s] for s in common], [reference[s] for s in common]
            result = stats.paired_difference(x, y, resamples=RESAMPLES)
            if group is not baseline and result is not None:
                higher = float(stats.probability_of_improvement(x, y))
                facts = (result.n, result.mean, result.low, result.high, result.p, higher)
                found.append(Difference(metric, group.label, *facts))
    return found


def final_table(
    sweep: report.Sweep, metrics: Sequence[str], finals: dict[tuple[str, str], Final]
) -> list[list[str]]:
    """One row a group: label, seeds, last step, then each metric's IQM and interval."""
    rows = [[sweep.title, "n", "steps", *metrics]]
    for group in sweep.groups:
        cells = [_final_cell(group, finals.get((metric, group.label))) for metric in metrics]
        rows.append([group.label, str(len(group.runs)), _steps(group), *cells])
    return rows


def difference_table(sweep: report.Sweep, found: Sequence[Difference]) -> list[list[str]]:
    """A row each, and the head."""
    rows = [["metric", sweep.title, "n", "difference", "p", "P(higher)"]]
    for row in found:
        difference = with_interval(row.difference, (row.low, row.high))
        p, higher = f"{row.p:.3f}", f"{row.higher:.2f}"
        rows.append([row.metric, row.group, str(row.n), difference, p, higher])
    return rows


def summary(sweep: report.Sweep, metrics: Sequence[str]) -> str:
    """CSV, one row a run (also those left out): overrides, seed, status, last step, finals."""
    keys = sorted({key for run in sweep.runs for key in run.overrides})
    used = {run.folder for group in sweep.groups for run in group.runs}
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["group", *keys, "seed", "status", "compared", "step", *metrics])
    order = {group.label: i for i, group in enumerate(sweep.groups)}
    runs = sorted(
        sweep.runs,
        key=lambda run: (
            order.get(sweep.label(run), len(order)),
            sweep.label(run),
            run.seed_order(),
        ),
    )
    for run in runs:
        chosen = [run.overrides.get(key, "") for key in keys]
        facts = [run.seed, run.status, "yes" if run.folder in used else "no", run.last_step]
        finals = [run.final(metric) for metric in metrics]
        writer.writerow([sweep.label(run), *chosen, *facts, *finals])
    return text.getvalue()


def tables(
    sweep: report.Sweep,
    metrics: Sequence[str],
    baseline: report.Group | None,
    finals: dict[tuple[str, str], Final],
    paired: Sequence[Difference],
) -> str:
    """Both tables with what they mean, as Markdown; a sentence only if there is no group."""
    count = sum(len(group.runs) for group in sweep.groups)
    parts = [f"{_plural(count, 'run')} in {_plural(len(sweep.groups), 'group')}."]
    if sweep.common:
        shared = ", ".join(code(f"{key}={value}") for key, value in sweep.common.items())
        parts[0] += f" The same in all: {shared}."
    if baseline is not None:
        table = report.markdown(final_table(sweep, metrics, finals))
        parts += ["## Final values", FINAL_NOTE, table]
        if paired:
            table = report.markdown(difference_table(sweep, paired))
            parts += [f"## Differences from {literal(baseline.label)}", PAIRED_NOTE, table]
        elif len(sweep.groups) > 1:
            parts += ["No paired differences: fewer than two common seeds."]
    return "\n\n".join(parts)


def exceptions(sweep: report.Sweep) -> str:
    """Markdown list of the runs that are not in the tables, or are in them though not finished."""
    partial = [run for group in sweep.groups for run in group.runs if run.status != "done"]
    named = [(run, f"left out: {reason}") for run, reason in sweep.left_out]
    named += [(run, f"included: {run.status}, at step {run.last_step}") for run in partial]
    lines = []
    for run, reason in sorted(named, key=lambda pair: pair[0].folder):
        first_line = literal((reason.splitlines() or [""])[0])
        label, folder = literal(sweep.label(run)), code(run.folder)
        lines.append(f"- {label}, seed {literal(str(run.seed))} ({folder}): {first_line}")
    return "\n".join(lines)


def _final_cell(group: report.Group, final: Final | None) -> str:
    if final is None:
        return MISSING
    bounds = None if final.low is None or final.high is None else (final.low, final.high)
    text = with_interval(final.iqm, bounds)
    return text if final.n == len(group.runs) else f"{text} (n = {final.n})"


def _steps(group: report.Group) -> str:
    last = sorted(run.last_step for run in group.runs if run.last_step is not None)
    return str(last[0]) if last[0] == last[-1] else f"{last[0]}–{last[-1]}"


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")


def _baseline(sweep: report.Sweep, name: str | None) -> report.Group:
    """The group of that label, or of "key=label"; the first of the sweep without a name."""
    if name is None:
        return sweep.groups[0]
    for group in sweep.groups:
        if name in (group.label, f"{sweep.title}={group.label}"):
            return group
    labels = ", ".join(repr(group.label) for group in sweep.groups)
    raise ValueError(f"no group {name!r}; there are {labels}")


def _metrics(sweep: report.Sweep, asked: str | None) -> list[str]:
    """The metrics that some run has, the one asked for (or the table's first) leading."""
    known = {
        key
        for group in sweep.groups
        for run in group.runs
        for row in run.rows.values()
        for key in row
    }
    if asked is not None and asked not in known:
        raise ValueError(f"no run has the metric {asked!r}; they have {', '.join(sorted(known))}")
    names = METRICS if asked is None else (asked, *METRICS)
    found = [name for name in dict.fromkeys(names) if name in known]
    if not found:
        raise ValueError(f"choose a --metric of {', '.join(sorted(known))}")
    return found


def compare(
    folder: Path, *, metric: str | None, baseline: str | None, partial: bool, wandb: str | None
) -> int:
    """Do it all; the exit status. FileNotFoundError and ValueError have a message for the user."""
    sweep = report.load_sweep(folder, partial=partial)
    metrics = _metrics(sweep, metric) if sweep.groups else []
    reference = _baseline(sweep, baseline) if sweep.groups else None
    finals = final_values(sweep, metrics)
    paired = [] if reference is None else differences(sweep, metrics, reference)
    compared, named = tables(sweep, metrics, reference, finals, paired), exceptions(sweep)
    figures: dict[str, Path] = {}
    if metrics:
        figures[metrics[0]] = curve = folder / "learning_curve.png"
        report.draw_learning_curve(sweep, metrics[0], [curve, curve.with_suffix(".svg")])
        length = folder / "length.png"
        if report.draw_length(sweep, [length, length.with_suffix(".svg")]):
            figures["length of answers"] = length
    parts = [f"# Comparison by {literal(', '.join(sweep.varied) or 'seed')}", compared]
    parts += ["## Along training", FIGURE_NOTE] if figures else []
    parts += [f"![{literal(name)}]({path.name})" for name, path in figures.items()]
    if named:
        parts += ["## Runs to know about", named]
    (folder / "report.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    (folder / "summary.csv").write_text(summary(sweep, metrics), encoding="utf-8")
    say("\n\n".join([compared, named] if named else [compared]))
    if not sweep.groups:
        print("compare: no finished run; --partial takes the others", file=sys.stderr)
        return 1
    if wandb is not None:
        from grpo_jax.logging import log_comparison  # and jax, which reading folders does without

        project, group = _wandb_place(folder, sweep)
        log_comparison(
            folder,
            mode=wandb,
            project=project,
            group=group,
            tables={
                "comparison/final": (Final._fields, list(finals.values())),
                "comparison/differences": (Difference._fields, paired),
            },
            figures={f"comparison/{path.stem}": path for path in figures.values()},
        )
    return 0


def _wandb_place(folder: Path, sweep: report.Sweep) -> tuple[str, str]:
    """(project, group) of the sweep's own runs, as their configuration has them."""
    config = folder / sweep.groups[0].runs[0].folder / ".hydra" / "config.yaml"
    known = yaml.safe_load(config.read_text(encoding="utf-8")) if config.is_file() else None
    logger = (known or {}).get("logger") or {}
    return logger.get("project") or "grpo_jax", logger.get("group") or folder.resolve().name


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="compare", description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "folder", type=Path, help="a sweep's folder, or any folder above run folders"
    )
    parser.add_argument("--metric", help="the curve's metric and the tables' first (eval/accuracy)")
    parser.add_argument("--baseline", metavar="NAME", help="a group (default: the sweep's first)")
    parser.add_argument("--partial", action="store_true", help="take in failed and unfinished runs")
    parser.add_argument(
        "--wandb",
        nargs="?",
        const="offline",
        choices=("offline", "online"),
        help="log the comparison to W&B too (without a word: offline)",
    )
    options = parser.parse_args(arguments)
    try:
        return compare(
            options.folder,
            metric=options.metric,
            baseline=options.baseline,
            partial=options.partial,
            wandb=options.wandb,
        )
    except (FileNotFoundError, ValueError) as error:
        say(f"compare: {error}", error=True)
        return 2


if __name__ == "__main__":
    sys.exit(main())
