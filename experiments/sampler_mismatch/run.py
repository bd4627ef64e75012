"""What a correction for the sampler's mismatch costs and saves, computed exactly.

    python experiments/sampler_mismatch/run.py

Prints the tables of README.md, writes results.csv and figure.svg beside this file, and ends with
exit code 1 if the pass rule fails.
"""

import csv
import sys
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from matplotlib.figure import Figure

from grpo_jax import tabular_exact as exact
from grpo_jax.config import load_algorithm
from grpo_jax.models import tabular_tree
from grpo_jax.report import COLOURS, LINES, STYLE
from grpo_jax.stats import bootstrap_interval
from grpo_jax.types import Algorithm

HERE = Path(__file__).parent
TREE = tabular_tree.enumerate_tree(3, 4)  # tokens 0, 1 and EOS, at most 4 of them: 31 answers
SPREAD = 0.7  # standard deviation of a policy's logits
SIZE = 3  # answers in a group: 5456 groups
NOISES = (0.0, 0.03, 0.1, 0.3, 1.0)  # standard deviation of what the sampler adds to the logits
PAIRS = 24  # random policies, each with a random sampler
PRESET = ("dr_grpo", "aggregation=sequence_sum")
CORRECTIONS = {
    "none": (),
    "token_truncate, cap 2": ("correction=token_truncate",),
    "token_mask [1/2, 2]": ("correction=token_mask",),
    "sequence_truncate, cap 2": ("correction=sequence_truncate",),
    "sequence_mask [0, 3]": ("correction=sequence_mask",),
    "batch_normalised, tokens": ("correction=batch_normalised",),
    "batch_normalised, answers": (
        *("correction=batch_normalised", "correction.by_row=true", "correction.rule.cap=1e9"),
        "correction.rule._target_=grpo_jax.kernels.correction.sequence_truncate",
    ),
    "off_policy_sequence": ("correction=off_policy_sequence",),
    "sequence weight, no cap": ("correction=sequence_truncate", "correction.cap=1e9"),
}
FULL = "sequence weight, no cap"
Rows = list[dict[str, object]]


def reward() -> jax.Array:
    """1 for an answer that ends, and holds token 1 exactly once."""
    ones = ((TREE.tokens == 1) & TREE.mask).sum(1)
    return jnp.asarray((ones == 1) & ~TREE.truncated, float)


def algorithm_of(correction: str) -> Algorithm:
    """Dr. GRPO without a clip in the way: a first update on the rollout, where no ratio differs."""
    return load_algorithm(*PRESET, *CORRECTIONS[correction])


def pair(key, noise) -> tuple[dict[str, jax.Array], dict[str, jax.Array]]:
    """A policy, and the sampler that stands in for it."""
    of_policy, of_noise = jax.random.split(key)
    params = tabular_tree.init(TREE, of_policy, spread=SPREAD, dtype=jnp.float64)
    added = jax.random.normal(of_noise, params["logits"].shape, jnp.float64)
    return params, {"logits": params["logits"] + noise * added}


def compared(algorithm: Algorithm, groups: exact.Groups, noise, key) -> exact.Comparison:
    """Groups come from the sampler; the gradient is of the policy, which also has `old_logp`."""
    params, sampler = pair(key, noise)
    true = tabular_tree.policy_gradient(params, TREE, reward())["logits"]
    advantages = exact.group_advantages(algorithm, TREE, groups.rows, reward())
    rows = (algorithm, TREE, params, groups.rows, advantages)
    each = exact.gradients(*rows, old=params, sampler=sampler)
    probability = exact.group_probabilities(groups, tabular_tree.probabilities(sampler, TREE))
    return exact.compare(each, probability, true)[1]


def distance(noise, key) -> tuple[jax.Array, jax.Array]:
    """(mean |difference of log-probs| by token, effective share of a sample of answers)."""
    params, sampler = pair(key, noise)
    p, q = (tabular_tree.probabilities(x, TREE) for x in (params, sampler))
    moved = jnp.abs(tabular_tree.logps(params, TREE) - tabular_tree.logps(sampler, TREE))
    return jnp.sum(q @ moved) / jnp.dot(q, TREE.length), 1 / jnp.sum(p**2 / q)


def measure(pairs: int = PAIRS, size: int = SIZE, noises: tuple[float, ...] = NOISES) -> Rows:
    """Medians over the pairs, with their 95 % bootstrap intervals."""
    groups = exact.all_groups(len(TREE.tokens), size)
    keys = jax.random.split(jax.random.key(1), pairs)
    rows: Rows = []
    without = {}  # errors [pairs] of no correction, which comes first
    for label in CORRECTIONS:
        # one pair after the other: all of them at once would need gigabytes
        one = jax.jit(partial(compared, algorithm_of(label)))
        for noise in noises:
            found = [one(groups, noise, key) for key in keys]
            moved, effective = jax.vmap(partial(distance, noise))(keys)
            row: dict[str, object] = {"correction": label, "noise": noise}
            row |= {"moved": float(jnp.median(moved)), "effective": float(jnp.median(effective))}
            row["largest_error"] = max(float(c.error) for c in found)
            values_of = {
                name: np.array([float(getattr(c, name)) for c in found])
                for name in ("error", "variance", "scale")
            }
            error = values_of["error"]
            values_of["paired"] = error / without.setdefault(noise, error) if noise else error * 0
            for name, values in values_of.items():
                low, high = bootstrap_interval(values, np.median)
                row |= {name: float(np.median(values))}
                row |= {f"{name}_low": float(low), f"{name}_high": float(high)}
            rows.append(row)
    return rows


