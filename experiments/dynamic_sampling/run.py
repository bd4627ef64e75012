"""Dynamic sampling, in updates and in rollouts, through the production filter, advantages and loss.

    python experiments/dynamic_sampling/run.py

Prints the tables of README.md, writes results.csv and figure.svg beside this file, and ends with
exit code 1 if the pass rule fails.
"""

import csv
import sys
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int
from matplotlib.figure import Figure

from grpo_jax.config import load_algorithm
from grpo_jax.kernels.advantage import advantage
from grpo_jax.loss import policy_loss
from grpo_jax.models import tabular
from grpo_jax.report import COLOURS, STYLE
from grpo_jax.stats import bootstrap_interval
from grpo_jax.types import Algorithm, Filter, Params

HERE = Path(__file__).parent
SEEDS, PROMPTS, VOCAB, GROUP_SIZE, BATCH = 16, 256, 64, 8, 16  # BATCH groups an update
EASY, HARD = 8.0, -1.0  # logits of the right token lie between, uniformly; all others are 0
LR = 16.0  # of SGD on a mean over BATCH groups: rate 1 for each group
RIGHT = 0  # the right token, of every prompt
TARGETS = (0.75, 0.80, 0.85)  # mean over prompts of P(right); about 0.43 at the start
MIXED = ("filter=mixed", f"filter.max_rounds={PROMPTS // BATCH}")  # once through all prompts
FILTERS = {
    "none": (),
    "mixed": MIXED,
    "mixed, surplus kept": (*MIXED, "filter.surplus=keep"),
}
SCALES = {  # name -> (algorithm, updates)
    "group_std": (("grpo", "kl=none"), 600),
    "none": (("dr_grpo", "aggregation.length=1"), 1200),
}
Curves = dict[str, np.ndarray]  # metric -> [seeds, updates]


class Groups(NamedTuple):
    """Sampled groups, M of them."""

    prompt: Int[Array, "M"]
    token: Int[Array, "M G"]
    sampler_logp: Float[Array, "M G"]
    keep: Bool[Array, "M"]

    def take(self, index: Int[Array, "K"]) -> "Groups":
        return Groups(*(leaf[index] for leaf in self))


def train(algorithm: Algorithm, key: jax.Array, *, updates: int) -> dict[str, jax.Array]:
    """One training with one update on each batch; metrics after each update."""
    start, order, noise = jax.random.split(key, 3)
    right = jax.random.uniform(start, (PROMPTS,), minval=HARD, maxval=EASY)
    params = {"logits": jnp.zeros((PROMPTS, VOCAB)).at[:, RIGHT].set(right)}
    none = jnp.zeros(BATCH, int)
    logp = jnp.zeros((BATCH, GROUP_SIZE))
    nothing = Groups(none, jnp.zeros((BATCH, GROUP_SIZE), int), logp, jnp.zeros(BATCH, bool))

    def step(state, number):
        params, waiting, position, rollouts, counted = state
        drawn = draw(algorithm.filter, params, order, position, noise, number)
        pool = Groups(*(jnp.concatenate(pair) for pair in zip(waiting, drawn, strict=True)))
        places, found, rounds, needed = choose(pool.keep, BATCH)
        pool = pool._replace(keep=found)
        batch, waiting = pool.take(places[:BATCH]), pool.take(places[BATCH : 2 * BATCH])
        if algorithm.filter.surplus != "keep":
            waiting = waiting._replace(keep=jnp.zeros_like(waiting.keep))
        params = update(algorithm, params, batch, fresh=places[:BATCH] >= BATCH)
        p = jax.nn.softmax(params["logits"])[:, RIGHT]
        rollouts += rounds * BATCH * GROUP_SIZE
        counted += needed * GROUP_SIZE
        metrics = {
            "p_right": p.mean(),
            "rollouts": rollouts,
            "counted": counted,
            "useful": (1 - p**GROUP_SIZE - (1 - p) ** GROUP_SIZE).mean(),
            "filled": batch.keep.mean(),
        }
        return (params, waiting, position + rounds, rollouts, counted), metrics

    zero = jnp.int32(0)
    return lax.scan(step, (params, nothing, zero, zero, zero), jnp.arange(updates))[1]


