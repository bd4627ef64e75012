"""The article's toy GRPO loop over a thousand seeds, through the kernels that train a Llama.

    python experiments/seed_loop/run.py

Prints the table of README.md, writes results.csv and figure.svg beside this file, and ends with
exit code 1 if the pass rule fails.
"""

import csv
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from grpo_jax.config import load_algorithm
from grpo_jax.report import COLOURS, STYLE
from grpo_jax.stats import bootstrap_interval
from grpo_jax.tabular_loop import train
from grpo_jax.types import Algorithm

HERE = Path(__file__).parent
SEEDS = 1000
# the constants of the article's listing (section 2.6)
SETTING = {"prompts": 5, "vocab": 5, "group_size": 16, "steps": 80, "inner": 2, "lr": 0.3}
# P(correct) after a step: as the article prints it, from one seed
ARTICLE = {0: 0.209, 16: 0.424, 32: 0.688, 48: 0.847, 64: 0.912, 79: 0.939}
# and the mean over 1000 seeds of a transcription of the listing that shares no code with grpo_jax
EXPECTED = {0: 0.209, 16: 0.421, 32: 0.685, 48: 0.843, 64: 0.912, 79: 0.941}
TOLERANCE = 0.003
Curves = dict[str, np.ndarray]  # metric -> f32[seeds, steps]


def article_algorithm(ddof: int) -> Algorithm:
    """The listing's algorithm: GRPO without KL. torch's `std` has ddof 1."""
    return load_algorithm("grpo", "kl=none", f"scale.ddof={ddof}")


def simulate(algorithm: Algorithm, keys: jax.Array) -> Curves:
    """One training a key [seeds], all in one compiled program."""

    def training(key):
        return train(algorithm, key, **SETTING)

    return jax.tree.map(np.asarray, jax.jit(jax.vmap(training))(keys))


def seed_keys(seeds: int = SEEDS) -> jax.Array:
    """The key of seed i is `jax.random.key(i)`."""
    return jax.vmap(jax.random.key)(jnp.arange(seeds))


def summarise(curves: Curves) -> dict[str, np.ndarray]:
    """By step: means over seeds, the 95 % interval of P(correct)'s mean, and 95 % of the seeds."""
    right = curves["p_correct"].astype(np.float64)
    low, high = bootstrap_interval(right, np.mean)
    seeds_low, seeds_high = np.quantile(right, [0.025, 0.975], axis=0)
    return {
        "p_correct": right.mean(0),
        "p_correct_low": low,
        "p_correct_high": high,
        "seeds_low": seeds_low,
        "seeds_high": seeds_high,
        "reward": curves["reward"].mean(0),
        "useful": curves["useful"].mean(0),
        "clipped": (curves["clip_ratio/low_mean"] + curves["clip_ratio/high_mean"]).mean(0),
    }


def misses(p_correct: np.ndarray) -> list[str]:
    """What breaks the pass rule: one line for each of the six steps that is off; p_correct [80]."""
    return [
        f"step {step}: {p_correct[step]:.4f} is not within {TOLERANCE} of {expected}"
        for step, expected in EXPECTED.items()
        if abs(p_correct[step] - expected) > TOLERANCE
    ]


def table(torch: dict[str, np.ndarray], numpy: dict[str, np.ndarray]) -> str:
    """README.md's table. torch: ddof 1; numpy: ddof 0."""
    lines = [
        "| step | article, one seed | expected | measured [95 % interval] | 95 % of seeds | ddof 0 "
        "| useful groups |",
        "|---:|---:|---:|---|---|---:|---:|",
    ]
    for s, printed in ARTICLE.items():
        interval = f"[{torch['p_correct_low'][s]:.4f}, {torch['p_correct_high'][s]:.4f}]"
        spread = f"{torch['seeds_low'][s]:.3f} to {torch['seeds_high'][s]:.3f}"
        lines.append(
            f"| {s} | {printed:.3f} | {EXPECTED[s]:.3f} | {torch['p_correct'][s]:.4f} {interval} "
            f"| {spread} | {numpy['p_correct'][s]:.4f} | {torch['useful'][s]:.1%} |"
        )
    return "\n".join(lines)


def write_csv(path: Path, summaries: dict[int, dict[str, np.ndarray]]) -> None:
    """One row for each ddof and step."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["ddof", "step", *next(iter(summaries.values()))])
        for ddof, columns in summaries.items():
            for step, row in enumerate(zip(*columns.values(), strict=True)):
                writer.writerow([ddof, step, *(f"{value:.5f}" for value in row)])


def draw(path: Path, torch: dict[str, np.ndarray], numpy: dict[str, np.ndarray]) -> None:
    """Above, the curve; below, distances from it, where the seeds' spread can be seen."""
    blue, orange = COLOURS[:2]
    steps, mean = np.arange(len(torch["p_correct"])), torch["p_correct"]
    at, printed = np.array(list(ARTICLE)), np.array(list(ARTICLE.values()))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 5.2), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
        for axis, zero in ((top, 0), (bottom, mean)):
            low, high = torch["seeds_low"] - zero, torch["seeds_high"] - zero
            axis.fill_between(
                steps, low, high, color=blue, alpha=0.2, lw=0, label=f"95 % of {SEEDS} seeds"
            )
            axis.plot(steps, mean - zero, color=blue, lw=1.8, label="mean, ddof 1 (torch)")
            axis.plot(
                steps,
                numpy["p_correct"] - zero,
                color=orange,
                lw=1.4,
                ls="--",
                label="mean, ddof 0 (numpy)",
            )
            axis.plot(
                at,
                printed - (zero if axis is top else mean[at]),
                "o",
                mfc="white",
                mec="black",
                ms=6,
                label="printed in the article, one seed",
            )
            axis.margins(x=0.02)
        chance = 1 / SETTING["vocab"]
        top.axhline(chance, color="#888888", lw=0.9, ls=":")
        top.annotate("chance", (79, chance), (0, 4), textcoords="offset points", ha="right")
        top.yaxis.set_major_formatter(PercentFormatter(1, decimals=0))
        top.set(ylabel="P(correct)", ylim=(0, 1))
        top.legend(loc="lower right", bbox_to_anchor=(1, 0.27), frameon=False)
        bottom.yaxis.set_major_formatter(PercentFormatter(1, decimals=0, symbol=""))
        bottom.set(xlabel="step", ylabel="distance from the\nmean (% points)", xticks=at)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    keys = seed_keys()
    summaries = {ddof: summarise(simulate(article_algorithm(ddof), keys)) for ddof in (1, 0)}
    print(table(summaries[1], summaries[0]))
    print(f"\nlargest share of tokens that the clip held back: {summaries[1]['clipped'].max():g}")
    write_csv(HERE / "results.csv", summaries)
    draw(HERE / "figure.svg", summaries[1], summaries[0])
    wrong = misses(summaries[1]["p_correct"])
    print("\n".join(wrong) if wrong else "PASS: all six numbers")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