def one_of(rows: Rows, correction: str, noise: float) -> dict:
    return next(r for r in rows if r["correction"] == correction and r["noise"] == noise)


def misses(rows: Rows) -> list[str]:
    """What breaks the pass rule."""
    wrong = []
    for noise in NOISES:
        full = one_of(rows, FULL, noise)
        if full["largest_error"] > 1e-6:
            wrong.append(f"noise {noise}: the full sequence weight is biased")
        if abs(full["scale"] - (SIZE - 1) / SIZE) > 1e-6:
            wrong.append(f"noise {noise}: the full sequence weight is not of scale (G - 1) / G")
    for label in CORRECTIONS:
        if one_of(rows, label, 0.0)["largest_error"] > 1e-6:
            wrong.append(f"{label} is biased without any noise")
        if label != FULL and one_of(rows, label, 1.0)["error_low"] < 0.05:
            wrong.append(f"{label} is not seen to be biased at noise 1")
    if one_of(rows, "token_truncate, cap 2", 0.3)["paired_high"] > 1:
        wrong.append("noise 0.3: token weights do not lower the bias")
    return wrong


def table(rows: Rows, name: str) -> str:
    """Medians of `error` or `variance` [interval]."""
    lines = [
        "| correction | " + " | ".join(f"σ = {noise:g}" for noise in NOISES) + " |",
        "|---|" + "---|" * len(NOISES),
    ]
    digits = 3 if name == "error" else 2
    for label in CORRECTIONS:
        cells = []
        for noise in NOISES:
            row = one_of(rows, label, noise)
            numbers = (abs(row[key]) for key in (name, f"{name}_low", f"{name}_high"))
            cells.append("{} [{}, {}]".format(*(f"{x:.{digits}f}" for x in numbers)))
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def paired_table(rows: Rows, noises: tuple[float, ...] = (0.1, 0.3, 1.0)) -> str:
    """Errors over those of the same pair without a correction: medians [interval]."""
    lines = [
        "| error / error without | " + " | ".join(f"σ = {noise:g}" for noise in noises) + " |",
        "|---|" + "---|" * len(noises),
    ]
    for label in CORRECTIONS:
        cells = []
        for noise in noises:
            row = one_of(rows, label, noise)
            numbers = (row[key] for key in ("paired", "paired_low", "paired_high"))
            cells.append("{} [{}, {}]".format(*(f"{x:.2f}" for x in numbers)))
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def noise_table(rows: Rows) -> str:
    """What a noise means, whatever the correction."""
    lines = [
        "| σ | mean \\|Δ log p\\| of a token | effective share of the answers |",
        "|---|---|---|",
    ]
    for noise in NOISES:
        row = one_of(rows, "none", noise)
        lines.append(f"| {noise:g} | {row['moved']:.4f} | {row['effective']:.3f} |")
    return "\n".join(lines)


def write_csv(path: Path, rows: Rows) -> None:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def draw(path: Path, rows: Rows) -> None:
    """Bias on the left, scatter on the right, both by noise."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10, 4.2), layout="constrained")
        axes = figure.subplots(1, 2)
        for axis, name in zip(axes, ("error", "variance"), strict=True):
            for i, label in enumerate(CORRECTIONS):
                mine = [one_of(rows, label, noise) for noise in NOISES]
                low, high = ([r[f"{name}_{end}"] for r in mine] for end in ("low", "high"))
                style = {"color": COLOURS[i % 7], "ls": LINES[i // 7], "lw": 1.6}
                axis.plot(NOISES, [r[name] for r in mine], label=label, **style)
                if name == "error":  # of the scatter, the intervals are those between policies
                    axis.fill_between(NOISES, low, high, color=COLOURS[i % 7], alpha=0.1, lw=0)
            axis.set_xscale("symlog", linthresh=0.03)
            axis.set_xticks(NOISES, [f"{noise:g}" for noise in NOISES])
            axis.set_xlabel("noise on the sampler's logits, σ")
        axes[0].set(ylabel="direction error of the expected gradient", ylim=(-0.02, 0.9))
        axes[1].set(ylabel="trace of the covariance / |expectation|²", yscale="log")
        axes[1].set_yticks([5, 10, 20, 40], ["5", "10", "20", "40"])
        axes[1].minorticks_off()
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=8)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    with jax.enable_x64():
        rows = measure()
    print(table(rows, "error"), paired_table(rows), table(rows, "variance"), sep="\n\n")
    print("", noise_table(rows), sep="\n")
    write_csv(HERE / "results.csv", rows)
    draw(HERE / "figure.svg", rows)
    wrong = misses(rows)
    print("\n".join(wrong) if wrong else "PASS")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