def draw(
    rule: Filter,
    params: Params,
    order: jax.Array,
    position: Int[Array, ""],
    noise: jax.Array,
    number: Int[Array, ""],
) -> Groups:
    """As many rounds as there could be, filtered. Those that the step needs not don't count.

    The prompts come in a new order each time through all of them; `position` counts the rounds
    since the start.
    """
    per_pass = PROMPTS // BATCH
    passes = position // per_pass + jnp.arange(2)
    shuffled = jax.vmap(lambda i: jax.random.permutation(jax.random.fold_in(order, i), PROMPTS))
    begin = position % per_pass * BATCH
    prompts = lax.dynamic_slice_in_dim(shuffled(passes).reshape(-1), begin, rule.max_rounds * BATCH)
    rollout = tabular.sample(params, jnp.repeat(prompts, GROUP_SIZE), noise, number)
    token = rollout.completion.reshape(-1, GROUP_SIZE)
    keep = rule.rule((token == RIGHT).astype(jnp.float32))
    return Groups(prompts, token, rollout.sampler_logp.reshape(-1, GROUP_SIZE), keep)


def choose(
    keep: Bool[Array, "M"], count: int
) -> tuple[Int[Array, "M"], Bool[Array, "M"], Int[Array, ""], Int[Array, ""]]:
    """`grpo_jax.rollout`'s choice of groups as a function of fixed shape.

    Args:
      keep: first `count` places for groups that wait from the last step (False: an empty place;
        never all are taken), then the rounds of `count` groups each, in the order of sampling.

    Returns:
      All places in the order in which the batch takes them, its `count` groups first, then what is
      left over; which of the M places hold a kept group that was drawn; the rounds drawn; and how
      many groups had been drawn when the last one of the batch was found.
    """
    kept = jnp.cumsum(keep.reshape(-1, count).sum(1))[1:]  # after each round
    rounds = jnp.minimum((kept < count).sum() + 1, len(kept))
    number = jnp.arange(len(keep)) // count  # 0: waiting
    found = keep & (number <= rounds)
    before = jnp.cumsum(found) - found
    needed = ((before < count) & (1 <= number) & (number <= rounds)).sum()
    return jnp.argsort(~found, stable=True), found, rounds, needed


def update(
    algorithm: Algorithm, params: Params, batch: Groups, *, fresh: Bool[Array, "N"]
) -> Params:
    """One SGD step on the production loss; groups that the filter dropped are masked."""
    rows = jnp.repeat(batch.prompt, GROUP_SIZE)
    tokens = batch.token.reshape(-1, 1)
    reward = jnp.where(batch.keep[:, None], batch.token == RIGHT, jnp.nan)
    value = advantage(
        algorithm.baseline, algorithm.scale, reward, jnp.ones_like(batch.token)
    ).reshape(-1)
    mask = jnp.repeat(batch.keep, GROUP_SIZE)[:, None]
    weight = algorithm.aggregation(mask, jnp.repeat(jnp.arange(BATCH), GROUP_SIZE))
    sampler_logp = batch.sampler_logp.reshape(-1, 1)
    now = tabular.logps(params, rows, tokens)

    def loss(params):
        return policy_loss(
            algorithm,
            tabular.logps(params, rows, tokens),
            old_logp=jnp.where(jnp.repeat(fresh, GROUP_SIZE)[:, None], now, sampler_logp),
            sampler_logp=sampler_logp,
            ref_logp=None,
            advantage=value,
            mask=mask,
            weight=weight,
        )[0]

    return jax.tree.map(lambda p, g: p - LR * g, params, jax.grad(loss)(params))


def simulate(scale: str, filter: str, seeds: int = SEEDS) -> Curves:
    """All seeds of one arm, one compiled program; seed i is `key(i)`, the same in every arm."""
    preset, updates = SCALES[scale]
    training = partial(train, load_algorithm(*preset, *FILTERS[filter]), updates=updates)
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(training))(keys))


def cost(curves: Curves, target: float, metric: str) -> np.ndarray:
    """`updates`, `rollouts` or `counted` until P(right) first reaches the target, by seed; NaN
    where it never does."""
    reached = curves["p_right"] >= target
    first = reached.argmax(1)
    value = first + 1 if metric == "updates" else curves[metric][np.arange(len(first)), first]
    return np.where(reached.any(1), value, np.nan)


def interval(values: np.ndarray, digits: int) -> str:
    low, high = bootstrap_interval(values, np.mean)
    return f"{values.mean():.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def misses(arms: dict[str, Curves]) -> list[str]:
    """What breaks the pass rule, one line each; arms by filter, divided by the deviation."""
    lines = []
    for target in TARGETS:
        ratio = {
            metric: cost(arms["mixed"], target, metric) / cost(arms["none"], target, cost_of_none)
            for metric, cost_of_none in (
                ("updates", "updates"),
                ("rollouts", "rollouts"),
                ("counted", "rollouts"),
            )
        }
        bounds = {name: bootstrap_interval(values, np.mean) for name, values in ratio.items()}
        for name, low, high in (
            ("updates", 0.0, 0.5),
            ("rollouts", 0.9, np.inf),
            ("counted", 0.9, 1.1),
        ):
            a, b = bounds[name]
            if not (low <= a and b <= high):
                lines.append(f"{target}: {name}, mixed / none: [{a:.3f}, {b:.3f}]")
    return lines


