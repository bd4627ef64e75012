"""Does an algorithm's expected gradient point where the gradient of the mean reward does?

    python experiments/estimator_bias/run.py

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
POLICIES = 3
SIZE = 4  # answers in a group
BATCHES = (1, 2, 8, 32)  # groups in a minibatch
PLAIN = ("kl=none", "entropy=none")
# clip_cov and kl_cov are left out: on policy they compare the tokens of a large batch
PRESETS = (
    *("dr_grpo", "rloo", "reinforce", "luspo", "opo"),
    *("grpo", "grpo_r1", "two_grpo", "gdpo", "gspo", "gmpo", "sapo"),
    *("dapo_paper", "dapo", "cispo", "scalerl", "lite_ppo", "intellect2", "deepseek_v32", "dppo"),
    *("skywork_or1", "trl_default", "verl_default", "vespo", "gpg", "maxrl", "entropy_8020"),
    *("reinforce_pp", "reinforce_pp_baseline"),
)
EXTRA = {"dr_grpo": ("aggregation.length=4",)}  # the budget here
DRIFTS = (0.1, 0.3, 0.6, 1.0)  # standard deviation of old logits about the new ones
PAIRS = 200  # random pairs of policies at each drift
SUM = ("dr_grpo", "aggregation=sequence_sum")
GSPO = ("gspo", "clip=importance")
OLD, RECOMPUTED = "ratio", "correction"  # what carries the sampler's probabilities
ESTIMATORS = {
    "sequence ratio": (OLD, "rloo", "clip=importance"),
    "sequence weight, cap 2": (RECOMPUTED, *SUM, "correction=sequence_truncate"),
    "sequence mask [1/2, 2]": (
        *(RECOMPUTED, *SUM, "correction=sequence_mask"),
        *("correction.low=0.5", "correction.high=2"),
    ),
    "token ratio, no clip": (OLD, *SUM, "clip=importance"),
    "token mask [1/2, 2]": (RECOMPUTED, *SUM, "correction=token_mask"),
    "clip 0.2 / 0.2": (OLD, *SUM),
    "clip 0.2 / 0.28": (OLD, *SUM, "clip=higher"),
    "CISPO, cap 2": (OLD, *SUM, "clip=cispo", "clip.low=1", "clip.high=1"),
    "SAPO": (OLD, *SUM, "clip=sapo"),
    "DPPO, TV": (OLD, *SUM, "clip=dppo_tv"),
    "VESPO": (OLD, *SUM, "ratio=sequence_sum", "clip=vespo"),
    "no ratio": (OLD, *SUM, "clip=none"),
    "GSPO's ratio, sum": (OLD, *GSPO, "aggregation=sequence_sum"),
    "GSPO's ratio, 1/|o|": (OLD, *GSPO),
    "GSPO 3e-4 / 4e-4, 1/|o|": (OLD, "gspo"),
    "token ratio, 1/|o|": (OLD, "grpo", "clip=importance"),
    "GRPO 0.2 / 0.2, 1/|o|": (OLD, "grpo"),
    "GMPO, 1/|o|": (OLD, "gmpo"),
}
FULL, BY_LENGTH = "sequence ratio", ("GSPO's ratio, 1/|o|", "token ratio, 1/|o|")
DRAWN = (
    *(FULL, "sequence weight, cap 2", "token ratio, no clip", "clip 0.2 / 0.2", "CISPO, cap 2"),
    *("no ratio", "GSPO's ratio, 1/|o|", "GRPO 0.2 / 0.2, 1/|o|"),
)
Rows = list[dict[str, object]]


def reward() -> jax.Array:
    """1 for an answer that ends, and holds token 1 exactly once."""
    ones = ((TREE.tokens == 1) & TREE.mask).sum(1)
    return jnp.asarray((ones == 1) & ~TREE.truncated, float)


def policies(count: int = POLICIES) -> list[dict[str, jax.Array]]:
    rng = np.random.default_rng(0)
    shape = (TREE.prefixes, TREE.vocab)
    return [{"logits": jnp.asarray(SPREAD * rng.normal(size=shape))} for _ in range(count)]


def length_gradient(params) -> jax.Array:
    """Of the mean length of an answer."""
    return tabular_tree.policy_gradient(params, TREE, jnp.asarray(TREE.length, float))["logits"]


def on_policy(algorithm: Algorithm, groups: exact.Groups, params, weight=None):
    """(comparison, change of the mean length along the gradient over its scale)."""
    true = tabular_tree.policy_gradient(params, TREE, reward())["logits"]
    advantages = exact.group_advantages(algorithm, TREE, groups.rows, reward())
    here = {"old": params, "sampler": params, "weight": weight}
    each = exact.gradients(algorithm, TREE, params, groups.rows, advantages, **here)
    probability = exact.group_probabilities(groups, tabular_tree.probabilities(params, TREE))
    mean, compared = exact.compare(each, probability, true)
    return compared, jnp.sum(mean * length_gradient(params)) / compared.scale


def batch_weight(algorithm: Algorithm, groups: exact.Groups, params, batch: int) -> jax.Array:
    """Weights [C, G, T] of a group's tokens in a minibatch of `batch` groups, in expectation.

    For an aggregation that sees no more of the other groups than how many tokens they have: these
    are put one after the other into the rows of the other groups, and their number averaged over.
    """
    patterns, which = np.unique(TREE.length[groups.rows], axis=0, return_inverse=True)
    answer = np.asarray(tabular_tree.probabilities(params, TREE))
    chance = np.bincount(TREE.length, weights=answer)  # of a length
    width, others = TREE.mask.shape[1], (batch - 1) * SIZE
    total = np.ones(1)
    for _ in range(others):
        total = np.convolve(total, chance)
    group = jnp.repeat(jnp.arange(batch), SIZE)

    def one(own, elsewhere):
        filled = jnp.clip(elsewhere - width * jnp.arange(others), 0, width)
        length = jnp.concatenate([own, filled])
        mask = jnp.arange(width) < length[:, None]
        return algorithm.aggregation(mask, group)[:SIZE]

    across = jax.jit(jax.vmap(jax.vmap(one, (None, 0)), (0, None)))
    weights = across(jnp.asarray(patterns), jnp.arange(len(total)))
    return jnp.einsum("l,plgt->pgt", total, weights)[which]


def measure_presets() -> Rows:
    """Every preset as it is, one group a minibatch; and smaller groups for one of each kind."""
    rows: Rows = []
    for name in PRESETS:
        algorithm = load_algorithm(name, *PLAIN, *EXTRA.get(name, ()))
        sizes = (2, 3, SIZE) if name in ("dr_grpo", "grpo", "dapo_paper") else (SIZE,)
        for size in sizes:
            groups = exact.all_groups(len(TREE.tokens), size)
            measure = jax.jit(partial(on_policy, algorithm))
            for number, params in enumerate(policies()):
                compared, length = measure(groups, params)
                rows.append(
                    {"part": "on policy", "estimator": name, "group_size": size, "groups": 1}
                    | {"policy": number, "mean_length_change": float(length)}
                    | {key: float(value) for key, value in vars(compared).items()}
                )
    return rows


def measure_batches() -> Rows:
    """The mean over the tokens of a minibatch, by the groups in it."""
    rows: Rows = []
    algorithm = load_algorithm("dapo", *PLAIN)
    groups = exact.all_groups(len(TREE.tokens), SIZE)
    measure = jax.jit(partial(on_policy, algorithm))
    for batch in BATCHES:
        for number, params in enumerate(policies()):
            weight = batch_weight(algorithm, groups, params, batch)
            compared, length = measure(groups, params, weight)
            rows.append(
                {"part": "batch", "estimator": "token_mean", "group_size": SIZE, "groups": batch}
                | {"policy": number, "mean_length_change": float(length)}
                | {"error": float(compared.error), "cosine": float(compared.cosine)}
                | {"scale": batch * float(compared.scale)}
            )
    return rows


def off_policy(algorithm: Algorithm, role: str, drift, key):
    """Of one random pair: answers of an old policy, exact advantages R - p, one answer a batch."""
    of_policy, of_drift = jax.random.split(key)
    params = tabular_tree.init(TREE, of_policy, spread=SPREAD, dtype=jnp.float64)
    noise = jax.random.normal(of_drift, params["logits"].shape, jnp.float64)
    old = {"logits": params["logits"] + drift * noise}
    true = tabular_tree.policy_gradient(params, TREE, reward())["logits"]
    centred = reward() - tabular_tree.expected_reward(params, TREE, reward())
    each = exact.gradients(
        *(algorithm, TREE, params, jnp.arange(len(TREE.tokens))[:, None], centred[:, None]),
        old=old if role == OLD else params,
        sampler=old,
    )
    return exact.compare(each, tabular_tree.probabilities(old, TREE), true)[1]


def measure_drift(pairs: int = PAIRS) -> Rows:
    """Medians over the pairs with their 95 % bootstrap intervals."""
    rows: Rows = []
    keys = jax.random.split(jax.random.key(0), pairs)
    for label, (role, preset, *overrides) in ESTIMATORS.items():
        algorithm = load_algorithm(preset, *PLAIN, *overrides)
        measure = jax.jit(jax.vmap(partial(off_policy, algorithm, role), (None, 0)))
        for drift in DRIFTS:
            found = jax.tree.map(np.asarray, measure(drift, keys))
            row: dict[str, object] = {"part": "drift", "estimator": label, "drift": drift}
            row["largest_error"] = found.error.max()
            for name in ("error", "variance", "scale", "cosine"):
                values = getattr(found, name)
                row[name] = float(np.median(values))
                if name in ("error", "variance"):
                    low, high = bootstrap_interval(values, np.median)
                    row |= {f"{name}_low": float(low), f"{name}_high": float(high)}
            rows.append(row)
    return rows


def chosen(rows: Rows, key: str, **where) -> list[float]:
    return [row[key] for row in rows if all(row.get(k) == v for k, v in where.items())]


def misses(rows: Rows) -> list[str]:
    """What breaks the pass rule."""
    wrong = []
    errors = partial(chosen, rows, "error", part="on policy", group_size=SIZE)
    for name in ("dr_grpo", "rloo", "reinforce", "luspo"):
        if max(errors(estimator=name)) > 1e-6:
            wrong.append(f"{name} is not in the direction of the gradient")
    for size in (2, 3, SIZE):
        scale = chosen(rows, "scale", part="on policy", estimator="dr_grpo", group_size=size)
        if np.abs(np.array(scale) * 4 - (size - 1) / size).max() > 1e-6:
            wrong.append(f"dr_grpo, G={size}: 4 times its scale is not (G - 1) / G")
    by_answer, by_group = errors(estimator="grpo"), errors(estimator="dapo_paper")
    if not 0.2 < min(by_answer) <= max(by_answer) < 0.4:
        wrong.append(f"1/|o|: {by_answer}, not between 0.2 and 0.4")
    if not all(
        0.01 < group < answer / 2 for group, answer in zip(by_group, by_answer, strict=True)
    ):
        wrong.append(f"mean by group: {by_group}, not between 0.01 and half of 1/|o|'s")
    if max(chosen(rows, "largest_error", part="drift", estimator=FULL)) > 1e-6:
        wrong.append("the full sequence ratio is biased")
    small = {label: chosen(rows, "error", estimator=label, drift=0.1)[0] for label in ESTIMATORS}
    if max(small["token ratio, no clip"], small["clip 0.2 / 0.2"], small["no ratio"]) > 0.1:
        wrong.append("drift 0.1: a sum over tokens is off by more than 0.1")
    if min(small[label] for label in BY_LENGTH) < 0.2:
        wrong.append("drift 0.1: 1/|o| is off by less than 0.2")
    return wrong


def preset_table(rows: Rows) -> str:
    """Presets whose numbers look the same share a row."""
    same: dict[tuple, list[str]] = {}
    for name in PRESETS:
        here = {"part": "on policy", "estimator": name, "group_size": SIZE}
        places = {"error": 3, "scale": 4, "mean_length_change": 3}
        columns = ([f"{x:.{n}f}" for x in chosen(rows, k, **here)] for k, n in places.items())
        same.setdefault(tuple(" / ".join(column) for column in columns), []).append(name)
    lines = [
        "| presets | direction error | scale c | mean length along it |",
        "|---|---|---|---|",
    ]
    for cells, names in sorted(same.items()):
        lines.append(f"| {', '.join(names)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def size_table(rows: Rows) -> str:
    lines = [
        "| direction error | groups a minibatch | G | policies 1 / 2 / 3 |",
        "|---|---:|---:|---|",
    ]
    kinds = {"dr_grpo": "constant", "grpo": "1/\\|o\\|", "dapo_paper": "mean by group"}
    for name, label in kinds.items():
        for size in (2, 3, SIZE):
            error = chosen(rows, "error", part="on policy", estimator=name, group_size=size)
            cells = " / ".join(f"{abs(e):.4f}" for e in error)
            lines.append(f"| {label} | any | {size} | {cells} |")
    for batch in BATCHES:
        error = chosen(rows, "error", part="batch", groups=batch)
        cells = " / ".join(f"{e:.4f}" for e in error)
        lines.append(f"| mean by minibatch | {batch} | {SIZE} | {cells} |")
    return "\n".join(lines)


def drift_table(rows: Rows) -> str:
    lines = [
        "| estimator | " + " | ".join(f"d = {drift:g}" for drift in DRIFTS) + " |",
        "|---|" + "---|" * len(DRIFTS),
    ]
    for label in ESTIMATORS:
        cells = []
        for drift in DRIFTS:
            (row,) = (r for r in rows if r["estimator"] == label and r.get("drift") == drift)
            interval = f"[{row['error_low']:.3f}, {row['error_high']:.3f}]"
            cells.append(f"{row['error']:.3f} {interval}; {row['variance']:.1f}")
        lines.append(f"| {label} | ".replace("|o|", "\\|o\\|") + " | ".join(cells) + " |")
    return "\n".join(lines)


def write_csv(path: Path, rows: Rows) -> None:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
        writer.writeheader()
        for row in rows:
            writer.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()})


def draw(path: Path, rows: Rows) -> None:
    """Left: on policy, by how the loss is averaged; right: medians by drift."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(10.4, 4.4), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1, 1.5))
        bars = {
            "1/|o|": chosen(rows, "error", part="on policy", estimator="grpo", group_size=SIZE)
        } | {
            f"1/Σ, {batch} group{'s' * (batch > 1)}": chosen(
                rows, "error", part="batch", groups=batch
            )
            for batch in BATCHES
        }
        bars["constant"] = chosen(
            rows, "error", part="on policy", estimator="dr_grpo", group_size=SIZE
        )
        for number in range(POLICIES):
            place = np.arange(len(bars)) + (number - 1) * 0.25
            values = [error[number] for error in bars.values()]
            label = f"policy {number + 1}"
            left.bar(place, values, 0.23, color=COLOURS[number], label=label)
        left.set_xticks(range(len(bars)), list(bars), rotation=35, ha="right")
        left.set(title="on policy, G = 4", ylabel="direction error of the expected gradient")
        left.legend(frameon=False)
        for i, label in enumerate(DRAWN):
            error = chosen(rows, "error", part="drift", estimator=label)
            style = {"color": COLOURS[i % 7], "ls": LINES[i // 7], "lw": 1.5}
            right.plot(DRIFTS, error, marker="o", ms=3, label=label, **style)
        right.set(title="off policy, medians of 200 pairs", xlabel="drift of the logits")
        right.set(ylabel="direction error", ylim=(-0.03, 1.3))
        right.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
        figure.savefig(path, dpi=160, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    with jax.enable_x64():
        rows = measure_presets() + measure_batches() + measure_drift()
    print(preset_table(rows), size_table(rows), drift_table(rows), sep="\n\n")
    write_csv(HERE / "results.csv", rows)
    draw(HERE / "figure.svg", rows)
    wrong = misses(rows)
    print("\n".join(wrong) if wrong else "PASS")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
