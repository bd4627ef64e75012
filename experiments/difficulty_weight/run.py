"""How much the gradient of a prompt weighs by its pass rate: exact, and from a million groups.

    python experiments/difficulty_weight/run.py

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
from scipy.stats import binom, norm

from grpo_jax.config import load_algorithm
from grpo_jax.kernels.advantage import advantage
from grpo_jax.report import COLOURS, LINES, STYLE
from grpo_jax.types import Algorithm

HERE = Path(__file__).parent
RATES = np.array([0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99])
SIZES = (2, 8, 16, 64)
GROUPS = 1_000_000  # sampled for each pass rate and size
ROWS = 1_000_000  # sampled at one time
RULES = {
    "group std (GRPO)": ("grpo", "kl=none"),
    "none (Dr. GRPO)": ("dr_grpo",),
    "leave one out (RLOO)": ("dr_grpo", "baseline=leave_one_out"),
    "group mean (MaxRL)": ("maxrl",),
    "batch std (Lite PPO)": ("lite_ppo",),
    "Pass@4": ("pass_at_k", "baseline.k=4", "scale.k=4"),
}
STD, NONE, RLOO, MAXRL, BATCH, PASS = RULES
RARE = 100  # groups with a gradient: with fewer, an estimate is not near enough to normal to judge
LEVEL = 0.01  # chance that a right kernel fails: over all cells together
Weights = dict[tuple[str, int], np.ndarray]  # (rule, G) -> one number a pass rate


def algorithms(size: int) -> dict[str, Algorithm]:
    """The rules that a group of `size` allows: Pass@4 needs four answers."""
    return {name: load_algorithm(*r) for name, r in RULES.items() if name != PASS or size >= 4}


def advantages(algorithm: Algorithm, reward: jax.Array) -> jax.Array:
    """Of the one batch [N, G], by the production kernels."""
    length = jnp.ones(reward.shape, jnp.int32)
    return advantage(algorithm.baseline, algorithm.scale, reward, length)


def by_count(algorithm: Algorithm, size: int, others: int) -> tuple[jax.Array, jax.Array]:
    """Advantage of a right and of a wrong row [G+1, others+1], by the right rows among its group of
    G and among `others` rows of the same batch."""

    def one(k, elsewhere):
        row = jnp.arange(size + others)
        right = jnp.where(row < size, row < k, row - size < elsewhere)
        a = advantages(algorithm, right.astype(float).reshape(-1, size))[0]
        return a[0], a[-1]  # the first row is right unless k = 0, the last wrong unless k = G

    across = jax.vmap(one, (None, 0))
    counts = jnp.arange(size + 1), jnp.arange(others + 1)
    return jax.lax.map(lambda k: across(k, counts[1]), counts[0])


def exact(algorithm: Algorithm, size: int, rates: np.ndarray, batch: bool) -> np.ndarray:
    """c(p, G) = sum over k of Binomial(k; G-1, p) (A(right, k+1) - A(wrong, k)), in float64.

    batch: the advantage also depends on how many rows of the batch's other groups are right. There
    is one group of each of `rates`, and its rows are then averaged over as well.
    """
    others = size * (len(rates) - 1) if batch else 0
    with jax.enable_x64():
        found = jax.jit(partial(by_count, algorithm, size, others))()
    right, wrong = map(np.asarray, found)
    weights = []
    for i, p in enumerate(rates):
        elsewhere = np.ones(1)
        for q in np.delete(rates, i) if batch else ():
            elsewhere = np.convolve(elsewhere, binom.pmf(np.arange(size + 1), size, q))
        mine = binom.pmf(np.arange(size), size - 1, p)
        weights.append(mine @ (right[1:] - wrong[:-1]) @ elsewhere)
    return np.array(weights)


def sampled(size: int, groups: int = GROUPS, seed: int = 0) -> dict[str, np.ndarray]:
    """Each rule's c(p, G), its standard error, and how many groups had a gradient [3, rates].

    In float32, from at least `groups` batches of one group of each pass rate. A group's estimate is
    the mean over its rows of advantage times d log P(reward) / dp, as the policy gradient has it.
    """
    rules = algorithms(size)
    rates = jnp.asarray(RATES, jnp.float32)[:, None]
    batches = max(1, ROWS // (len(RATES) * size))
    rounds = -(-groups // batches)

    @jax.jit
    def sums(key):
        shape = (batches, len(RATES), size)
        reward = (jax.random.uniform(key, shape) < rates).astype(jnp.float32)
        score = (reward - rates) / (rates * (1 - rates))
        found = {}
        for name, algorithm in rules.items():
            each = (jax.vmap(partial(advantages, algorithm))(reward) * score).mean(2)
            found[name] = jnp.stack([each.sum(0), (each**2).sum(0), (each != 0).sum(0)])
        return found

    total = {name: np.zeros((3, len(RATES))) for name in rules}
    for i in range(rounds):
        for name, part in sums(jax.random.fold_in(jax.random.key(seed), i)).items():
            total[name] += np.asarray(part, np.float64)
    count = rounds * batches
    result = {}
    for name, (first, second, informative) in total.items():
        mean = first / count
        error = np.sqrt((second / count - mean**2) / count)
        result[name] = np.stack([mean, error, informative])
    return result


def distances(weights: Weights, samples: Weights) -> tuple[dict, float]:
    """How many standard errors lie between sample and exact value, NaN where groups with a gradient
    are too rare to tell; and how many of them may, over all cells together."""
    z = {}
    for key, expected in weights.items():
        mean, error, informative = samples[key]
        far = np.abs(mean - expected) / np.where(error > 0, error, 1)
        z[key] = np.where(informative >= RARE, far, np.nan)
    return z, float(norm.ppf(1 - LEVEL / (2 * sum(np.isfinite(row).sum() for row in z.values()))))


def misses(weights: Weights, samples: Weights) -> list[str]:
    """What breaks the pass rule."""
    z, bound = distances(weights, samples)
    wrong = [f"{key}, p={p}: sampled" for key, far in z.items() for p in RATES[far > bound]]
    for size in SIZES:
        known = {
            NONE: np.full(len(RATES), (size - 1) / size),
            RLOO: np.ones(len(RATES)),
            MAXRL: (1 - (1 - RATES) ** (size - 1)) / RATES,
            STD: np.ones(len(RATES)) if size == 2 else weights[STD, size][::-1],
        }
        for rule, formula in known.items():
            if np.abs(weights[rule, size] - formula).max() > 1e-6:
                wrong.append(f"{rule}, G={size}: not its closed form, or not symmetric")
    overstated = textbook(0.01) / weights[STD, 16][0]
    if not 2.65 < overstated < 2.75:
        wrong.append(f"the textbook weight is {overstated:.2f} times that at p=.01, G=16, not 2.7")
    return wrong


def textbook(rate):
    """The limit of a large group: 1 / standard deviation of one reward."""
    return 1 / np.sqrt(rate * (1 - rate))


def table(weights: Weights) -> str:
    """README.md's first table."""
    lines = [
        "| divided by | G | " + " | ".join(f"p = {p:g}" for p in RATES) + " |",
        "|---|---:|" + "---:|" * len(RATES),
    ]
    for (rule, size), row in sorted(weights.items(), key=lambda x: list(RULES).index(x[0][0])):
        lines.append(f"| {rule} | {size} | " + " | ".join(f"{c:.3f}" for c in row) + " |")
    lines.append("| 1/√(p(1−p)) | ∞ | " + " | ".join(f"{textbook(p):.3f}" for p in RATES) + " |")
    return "\n".join(lines)