def table(arms: dict[str, Curves]) -> str:
    """One of README.md's tables; an arm that not all seeds bring to the target has no mean."""
    lines = [
        "| P(right) | filter | updates [95 %] | rollouts [95 %] | updates, none / this [95 %] "
        "| rollouts, this / none [95 %] | to the 16th kept group |",
        "|---:|---|---|---|---|---|---|",
    ]
    for target in TARGETS:
        none = {m: cost(arms["none"], target, m) for m in ("updates", "rollouts")}
        for name, curves in arms.items():
            cells = [cost(curves, target, m) for m in ("updates", "rollouts", "counted")]
            reached = np.isfinite(cells[0]).sum()
            if reached < SEEDS:
                row = [f"{reached} of {SEEDS} seeds get there", "", "", "", ""]
            else:
                row = [interval(cells[0], 1), interval(cells[1], 0)]
                compare = name != "none" and np.isfinite(none["updates"]).all()
                row += [interval(none["updates"] / cells[0], 2) if compare else ""]
                row += [interval(cells[1] / none["rollouts"], 3) if compare else ""]
                # a group that waited has been counted when it was drawn
                dropped = compare and name == "mixed"
                row += [interval(cells[2] / none["rollouts"], 3) if dropped else ""]
            lines.append(f"| {target:.2f} | {name} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def write_csv(path: Path, results: dict[str, dict[str, Curves]]) -> None:
    """One row for each scale, filter and 10th update."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = ["rollouts", "counted", "useful", "filled"]
        writer.writerow(["scale", "filter", "updates", "p_right", "p_low", "p_high", *names])
        for scale, arms in results.items():
            for name, curves in arms.items():
                low, high = bootstrap_interval(curves["p_right"].astype(np.float64), np.mean)
                means = {metric: curve.mean(0) for metric, curve in curves.items()}
                for i in range(9, len(low), 10):
                    row = [f"{x[i]:.4f}" for x in (means["p_right"], low, high)]
                    row += [f"{means[metric][i]:.6g}" for metric in names]
                    writer.writerow([scale, name, i + 1, *row])


def draw_figure(path: Path, arms: dict[str, Curves]) -> None:
    """The same curves against updates and against rollouts."""
    end = int(arms["none"]["rollouts"][:, -1].mean())
    grid = np.linspace(arms["none"]["rollouts"][:, 0].mean(), end, 300)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 3.8), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        for (name, curves), colour, line in zip(
            arms.items(), COLOURS, ("-", "--", ":"), strict=False
        ):
            by_update = curves["p_right"].astype(np.float64)
            seeds = zip(curves["rollouts"], by_update, strict=True)
            by_rollout = np.array([np.interp(grid, x, y) for x, y in seeds])
            for axis, x, y in (
                (left, 1 + np.arange(by_update.shape[1]), by_update),
                (right, grid, by_rollout),
            ):
                x, y = x[::3], y[:, ::3]
                low, high = bootstrap_interval(y, np.mean)
                axis.plot(x, y.mean(0), line, color=colour, lw=1.8, label=f"filter={name}")
                axis.fill_between(x, low, high, color=colour, alpha=0.16, lw=0)
        for axis in (left, right):
            for target in TARGETS:
                axis.axhline(target, color="#888888", lw=0.9, ls=":")
            axis.margins(x=0.02)
        left.set(xlabel="updates", ylabel="P(right), mean over prompts")
        right.set(xlabel="rollouts generated")
        left.legend(loc="lower right", frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    results = {}
    for scale in SCALES:
        results[scale] = {name: simulate(scale, name) for name in FILTERS}
        print(f"scale={scale}\n{table(results[scale])}")
        for name, curves in results[scale].items():
            useful = [f"{curves['useful'][:, i].mean():.3f}" for i in (0, 99, 299, 599)]
            total = curves["rollouts"][:, 599].mean()
            print(f"{name}: useful after 1, 100, 300, 600 updates {', '.join(useful)};", end=" ")
            print(
                f"{total:.0f} rollouts; share of the batches filled {curves['filled'].mean():.3f}"
            )
        print(flush=True)
    write_csv(HERE / "results.csv", results)
    draw_figure(HERE / "figure.svg", results["group_std"])
    wrong = misses(results["group_std"])
    print("\n".join(wrong) if wrong else "PASS: at most half the updates, and no fewer rollouts")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
