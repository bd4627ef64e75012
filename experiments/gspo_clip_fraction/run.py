"""How much GSPO clips, and what it learns: by minibatches a rollout, rate and answer length.

    python experiments/gspo_clip_fraction/run.py

Prints the tables of README.md, writes results.csv, lengths.csv and figure.svg beside this file, and
ends with exit code 1 if the pass rule fails.
"""

import csv
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
import optax
from jax import lax
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from grpo_jax.config import load_algorithm
from grpo_jax.kernels.advantage import advantage
from grpo_jax.loss import policy_loss
from grpo_jax.models import tabular_chain
from grpo_jax.report import COLOURS, STYLE
from grpo_jax.stats import PairedDifference, bootstrap_interval, paired_difference
from grpo_jax.types import Algorithm

HERE = Path(__file__).parent
SEEDS, UPDATES = 16, 128
START = {"vocab": 8, "spread": 0.5, "bias": 0.9}  # of the policy, see tabular_chain.init
SLOTS, GROUP_SIZE = 24, 16
THRESHOLDS = np.linspace(0.25, 0.9, 8, dtype=np.float32)  # of accuracy, one a prompt
ROWS = len(THRESHOLDS) * GROUP_SIZE  # of a minibatch
MINIBATCHES = (1, 4, 16)  # one update on each, all drawn before the first
RATES = (0.02, 0.05, 0.1, 0.2, 0.4)  # of Adam
OFF = 1e9  # beyond the largest ratio, exp(20): no clip
FAMILIES = {  # as in `load_algorithm(*FAMILIES[name])`
    "grpo": ("grpo", "kl=none", "clip=higher"),
    "gspo": ("gspo",),
    "cispo": ("cispo",),
}
RULES = {  # name -> (family, low, high)
    "GRPO .2/.27": ("grpo", 0.2, 0.27),
    "GSPO 3e-4/4e-4": ("gspo", 3e-4, 4e-4),
    "GSPO 3e-3/4e-3": ("gspo", 3e-3, 4e-3),
    "GSPO 3e-2/4e-2": ("gspo", 3e-2, 4e-2),
    "CISPO, cap 5": ("cispo", 1.0, 4.0),
    "no clip": ("grpo", OFF, OFF),
}
GRPO, PAPER, _, WIDE, CISPO, FREE = RULES
LENGTHS = (16, 64, 128, 256, 1024)
DRIFT, ANSWERS = 0.16, 1024  # deviation of what is added to each logit; answers by length and seed
JUDGED, FEWEST, TIMES = (0.02, 0.05, 0.1), 0.1, 50  # rates, and what GSPO is to clip there
# float32 rounds differently in each compiled program; share of sd * sqrt(T) at the shortest length
SAME, LAW = 1e-5, 0.05
COMPARISONS = (  # (minibatches, rule, other rule), each at the rate that suits it best
    (4, PAPER, GRPO),
    (4, WIDE, GRPO),
    (16, PAPER, GRPO),
    (16, WIDE, GRPO),
    (16, CISPO, WIDE),
    (16, CISPO, FREE),
)
Results = dict[tuple[str, int], dict[str, np.ndarray]]  # (rule, minibatches) -> metric -> ...


def with_clip(algorithm: Algorithm, low: jax.Array, high: jax.Array) -> Algorithm:
    """The same algorithm with other constants in its clip, which may be traced."""
    return replace(algorithm, clip=partial(algorithm.clip, low=low, high=high))