def sampled_table(weights: Weights, samples: Weights, size: int = 16) -> str:
    """README.md's second table: 95 % intervals beside the exact values."""
    shown = np.flatnonzero(RATES <= 0.5)
    lines = [
        f"| divided by, G = {size} | " + " | ".join(f"p = {RATES[i]:g}" for i in shown) + " |",
        "|---|" + "---|" * len(shown),
    ]
    for rule in RULES:
        mean, error, _ = samples[rule, size]
        cells = [
            f"{weights[rule, size][i]:.3f} in [{mean[i] - 1.96 * error[i]:.3f}, "
            f"{mean[i] + 1.96 * error[i]:.3f}]"
            for i in shown
        ]
        lines.append(f"| {rule} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_csv(path: Path, weights: Weights, samples: Weights) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = ("rule", "group_size", "pass_rate", "exact")
        writer.writerow([*names, "sampled", "standard_error", "informative_groups"])
        for (rule, size), row in weights.items():
            for values in zip(RATES, row, *samples[rule, size], strict=True):
                writer.writerow([rule, size, *(f"{value:.6g}" for value in values)])


def draw(path: Path, weights: Weights, samples: Weights) -> None:
    """Left: division by the group's standard deviation; right: all rules at G = 16."""
    fine = 1 / (1 + np.exp(-np.linspace(-4.6, 4.6, 93)))
    place = np.log(RATES / (1 - RATES))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.2), layout="constrained")
        left, right = figure.subplots(1, 2, sharex=True)
        for size, colour in zip(SIZES, COLOURS, strict=False):
            curve = exact(algorithms(size)[STD], size, fine, batch=False)
            left.plot(np.log(fine / (1 - fine)), curve, color=colour, lw=1.6, label=f"G = {size}")
            left.plot(place, samples[STD, size][0], "o", color=colour, ms=4)
        left.plot(
            np.log(fine / (1 - fine)), textbook(fine), "k:", lw=1.2, label="1/√(p(1−p)), G = ∞"
        )
        left.set(title="divided by the group's std", ylabel="weight c(p, G) of ∇p", ylim=(0, 10.5))
        for i, rule in enumerate(RULES):
            style = {"color": COLOURS[i], "ls": LINES[i % 2], "lw": 1.6}
            right.plot(place, weights[rule, 16], **style, label=rule)
            right.plot(place, samples[rule, 16][0], "o", color=COLOURS[i], ms=4)
        right.set(title="every rule, G = 16", yscale="log", ylim=(0.3, 20))
        right.set_yticks([0.5, 1, 2, 5, 10], ["0.5", "1", "2", "5", "10"])
        right.minorticks_off()
        for axis in (left, right):
            axis.set(xlabel="pass rate p (axis in log-odds)", xticks=place)
            axis.set_xticklabels([f"{p:g}".lstrip("0") for p in RATES])
            axis.legend(frameon=False, fontsize=8)
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    weights: Weights = {}
    samples: Weights = {}
    for size in SIZES:
        for rule, algorithm in algorithms(size).items():
            weights[rule, size] = exact(algorithm, size, RATES, batch=rule == BATCH)
        for rule, found in sampled(size).items():
            samples[rule, size] = found
    print(table(weights), sampled_table(weights, samples), sep="\n\n")
    z, bound = distances(weights, samples)
    cells = np.concatenate(list(z.values()))
    print(f"\nlargest distance: {np.nanmax(cells):.2f} standard errors, allowed {bound:.2f}")
    print(f"cells judged: {np.isfinite(cells).sum()} of {len(cells)}; {(cells > 3).sum()} beyond 3")
    print(f"textbook over exact at p=.01, G=16: {textbook(0.01) / weights[STD, 16][0]:.2f}")
    write_csv(HERE / "results.csv", weights, samples)
    draw(HERE / "figure.svg", weights, samples)
    wrong = misses(weights, samples)
    print("\n".join(wrong) if wrong else "PASS")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
