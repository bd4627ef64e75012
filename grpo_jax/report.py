"""Read the run folders of a sweep, group them by what was varied, and draw their curves.

Reads folders only (DESIGN.md section 9): `.hydra/` says what a run was, `metrics.jsonl` what it
measured, `DONE.json` / `FAILED.json` how it ended. `scripts/compare.py` turns this into tables.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from grpo_jax import stats
from grpo_jax.markdown import literal
from grpo_jax.screen import visible

DEFAULT = "(default)"  # the label of runs that left the varied key alone
CURVE_POINTS = 60  # longer curves are averaged over bins of steps, or the intervals are a smear
# Okabe and Ito's colours for colour-blind readers, without the yellow, which vanishes on white
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
LINES = ("-", "--", ":", "-.")  # one more style each time the colours are used up
STYLE: dict[Any, Any] = {
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "font.size": 10,
    "text.parse_math": False,  # a "$" in an override is a "$"
    "svg.hashsalt": "grpo_jax",  # ids in the SVG: the same each time
}
AXIS_LABELS = {
    "eval/accuracy": "held-out accuracy (sampled)",
    "eval/greedy_accuracy": "held-out accuracy (greedy)",
    "reward": "mean reward",
    "completions/mean_length": "answer length (tokens)",
}
LENGTH_PANELS = {
    "bias/length_right": "right answers",
    "bias/length_wrong": "wrong answers",
    "probe/forced_length": "after a forced prefix",
}


@dataclass(frozen=True)
class Run:
    """One run folder."""

    folder: str  # relative to the folder that is compared
    overrides: dict[str, str]  # all but the seed, as on the command line
    seed: str | None
    order: float  # the job's number in its sweep; inf for a run outside one
    status: str  # "done", "failed", "unfinished" or "unreadable"
    error: str  # what FAILED.json, or reading the folder, said
    rows: dict[int, dict[str, float]]  # metrics by step, ascending

    def final(self, metric: str) -> float | None:
        """The metric's last logged value; None if it was never logged."""
        values = [row[metric] for row in self.rows.values() if metric in row]
        return values[-1] if values else None

    @property
    def last_step(self) -> int | None:
        return max(self.rows, default=None)

    def seed_order(self) -> tuple[int, str, str]:
        """A sort key: seed 2 before seed 10."""
        seed = self.seed or ""
        return len(seed), seed, self.folder


@dataclass(frozen=True)
class Group:
    """The runs that differ in nothing but their seed, in the order of their seeds."""

    label: str
    runs: tuple[Run, ...]

    def finals(self, metric: str) -> list[float]:
        """Final values of the runs that have the metric."""
        values = (run.final(metric) for run in self.runs)
        return [value for value in values if value is not None]

    def by_seed(self, metric: str) -> dict[str, float]:
        """Final values of the runs whose seed is known."""
        pairs = ((run.seed, run.final(metric)) for run in self.runs)
        return {s: value for s, value in pairs if s is not None and value is not None}


class Curve(NamedTuple):
    """A group's metric along training, each f64[points]; low and high are NaN for one seed."""

    step: np.ndarray
    centre: np.ndarray
    low: np.ndarray
    high: np.ndarray


@dataclass(frozen=True)
class Sweep:
    """A folder of runs: what varies, the groups to compare, and the runs left out of them."""

    runs: tuple[Run, ...]
    varied: tuple[str, ...]  # override keys that differ between runs, sorted
    common: dict[str, str]  # overrides that all runs share
    groups: tuple[Group, ...]  # in the order of the sweep
    left_out: tuple[tuple[Run, str], ...]  # with the reason

    @property
    def title(self) -> str:
        """The heading of the groups: the one key that varies, or a neutral word."""
        return self.varied[0] if len(self.varied) == 1 else "group"

    def label(self, run: Run) -> str:
        """What tells the run's group from the others."""
        if run.status == "unreadable":
            return "unknown"
        if not self.varied:
            return "all runs"
        if len(self.varied) == 1:
            return run.overrides.get(self.varied[0], DEFAULT)
        named = [f"{key}={run.overrides[key]}" for key in self.varied if key in run.overrides]
        return " ".join(named) or DEFAULT