def train(
    algorithm: Algorithm, key: jax.Array, *, lr: float | jax.Array, minibatches: int
) -> dict[str, jax.Array]:
    """One training of UPDATES updates: exact accuracy and entropy after each rollout, and the share
    of tokens that the clip holds back, mean over the updates on that rollout."""
    for_start, for_noise = jax.random.split(key)
    first, target = tabular_chain.init(for_start, slots=SLOTS, **START)
    optimizer = optax.adam(lr, b1=0.9, b2=0.99)
    group = jnp.repeat(jnp.arange(len(THRESHOLDS)), GROUP_SIZE)

    def update(state, minibatch):
        params, opt_state = state
        loss = make_loss(algorithm, target, group, *minibatch)
        grad, sums = jax.grad(loss, has_aux=True)(params)
        change, opt_state = optimizer.update(grad, opt_state, params)
        clipped = (sums["clip_low"] + sums["clip_high"]) / sums["tokens"]
        return (optax.apply_updates(params, change), opt_state), clipped

    def step(state, number):
        rollout = tabular_chain.sample(state[0], jnp.tile(group, minibatches), for_noise, number)
        cut = (minibatches, ROWS, SLOTS)
        parts = rollout.completion.reshape(cut), rollout.sampler_logp.reshape(cut)
        state, clipped = lax.scan(update, state, parts)
        return state, {
            "accuracy": tabular_chain.accuracy(state[0], target),
            "entropy": tabular_chain.entropy(state[0]),
            "clipped": clipped.mean(),
        }

    rollouts = jnp.arange(UPDATES // minibatches)
    return lax.scan(step, (first, optimizer.init(first)), rollouts)[1]


def make_loss(
    algorithm: Algorithm,
    target: jax.Array,
    group: jax.Array,
    tokens: jax.Array,
    old_logp: jax.Array,
):
    """params -> the production loss on a minibatch. An answer to prompt p is right if its accuracy
    reaches the p-th threshold."""
    mask = jnp.ones(tokens.shape, bool)
    right = (tokens == target).mean(1) >= jnp.asarray(THRESHOLDS)[group]
    reward = right.astype(jnp.float32).reshape(-1, GROUP_SIZE)
    length = mask.sum(1).reshape(reward.shape)
    value = advantage(algorithm.baseline, algorithm.scale, reward, length).reshape(-1)
    weight = algorithm.aggregation(mask, group)

    def loss(params):
        return policy_loss(
            algorithm,
            tabular_chain.logps(params, tokens),
            old_logp=old_logp,
            sampler_logp=old_logp,
            ref_logp=None,
            advantage=value,
            mask=mask,
            weight=weight,
        )

    return loss


def simulate(family: str, minibatches: int, seeds: int = SEEDS) -> Results:
    """All rules of a family, rates and seeds, one compiled program; seed i is `key(i)`.

    Metrics are f32[rates, seeds, rollouts].
    """
    algorithm = load_algorithm(*FAMILIES[family])

    def training(low, high, lr, key):
        return train(with_clip(algorithm, low, high), key, lr=lr, minibatches=minibatches)

    names = [name for name, rule in RULES.items() if rule[0] == family]
    low, high = jnp.array([RULES[name][1:] for name in names]).T
    grid = jax.vmap(training, (None, None, None, 0))
    grid = jax.vmap(jax.vmap(grid, (None, None, 0, None)), (0, 0, None, None))
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    found = jax.tree.map(np.asarray, jax.jit(grid)(low, high, jnp.array(RATES), keys))
    return {
        (name, minibatches): {k: v[i] for k, v in found.items()} for i, name in enumerate(names)
    }


def drift(slots: int, seeds: int = SEEDS) -> dict[str, np.ndarray]:
    """What GSPO's ratio is after a random drift of the policy, for answers of `slots` tokens.

    f64[seeds]: `sd` of the ratio, `mean_log` of it, and the share of answers that each GSPO clips,
    every other one having a negative advantage; `scaled` is the widest with constants that fall as
    1 / sqrt(T) from what they are at SLOTS.
    """
    algorithm = load_algorithm(*FAMILIES["gspo"])

    def measure(key):
        for_start, for_noise, for_drift = jax.random.split(key, 3)
        old, _ = tabular_chain.init(for_start, slots=slots, **START)
        shift = DRIFT * jax.random.normal(for_drift, old["logits"].shape)
        new = {"logits": old["logits"] + shift}
        rollout = tabular_chain.sample(old, jnp.arange(ANSWERS), for_noise, 0)
        logp, mask = tabular_chain.logps(new, rollout.completion), rollout.mask
        log_ratio = algorithm.ratio(logp, rollout.sampler_logp, mask)
        sign = jnp.where(jnp.arange(ANSWERS) % 2, 1.0, -1.0)[:, None]
        result = {"sd": jnp.exp(log_ratio[:, 0]).std(), "mean_log": log_ratio[:, 0].mean()}
        constants = {name: rule[1:] for name, rule in RULES.items() if rule[0] == "gspo"}
        constants["scaled"] = tuple(x * (SLOTS / slots) ** 0.5 for x in RULES[WIDE][1:])
        for name, (low, high) in constants.items():
            clip = with_clip(algorithm, low, high).clip
            result[name] = clip(log_ratio, sign, logp, mask)[1].mean()
        return result

    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    return jax.tree.map(lambda x: np.asarray(x, np.float64), jax.jit(jax.vmap(measure))(keys))


def interval(values: np.ndarray) -> tuple[float, float, float]:
    """Mean over seeds [n] and its 95 % interval."""
    values = values.astype(np.float64)
    low, high = bootstrap_interval(values, np.mean)
    return float(values.mean()), float(low), float(high)


def best(results: Results, rule: str, minibatches: int) -> int:
    """Which of RATES has the highest mean accuracy at the end."""
    return int(results[rule, minibatches]["accuracy"][:, :, -1].mean(1).argmax())


def compare(results: Results, minibatches: int, rule: str, other: str) -> PairedDifference:
    """Accuracy of `rule` minus that of `other` at the end, each at its best rate, by seed."""
    one, two = (
        results[name, minibatches]["accuracy"][best(results, name, minibatches), :, -1]
        for name in (rule, other)
    )
    result = paired_difference(one, two)
    assert result is not None
    return result


def spread(results: Results, rule: str) -> float:
    """The largest distance of a rule's accuracy from GRPO's, with one minibatch a rollout."""
    return float(np.abs(results[rule, 1]["accuracy"] - results[GRPO, 1]["accuracy"]).max())


def misses(results: Results, lengths: dict[int, dict[str, np.ndarray]]) -> list[str]:
    """What breaks the pass rule, one line each."""
    lines = []
    for rate in JUDGED:
        gspo, grpo = (
            interval(results[rule, 4]["clipped"][RATES.index(rate)].mean(1))
            for rule in (PAPER, GRPO)
        )
        if gspo[1] < max(FEWEST, TIMES * grpo[2]):
            lines.append(f"rate {rate}: GSPO clips {gspo}, GRPO {grpo}")
    for rule in RULES:
        if spread(results, rule) > SAME:
            lines.append(f"one minibatch: {rule} differs from GRPO by {spread(results, rule):.2g}")
    scaled = {slots: values["sd"].mean() * slots**0.5 for slots, values in lengths.items()}
    for slots, value in scaled.items():
        if abs(value / scaled[LENGTHS[0]] - 1) > LAW:
            lines.append(f"T = {slots}: sd * sqrt(T) is {value:.4f}, off by more than {LAW:.0%}")
    return lines


def table(results: Results, minibatches: int, metric: str) -> str:
    """One of README.md's tables: accuracy at the end, or the share of tokens clipped."""
    form = ".3f" if metric == "accuracy" else ".4f"
    head = " | ".join(f"rate {rate} [95 %]" for rate in RATES)
    lines = [f"| {metric}, {minibatches} minibatches | {head} |", "|---|" + "---|" * len(RATES)]
    for rule in RULES:
        values = results[rule, minibatches][metric]
        values = values[:, :, -1] if metric == "accuracy" else values.mean(2)
        cells = [interval(row) for row in values]
        text = [f"{mean:{form}} [{low:{form}}, {high:{form}}]" for mean, low, high in cells]
        lines.append(f"| {rule} | {' | '.join(text)} |")
    return "\n".join(lines)


def comparison_table(results: Results) -> str:
    """README.md's table of paired differences."""
    lines = [
        "| minibatches | accuracy of (rate), minus that of (rate) | [95 %] |",
        "|---:|---|---|",
    ]
    for minibatches, rule, other in COMPARISONS:
        paired = compare(results, minibatches, rule, other)
        one, two = (RATES[best(results, name, minibatches)] for name in (rule, other))
        lines.append(
            f"| {minibatches} | {rule} ({one}) − {other} ({two}) "
            f"| {paired.mean:+.3f} [{paired.low:+.3f}, {paired.high:+.3f}] |"
        )
    return "\n".join(lines)


def length_table(lengths: dict[int, dict[str, np.ndarray]]) -> str:
    """README.md's table by answer length."""
    names = [name for name, rule in RULES.items() if rule[0] == "gspo"] + ["scaled"]
    lines = [
        f"| T | sd of the ratio [95 %] | sd × √T | mean log ratio | {' | '.join(names)} |",
        "|---:|---|---:|---:|" + "---:|" * len(names),
    ]
    for slots, values in lengths.items():
        mean, low, high = interval(values["sd"])
        shares = " | ".join(f"{values[name].mean():.3f}" for name in names)
        lines.append(
            f"| {slots} | {mean:.4f} [{low:.4f}, {high:.4f}] | {mean * slots**0.5:.4f} "
            f"| {values['mean_log'].mean():.4f} | {shares} |"
        )
    return "\n".join(lines)


def write_csvs(results: Results, lengths: dict[int, dict[str, np.ndarray]]) -> None:
    """results.csv: a row a rule, minibatches and rate; lengths.csv: a row a length and metric."""
    with (HERE / "results.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        metrics = ("accuracy", "entropy", "clipped")
        columns = [f"{metric}{end}" for metric in metrics for end in ("", "_low", "_high")]
        writer.writerow(["rule", "minibatches", "rate", *columns])
        for (rule, minibatches), found in results.items():
            for i, rate in enumerate(RATES):
                row = [x for k in metrics[:2] for x in interval(found[k][i, :, -1])]
                row += interval(found["clipped"][i].mean(1))
                writer.writerow([rule, minibatches, rate, *(f"{x:.6f}" for x in row)])
    with (HERE / "lengths.csv").open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["slots", "metric", "mean", "low", "high"])
        for slots, values in lengths.items():
            for name, each in values.items():
                writer.writerow([slots, name, *(f"{x:.6f}" for x in interval(each))])


def read(name: str, **wanted: str) -> list[dict[str, str]]:
    """The rows of a CSV beside this file that have the wanted values."""
    with (HERE / name).open(newline="") as file:
        return [row for row in csv.DictReader(file) if wanted.items() <= row.items()]


def draw(path: Path) -> None:
    """From the CSVs: share clipped and accuracy by rate, deviation of GSPO's ratio by length."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(11.2, 4.2), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        for rule, colour in zip(RULES, COLOURS, strict=False):
            line = "--" if rule == FREE else "-"  # it lies on CISPO's
            for axis, minibatches, metric in ((left, "4", "clipped"), (middle, "16", "accuracy")):
                rows = read("results.csv", rule=rule, minibatches=minibatches)
                ends = (metric, f"{metric}_low", f"{metric}_high")
                mean, low, high = np.array([[float(row[end]) for end in ends] for row in rows]).T
                axis.plot(RATES, mean, line, marker="o", ms=4, color=colour, lw=1.6, label=rule)
                axis.fill_between(RATES, low, high, color=colour, alpha=0.16, lw=0)
        left.set_yscale("symlog", linthresh=1e-4)
        left.set_ylim(0, 1)
        left.set_title("share of tokens clipped, 4 minibatches", fontsize=9)
        middle.set_title("accuracy at the end, 16 minibatches", fontsize=9)
        for axis in (left, middle):
            axis.set(xscale="log", xlabel="learning rate")
            axis.set_xticks(RATES, map("{:g}".format, RATES))
        ends = ("mean", "low", "high")
        rows = read("lengths.csv", metric="sd")
        mean, low, high = np.array([[float(row[end]) for end in ends] for row in rows]).T
        error = (mean - low, high - mean)
        right.errorbar(LENGTHS, mean, error, fmt="o", color="black", ms=4, label="measured")
        law = mean[0] * np.sqrt(LENGTHS[0] / np.array(LENGTHS))
        right.plot(LENGTHS, law, color="#888888", lw=1.2, label="1 / √T through the first")
        right.set(xscale="log", yscale="log", xlabel="tokens in an answer")
        right.set_title("standard deviation of GSPO's ratio", fontsize=9)
        right.set_xticks(LENGTHS, map(str, LENGTHS))
        right.set_yticks((0.005, 0.01, 0.02, 0.04))
        right.legend(frameon=False, loc="lower left")
        for axis in (left, right):
            axis.yaxis.set_major_formatter("{x:g}")
        for axis in (left, middle, right):
            axis.xaxis.set_minor_locator(NullLocator())
            axis.yaxis.set_minor_locator(NullLocator())
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=6, frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    results: Results = {}
    for minibatches in MINIBATCHES:
        for family in FAMILIES:
            results |= simulate(family, minibatches)
        print(table(results, minibatches, "accuracy"), end="\n\n")
        print(table(results, minibatches, "clipped"), end="\n\n", flush=True)
    for rule in RULES:
        print(f"one minibatch: {rule} differs from GRPO by at most {spread(results, rule):.2g}")
    lengths = {slots: drift(slots) for slots in LENGTHS}
    print(f"\n{comparison_table(results)}\n\n{length_table(lengths)}\n")
    write_csvs(results, lengths)
    draw(HERE / "figure.svg")
    wrong = misses(results, lengths)
    print("\n".join(wrong) if wrong else "PASS: clip shares, one minibatch, and the law of length")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
