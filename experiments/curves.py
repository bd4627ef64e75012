"""The numbers and the figure of a sweep whose question needs several metrics along training.

    python experiments/curves.py runs/smollm2_ladder experiments/smollm2_ladder METRIC ...

writes OUT/results.csv (group, seed, step, metric, value) and OUT/figure.svg: a panel a metric, the
mean over seeds as a line and each seed as a thin one.
"""

import argparse
import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt
import numpy as np

from grpo_jax.report import Sweep, load_sweep


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sweep", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("metrics", nargs="+")
    parser.add_argument("--partial", action="store_true", help="take in unfinished runs")
    arguments = parser.parse_args()
    sweep = load_sweep(arguments.sweep, partial=arguments.partial)
    for run, reason in sweep.left_out:
        print(f"left out: {run.folder}: {reason}", file=sys.stderr)
    if not sweep.groups:
        sys.exit("no run to draw")
    rows = collect(sweep, arguments.metrics)
    with open(arguments.out / "results.csv", "w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [("group", "seed", "step", "metric", "value"), *rows]
        )
    draw(sweep, arguments.metrics, arguments.out / "figure.svg")


def collect(sweep: Sweep, metrics: list[str]) -> list[tuple]:
    return [
        (group.label, run.seed, step, metric, f"{row[metric]:.4f}")
        for group in sweep.groups
        for run in group.runs
        for step, row in run.rows.items()
        for metric in metrics
        if metric in row
    ]


def draw(sweep: Sweep, metrics: list[str], path: Path) -> None:
    # fixed ids and no date: the same numbers give the same file
    plt.rcParams |= {"svg.hashsalt": "curves", "font.size": 8}
    figure, panels = plt.subplots(
        1, len(metrics), figsize=(2.3 * len(metrics), 2.4), squeeze=False, layout="constrained"
    )
    for panel, metric in zip(panels[0], metrics, strict=True):
        for number, group in enumerate(sweep.groups):
            series = [
                {step: row[metric] for step, row in run.rows.items() if metric in row}
                for run in group.runs
            ]
            steps = sorted(set.intersection(*(set(one) for one in series)))
            for one in series:
                panel.plot(list(one), list(one.values()), color=f"C{number}", lw=0.5, alpha=0.5)
            mean = [np.mean([one[step] for one in series]) for step in steps]
            panel.plot(steps, mean, color=f"C{number}", lw=1.8, label=group.label)
        panel.set_title(metric.replace("/mean", "").rsplit("/", 1)[-1])
        panel.set_xlabel("step")
        panel.spines[["top", "right"]].set_visible(False)
    if len(sweep.groups) > 1:
        panels[0][0].legend(frameon=False)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
