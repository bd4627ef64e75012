"""How long right and wrong answers become, by aggregation and scale, through the production loss.

    python experiments/length_drift/run.py

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
import optax
from jax import lax
from matplotlib.figure import Figure

from grpo_jax.config import load_algorithm
from grpo_jax.kernels.advantage import advantage
from grpo_jax.loss import policy_loss
from grpo_jax.models import tabular_length
from grpo_jax.report import COLOURS, STYLE
from grpo_jax.stats import bootstrap_interval
from grpo_jax.types import Algorithm, Params

HERE = Path(__file__).parent
SEEDS, PROMPTS, GROUP_SIZE = 32, 32, 8
MANY = 256  # seeds for a closer look at the rule that should not drift
RIGHT, MEAN_LENGTH, LONGEST = 0.3, 10.0, 64  # P(right), tokens after the first one, their limit
CONSTANT = f"aggregation.length={MEAN_LENGTH + 1:.0f}"  # what an answer has on average at the start
RULES = {  # as in `load_algorithm(*RULES[name])`
    "sequence_mean + std (GRPO)": ("grpo", "kl=none"),
    "sequence_mean": ("grpo", "kl=none", "scale=none"),
    "prompt_mean + std (DAPO, eq. 8)": ("grpo", "kl=none", "aggregation=prompt_mean"),
    "token_mean + std": ("grpo", "kl=none", "aggregation=token_mean"),
    "constant (Dr. GRPO)": ("dr_grpo", CONSTANT),
    "constant + std": ("dr_grpo", "scale=group_std", CONSTANT),
}
BIASED = ("sequence_mean", "prompt_mean")
UNBIASED = ("constant (Dr. GRPO)", "constant + std")
GROWS, STAYS = 5.0, 1.0  # tokens: the least drift of the former, the largest of the latter
SGD, ADAM = optax.sgd(1.0), optax.adam(0.01, b1=0.9, b2=0.99)
SETTINGS = {  # name -> (optimizer, steps, branch learnable, columns of the table of hazards)
    "SGD, branch frozen": (SGD, 400, False, 1),
    "Adam, branch frozen": (ADAM, 300, False, 1),
    "SGD, branch learnable": (SGD, 400, True, 1),
    "Adam, branch learnable": (ADAM, 300, True, 1),
    "SGD, a hazard a slot": (SGD, 400, False, LONGEST),
}
CLOSER = ("SGD, branch frozen", "Adam, branch frozen")
JUDGED = ("SGD, branch frozen", "Adam, branch frozen", "SGD, branch learnable")
Curves = dict[str, np.ndarray]  # "wrong", "right" (tokens), "p_right" -> f32[seeds, 1 + steps]


def train(
    algorithm: Algorithm,
    key: jax.Array,
    *,
    optimizer: optax.GradientTransformation,
    steps: int,
    learnable: bool,
    columns: int,
) -> dict[str, jax.Array]:
    """One training, one update a rollout; exact expected lengths before it and after each step."""
    first = tabular_length.init(right=RIGHT, mean_length=MEAN_LENGTH, columns=columns)
    if not learnable:
        held = {"branch": True, "stop": False}
        optimizer = optax.chain(optimizer, optax.masked(optax.set_to_zero(), held))

    def metrics(params: Params) -> dict[str, jax.Array]:
        wrong, right = tabular_length.expected_length(params, LONGEST)
        return {"wrong": wrong, "right": right, "p_right": jax.nn.sigmoid(params["branch"])}

    def step(state, number):
        params, opt_state = state
        grad = gradient(algorithm, params, key, number)
        change, opt_state = optimizer.update(grad, opt_state, params)
        params = optax.apply_updates(params, change)
        return (params, opt_state), metrics(params)

    _, curves = lax.scan(step, (first, optimizer.init(first)), jnp.arange(steps))
    start = metrics(first)
    return {name: jnp.append(start[name], curve) for name, curve in curves.items()}


def gradient(algorithm: Algorithm, params: Params, key: jax.Array, number: jax.Array) -> Params:
    """Of the production loss on one fresh rollout; the reward of a right first token is 1."""
    group = jnp.repeat(jnp.arange(PROMPTS), GROUP_SIZE)
    rollout = tabular_length.sample(params, group, key, number, longest=LONGEST)
    tokens, mask = rollout.completion, rollout.mask
    reward = (tokens[:, 0] == tabular_length.RIGHT).astype(jnp.float32)
    reward, length = (x.reshape(PROMPTS, GROUP_SIZE) for x in (reward, mask.sum(1)))
    value = advantage(algorithm.baseline, algorithm.scale, reward, length)
    weight = algorithm.aggregation(mask, group)

    def loss(params):
        return policy_loss(
            algorithm,
            tabular_length.logps(params, tokens),
            old_logp=rollout.sampler_logp,
            sampler_logp=rollout.sampler_logp,
            ref_logp=None,
            advantage=value.reshape(-1),
            mask=mask,
            weight=weight,
        )[0]

    return jax.grad(loss)(params)


def simulate(rule: str, setting: str, seeds: int = SEEDS) -> Curves:
    """All seeds of one rule in one setting, one compiled program; seed i is `key(i)`."""
    optimizer, steps, learnable, columns = SETTINGS[setting]
    training = partial(
        train,
        load_algorithm(*RULES[rule]),
        optimizer=optimizer,
        steps=steps,
        learnable=learnable,
        columns=columns,
    )
    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    return jax.tree.map(np.asarray, jax.jit(jax.vmap(training))(keys))


def summarise(curves: Curves) -> Curves:
    """By step: means over seeds with their 95 % intervals; float64 [1 + steps]."""
    columns = {}
    for name, curve in curves.items():
        values = curve.astype(np.float64)
        low, high = bootstrap_interval(values, np.mean)
        columns |= {name: values.mean(0), f"{name}_low": low, f"{name}_high": high}
    return columns


def misses(summaries: dict[tuple[str, str], Curves]) -> list[str]:
    """What breaks the pass rule, one line each; keys are (setting, rule)."""
    lines = []
    for setting in JUDGED:
        for rule in RULES:
            columns = summaries[setting, rule]
            start = columns["wrong"][0]
            low, high = columns["wrong_low"][-1] - start, columns["wrong_high"][-1] - start
            what = f"{setting}, {rule}: drift of wrong answers [{low:+.2f}, {high:+.2f}]"
            if rule.startswith(BIASED) and low < GROWS:
                lines.append(f"{what} is not above {GROWS}")
            if rule.startswith(UNBIASED) and max(-low, high) > STAYS:
                lines.append(f"{what} is not within {STAYS} of 0")
    return lines


def table(setting: str, summaries: dict[tuple[str, str], Curves]) -> str:
    """One of README.md's tables; keys are (setting, rule)."""
    lines = [
        f"| {setting} | wrong at 1/4 | wrong at the end [95 %] | right at the end [95 %] "
        "| P(right) at the end |",
        "|---|---:|---|---|---:|",
    ]
    for rule in [rule for name, rule in summaries if name == setting]:
        columns = summaries[setting, rule]
        ends = [
            f"{columns[name][-1]:.2f} [{columns[f'{name}_low'][-1]:.2f}, "
            f"{columns[f'{name}_high'][-1]:.2f}]"
            for name in ("wrong", "right")
        ]
        quarter = columns["wrong"][len(columns["wrong"]) // 4]
        lines.append(
            f"| {rule} | {quarter:.2f} | {ends[0]} | {ends[1]} | {columns['p_right'][-1]:.3f} |"
        )
    return "\n".join(lines)


def write_csv(path: Path, summaries: dict[tuple[str, str], Curves]) -> None:
    """One row for each setting, rule and 20th step."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        names = list(next(iter(summaries.values())))
        writer.writerow(["setting", "rule", "step", *names])
        for (setting, rule), columns in summaries.items():
            for step in range(0, len(columns["wrong"]), 20):
                row = [f"{columns[name][step]:.4f}" for name in names]
                writer.writerow([setting, rule, step, *row])


def draw(path: Path, summaries: dict[tuple[str, str], Curves]) -> None:
    """A panel for each judged setting: wrong answers above 10, right ones below."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(9.6, 4.4), layout="constrained")
        axes = figure.subplots(1, len(JUDGED), sharey=True)
        for axis, setting in zip(axes, JUDGED, strict=True):
            for rule, colour in zip(RULES, COLOURS, strict=False):
                columns = summaries[setting, rule]
                steps = np.arange(0, len(columns["wrong"]), 5)
                for name, line in (("wrong", "-"), ("right", "--")):
                    mean, low, high = (columns[name + end][steps] for end in ("", "_low", "_high"))
                    label = rule if name == "wrong" else None
                    axis.plot(steps, mean, line, color=colour, lw=1.6, label=label)
                    axis.fill_between(steps, low, high, color=colour, alpha=0.16, lw=0)
            axis.set_title(setting, fontsize=10)
            axis.set(xlabel="update", yscale="log", yticks=(1, 2, 5, 10, 20, 50))
            axis.set_yticks([], minor=True)
            axis.set_yticklabels(["1", "2", "5", "10", "20", "50"])
            axis.margins(x=0.02)
        axes[0].set_ylabel("mean length of wrong (solid) and\nright (dashed) answers, tokens")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    summaries = {}
    for setting in SETTINGS:
        for rule in RULES:
            summaries[setting, rule] = summarise(simulate(rule, setting))
        if setting in CLOSER:
            many = summarise(simulate(UNBIASED[0], setting, MANY))
            summaries[setting, f"{UNBIASED[0]}, {MANY} seeds"] = many
        print(table(setting, summaries), end="\n\n", flush=True)
    write_csv(HERE / "results.csv", summaries)
    draw(HERE / "figure.svg", summaries)
    wrong = misses(summaries)
    print("\n".join(wrong) if wrong else "PASS: wrong answers grow, or don't, as they should")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