def load_sweep(folder: Path, *, partial: bool = False) -> Sweep:
    """Read all run folders under `folder`.

    Groups hold the finished runs; with `partial` also the failed and unfinished ones with rows. Two
    runs of one group and seed would count one draw twice: the first one by folder name stays (a
    finished one before a partial one), the other is left out. FileNotFoundError if `folder` is
    missing or holds no run.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no such folder: {folder}")
    runs = tuple(load_run(path, folder) for path in sorted(find_runs(folder)))
    if not runs:
        raise FileNotFoundError(f"no run folder (with .hydra/ or metrics.jsonl) under {folder}")
    readable = [run.overrides for run in runs if run.status != "unreadable"]
    keys = sorted({key for overrides in readable for key in overrides})
    varied = tuple(key for key in keys if len({o.get(key) for o in readable}) > 1)
    common = {key: readable[0][key] for key in keys if key not in varied}

    left_out: list[tuple[Run, str]] = []
    members: dict[tuple[tuple[str, str], ...], list[Run]] = {}
    seen: dict[tuple[object, str], Run] = {}
    for run in sorted(runs, key=lambda run: (run.status != "done", run.folder)):
        identity = tuple(sorted(run.overrides.items()))
        reason = _left_out(run, partial)
        if not reason and run.seed is not None:
            first = seen.setdefault((identity, run.seed), run)
            if first is not run:
                reason = f"repeats the group and seed of {first.folder}"
        if reason:
            left_out.append((run, reason))
        else:
            members.setdefault(identity, []).append(run)

    sweep = Sweep(runs, varied, common, (), ())
    groups = [
        Group(sweep.label(runs[0]), tuple(sorted(runs, key=Run.seed_order)))
        for runs in members.values()
    ]
    groups.sort(key=lambda group: (min(run.order for run in group.runs), group.label))
    left_out.sort(key=lambda pair: pair[0].folder)
    return Sweep(sweep.runs, varied, common, tuple(groups), tuple(left_out))


def find_runs(folder: Path) -> Iterator[Path]:
    """Folders with `.hydra/config.yaml` or `metrics.jsonl`; nothing inside a run is looked at. A
    job of several seeds (`seeds_per_job`) is no run, but has one for each."""
    for path, subfolders, files in os.walk(folder):
        if "metrics.jsonl" in files or Path(path, ".hydra", "config.yaml").is_file():
            subfolders[:] = [name for name in subfolders if name.startswith("seed=")]
            if not subfolders:
                yield Path(path)


def load_run(path: Path, root: Path) -> Run:
    """Read one run folder; one that cannot be read is a Run of status "unreadable", no error."""
    name = path.relative_to(root).as_posix()
    rows = read_metrics(path / "metrics.jsonl")
    try:
        overrides = read_overrides(path / ".hydra" / "overrides.yaml")
        config = _read_yaml(path / ".hydra" / "config.yaml")
        job = _read_yaml(path / ".hydra" / "hydra.yaml").get("hydra", {}).get("job", {})
    except (yaml.YAMLError, AttributeError, TypeError, UnicodeDecodeError) as error:
        first_line = str(error).splitlines()[0]
        return Run(name, {}, None, math.inf, "unreadable", f".hydra: {first_line}", rows)
    seed = overrides.pop("seed", None)
    if seed is None and config.get("seed") is not None:
        seed = str(config["seed"])
    number = job.get("num")
    order = float(number) if isinstance(number, int) else math.inf
    status, error = _outcome(path)
    return Run(name, overrides, seed, order, status, error, rows)


def read_overrides(path: Path) -> dict[str, str]:
    """Hydra's list of "key=value" as a dict, the last of a key winning; {} without the file.

    The marks of Hydra's grammar (+key, ++key) say how a key was set, not to what: they go.
    A deletion (~key) keeps its mark.
    """
    overrides = {}
    for item in _read_yaml(path) or []:
        key, _, value = str(item).partition("=")
        overrides[key.lstrip("+")] = value
    return overrides


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """`metrics.jsonl` by step, ascending; {} without the file.

    Lines of one step are merged, the later winning (a resumed run may log a step again). A line
    torn by a kill is skipped, and so is a value that is not a finite number.
    """
    rows: dict[int, dict[str, float]] = {}
    if not path.is_file():
        return rows
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            record = json.loads(line)
            step = int(record.pop("step"))
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        numbers = {key: float(value) for key, value in record.items() if _is_number(value)}
        rows.setdefault(step, {}).update(numbers)
    return dict(sorted(rows.items()))


def curves(groups: Sequence[Group], metric: str, *, seed: int = 0) -> dict[str, Curve]:
    """IQM over seeds along training with its 95 % bootstrap interval, by the group's label.

    Beyond CURVE_POINTS logged steps, each run is first averaged over bins of consecutive ones. A
    point stands where at least half of the group's runs with this metric have a value, so a longer
    run does not go on alone. A group without the metric is left out.
    """
    logged = sorted(
        {
            step
            for group in groups
            for run in group.runs
            for step, row in run.rows.items()
            if metric in row
        }
    )
    width = max(1, math.ceil(len(logged) / CURVE_POINTS))
    place = {step: i // width for i, step in enumerate(logged)}
    steps = np.array([np.mean(logged[i : i + width]) for i in range(0, len(logged), width)])
    result = {}
    for group in groups:
        binned = [_binned(run, metric, place, len(steps)) for run in group.runs]
        values = np.array([row for row in binned if not np.all(np.isnan(row))])  # [runs, points]
        if values.size:
            kept = np.sum(np.isfinite(values), axis=0) * 2 >= len(values)
            centre, low, high = _centre_and_interval(values[:, kept], seed)
            result[group.label] = Curve(steps[kept], centre, low, high)
    return result


def draw_learning_curve(sweep: Sweep, metric: str, paths: Iterable[Path]) -> None:
    """One panel: the metric along training, one line a group, its interval shaded."""
    _draw(sweep, {metric: ""}, AXIS_LABELS.get(metric, metric), paths)


def draw_length(sweep: Sweep, paths: Iterable[Path]) -> bool:
    """A panel each for the lengths of right and of wrong answers, and the forced-prefix probe.

    Draws the panels that the runs have numbers for; False, and no file, if there are none.
    """
    panels = {
        metric: title
        for metric, title in LENGTH_PANELS.items()
        if any(group.finals(metric) for group in sweep.groups)
    }
    if panels:
        _draw(sweep, panels, "mean length (tokens)", paths)
    return bool(panels)


def _draw(sweep: Sweep, panels: dict[str, str], y_label: str, paths: Iterable[Path]) -> None:
    """Panels side by side (metric -> title) on one y axis, one legend for all of them."""
    import matplotlib
    from matplotlib.figure import Figure  # no pyplot: no window, no global state (Agg)

    labels = {g.label: f"{visible(g.label)} (n = {len(g.runs)})" for g in sweep.groups}
    width = 6.4 if len(panels) == 1 else 3.6 * len(panels) + 0.6  # inches
    fitting = max(1, int(11 * width / (max(map(len, labels.values())) + 6)))  # 11 letters an inch
    legend_rows = math.ceil(len(labels) / fitting)
    with matplotlib.rc_context(STYLE):
        size = (width, 3.5 + 0.21 * legend_rows)
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots(1, len(panels), sharey=True, squeeze=False)[0]
        handles: dict[str, Any] = {}
        for axis, (metric, title) in zip(axes, panels.items(), strict=True):
            drawn = curves(sweep.groups, metric)
            for i, group in enumerate(sweep.groups):
                if group.label not in drawn:
                    continue
                step, centre, low, high = drawn[group.label]
                colour = COLOURS[i % len(COLOURS)]
                line = LINES[i // len(COLOURS) % len(LINES)]
                marker = "o" if len(step) == 1 else None  # a line of one point would be invisible
                (handle,) = axis.plot(step, centre, line, color=colour, lw=1.8, marker=marker)
                axis.fill_between(step, low, high, color=colour, alpha=0.16, lw=0)
                handles.setdefault(labels[group.label], handle)
            axis.set_xlabel("training step")
            axis.set_title(title, fontsize=10)
            axis.margins(x=0.02)
        axes[0].set_ylabel(y_label)
        figure.legend(
            list(handles.values()),
            list(handles),
            loc="outside lower center",
            ncols=math.ceil(len(labels) / legend_rows),
            title=visible(sweep.title) if sweep.varied else None,
            frameon=False,
        )
        for path in paths:
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, dpi=200, metadata=metadata)


def _binned(run: Run, metric: str, place: dict[int, int], points: int) -> np.ndarray:
    bins: list[list[float]] = [[] for _ in range(points)]
    for step, row in run.rows.items():
        if metric in row:
            bins[place[step]].append(row[metric])
    return np.array([np.mean(values) if values else np.nan for values in bins])


def _centre_and_interval(values: np.ndarray, seed: int) -> np.ndarray:
    """values [runs, points], NaN where a run has none -> [3, points]: centre, low, high."""
    out = np.full((3, values.shape[1]), np.nan)
    present = np.isfinite(values)
    # points with the same runs present share one bootstrap
    for pattern in np.unique(present, axis=1).T:
        columns = np.all(present == pattern[:, None], axis=0)
        chosen = values[pattern][:, columns]
        out[0, columns] = stats.iqm(chosen, axis=0)
        interval = stats.bootstrap_interval(chosen, seed=seed)
        if interval is not None:
            out[1, columns], out[2, columns] = interval
    return out


def _outcome(path: Path) -> tuple[str, str]:
    if (path / "DONE.json").is_file():  # also after a failure: the run was repeated, and ended well
        return "done", ""
    failed = path / "FAILED.json"
    if not failed.is_file():
        return "unfinished", ""
    try:
        return "failed", str(json.loads(failed.read_text(encoding="utf-8"))["error"])
    except (ValueError, KeyError, TypeError):
        return "failed", "FAILED.json does not say why"


def _left_out(run: Run, partial: bool) -> str:
    """Why the run takes no part in the comparison; "" if it does."""
    if run.status == "unreadable" or (run.status == "failed" and not partial):
        return f"{run.status}: {run.error}"
    if not run.rows:
        return f"{run.status}, no metrics"
    if run.status == "unfinished" and not partial:
        return f"unfinished, at step {run.last_step}"
    return ""


def _read_yaml(path: Path):
    """The parsed file; {} if it is missing or empty."""
    return (yaml.safe_load(path.read_text(encoding="utf-8")) or {}) if path.is_file() else {}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A padded Markdown table, so that it also reads well in a terminal. Cells are text: nothing in
    them is a tag, a link or an end of the row."""
    rows = [[literal(cell).replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)
