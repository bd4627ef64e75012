"""What a higher upper clip does for rare good tokens, and where it does the opposite.

    python experiments/clip_higher/run.py

Prints the tables of README.md, writes results.csv and figure.svg beside this file, and ends with
exit code 1 if the pass rule fails.
"""

import csv
import sys
from dataclasses import dataclass, replace
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
from grpo_jax.models import tabular, tabular_bandit
from grpo_jax.report import COLOURS, STYLE
from grpo_jax.stats import PairedDifference, bootstrap_interval, paired_difference
from grpo_jax.types import Algorithm, Params, Rollout

HERE = Path(__file__).parent
SEEDS, PROMPTS, GROUP_SIZE, STEPS, INNER = 128, 16, 16, 60, 16
RARE = 10  # rollouts over which the probability of the tokens clipped at the top is averaged
OFF = 1e9  # beyond the largest ratio, exp(20): no clip
CLIPS = {  # name -> (low, high)
    ".1": (0.2, 0.1),
    ".2": (0.2, 0.2),
    ".25": (0.2, 0.25),
    ".28": (0.2, 0.28),
    ".35": (0.2, 0.35),
    ".5": (0.2, 0.5),
    "no clip": (OFF, OFF),
}
REWARD, ENTROPY = "reward", "entropy"


@dataclass(frozen=True)
class Design:
    """A bandit, a start, and what is judged: `metric` after `at` rollouts."""

    value: np.ndarray  # the chance of a reward, by token
    share: float | None  # of token 0 at the start; None: normal logits of deviation 1.5
    lr: float  # of SGD on the sum over prompts
    metric: str
    at: int
    inner: int = INNER


def arms(dominant: float, rare: float, bad: float) -> np.ndarray:
    """One dominant token, five rare ones, and ten that are rare and (as named) bad."""
    return np.array([dominant] + [rare] * 5 + [bad] * 10, np.float32)


DESIGNS = {
    "rare better tokens": Design(arms(0.5, 0.8, 0.2), 0.9, 2.0, REWARD, 30),
    "rare equal tokens": Design(arms(0.8, 0.8, 0.2), 0.6, 2.0, ENTROPY, 60),
    "diffuse start": Design(np.repeat(np.float32([1, 0]), [8, 24]), None, 0.5, ENTROPY, 20),
    "noise for reward": Design(arms(0.5, 0.5, 0.5), 0.6, 2.0, ENTROPY, 60),
    "one update a rollout": Design(arms(0.5, 0.8, 0.2), 0.9, 2.0, REWARD, 30, inner=1),
}
CLAIM, EQUAL, DIFFUSE, NOISE, ONCE = DESIGNS
BASE = ".2"
# (design, higher clip, lower clip, sign of higher minus lower): what the intervals have to exclude
RULE = (
    (CLAIM, ".28", ".2", +1),
    (CLAIM, ".5", ".28", +1),
    (DIFFUSE, ".28", ".2", -1),
    (DIFFUSE, ".5", ".2", -1),
    (NOISE, ".28", ".2", -1),
    (NOISE, ".5", ".2", -1),
)
DRAWN = (".2", ".28", ".5", "no clip")
Curves = dict[str, np.ndarray]  # metric -> f32[clips, seeds, steps]; reward, entropy: 1 + steps


def clipped_at(algorithm: Algorithm, low: jax.Array, high: jax.Array) -> Algorithm:
    """The same algorithm with other constants in its clip, which may be traced."""
    return replace(algorithm, clip=partial(algorithm.clip, low=low, high=high))


def train(algorithm: Algorithm, design: Design, key: jax.Array) -> dict[str, jax.Array]:
    """One training; the policy's exact numbers before it and after each step."""
    for_start, for_tokens, for_rewards = jax.random.split(key, 3)
    value, rows = jnp.asarray(design.value), jnp.repeat(jnp.arange(PROMPTS), GROUP_SIZE)
    if design.share is None:
        first = tabular_bandit.diffuse(PROMPTS, len(value), 1.5, for_start)
    else:
        first = tabular_bandit.peaked(PROMPTS, len(value), design.share)
    optimizer = optax.sgd(design.lr * PROMPTS)  # the loss is a mean over prompts

    def metrics(params: Params) -> dict[str, jax.Array]:
        entropy = tabular.entropy(params, jnp.arange(PROMPTS)).mean()
        return {REWARD: tabular_bandit.expected_reward(params, value), ENTROPY: entropy}

    def step(params, number):
        rollout = tabular.sample(params, rows, for_tokens, number)
        reward = tabular_bandit.pull(value, rollout.completion, for_rewards, number)
        loss = make_loss(algorithm, rollout, reward, rows)

        def update(state, _):
            grad = jax.grad(lambda params: loss(params)[0])(state[0])
            change, opt_state = optimizer.update(grad, state[1])
            return (optax.apply_updates(state[0], change), opt_state), None

        (params, _), _ = lax.scan(update, (params, optimizer.init(params)), length=design.inner)
        return params, metrics(params) | loss(params)[1]

    _, curves = lax.scan(step, first, jnp.arange(STEPS))
    start = metrics(first)
    return {k: jnp.append(start[k], v) if k in start else v for k, v in curves.items()}


def make_loss(algorithm: Algorithm, rollout: Rollout, reward: jax.Array, rows: jax.Array):
    """params -> (production loss, what its clip holds back at the top: the share of tokens, and the
    sum of their probabilities at rollout); reward [N*G], rows are the prompts' numbers."""
    tokens, mask = rollout.completion, rollout.mask
    table = reward.reshape(PROMPTS, GROUP_SIZE)
    length = mask.sum(1).reshape(table.shape)
    value = advantage(algorithm.baseline, algorithm.scale, table, length).reshape(-1)
    weight = algorithm.aggregation(mask, rows)

    def loss(params: Params):
        logp = tabular.logps(params, rows, tokens)
        total, sums = policy_loss(
            algorithm,
            logp,
            old_logp=rollout.sampler_logp,
            sampler_logp=rollout.sampler_logp,
            ref_logp=None,
            advantage=value,
            mask=mask,
            weight=weight,
        )
        log_ratio = algorithm.ratio(logp, rollout.sampler_logp, mask)
        _, clipped = algorithm.clip(log_ratio, value[:, None], logp, mask)
        top = clipped & (value[:, None] > 0)
        probability = jnp.where(top, jnp.exp(rollout.sampler_logp), 0).sum()
        return total, {"top": sums["clip_high"] / sums["tokens"], "top_probability": probability}

    return loss


def simulate(name: str, seeds: int = SEEDS) -> Curves:
    """All clips and seeds of one design, one compiled program; seed i is `key(i)`."""
    algorithm = load_algorithm("grpo", "kl=none", "clip=higher")

    def training(low, high, key):
        return train(clipped_at(algorithm, low, high), DESIGNS[name], key)

    keys = jax.vmap(jax.random.key)(jnp.arange(seeds))
    grid = jax.vmap(jax.vmap(training, (None, None, 0)), (0, 0, None))
    return jax.tree.map(np.asarray, jax.jit(grid)(*jnp.array(list(CLIPS.values())).T, keys))


def judged(name: str, curves: Curves, clip: str) -> np.ndarray:
    """The design's metric under one clip when it is judged: float64 [seeds]."""
    design = DESIGNS[name]
    return curves[design.metric][list(CLIPS).index(clip), :, design.at].astype(np.float64)


def difference(name: str, curves: Curves, clip: str, base: str) -> PairedDifference:
    """Of what is judged, over the same seeds."""
    result = paired_difference(judged(name, curves, clip), judged(name, curves, base))
    assert result is not None
    return result


def summarise(name: str, curves: Curves) -> list[dict[str, float | str]]:
    """A row a clip: means over seeds and their 95 % intervals."""
    rows = []
    for i, clip in enumerate(CLIPS):
        at, row = DESIGNS[name].at, {"design": name, "clip": clip}
        top, probability = (curves[k][i, :, :RARE].sum(1) for k in ("top", "top_probability"))
        columns = {
            "reward": curves[REWARD][i, :, at],
            "entropy": curves[ENTROPY][i, :, at],
            "top": curves["top"][i].mean(1),
            "top_probability": probability / np.maximum(top * PROMPTS * GROUP_SIZE, 1),
        }
        for metric, values in columns.items():
            values = values.astype(np.float64)
            low, high = bootstrap_interval(values, np.mean)
            row |= {metric: values.mean(), f"{metric}_low": low, f"{metric}_high": high}
        paired = difference(name, curves, clip, BASE)
        row |= {"minus_base": paired.mean, "minus_base_low": paired.low}
        rows.append(row | {"minus_base_high": paired.high})
    return rows


def misses(results: dict[str, Curves]) -> list[str]:
    """What breaks the pass rule, one line each; keys are names of designs."""
    lines = []
    for name, higher, lower, sign in RULE:
        paired = difference(name, results[name], higher, lower)
        if (paired.low if sign > 0 else -paired.high) <= 0:
            lines.append(
                f"{name}: {higher} minus {lower} is [{paired.low:+.4f}, {paired.high:+.4f}], "
                f"not all {'above' if sign > 0 else 'below'} 0"
            )
    for metric in (REWARD, ENTROPY):
        curves = results[ONCE][metric]
        if (curves != curves[:1]).any():
            lines.append(f"{ONCE}: the curves of the {metric} are not the same under all clips")
    return lines


def table(name: str, rows: list[dict]) -> str:
    """One of README.md's tables."""
    design = DESIGNS[name]
    lines = [
        f"| {name} | reward after {design.at} [95 %] | entropy after {design.at} [95 %] "
        f"| {design.metric}, minus that of {BASE} [95 %] | held back at the top "
        "| their probability |",
        "|---|---|---|---|---:|---|",
    ]
    for row in rows:
        cells = [
            f"{row[key]:{form}} [{row[key + '_low']:{form}}, {row[key + '_high']:{form}}]"
            for key, form in (("reward", ".3f"), ("entropy", ".3f"), ("minus_base", "+.3f"))
        ]
        rare = f"{row['top_probability']:.3f}" if row["top"] else "-"
        if row["clip"] == BASE:
            cells[2] = "-"
        lines.append(f"| {row['clip']} | {' | '.join(cells)} | {row['top']:.1%} | {rare} |")
    return "\n".join(lines)


def write_csv(path: Path, rows: list[dict]) -> None:
    """One row for each design and clip."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(rows[0])
        for row in rows:
            writer.writerow([x if isinstance(x, str) else f"{x:.5f}" for x in row.values()])


def draw(path: Path, results: dict[str, Curves]) -> None:
    """A panel for each design with many updates: what is judged, by rollouts."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 6.0), layout="constrained")
        panels = figure.subplots(2, 2, sharex=True).flat
        names = [name for name in DESIGNS if name != ONCE]
        for axis, name in zip(panels, names, strict=True):
            design = DESIGNS[name]
            for clip, colour in zip(DRAWN, COLOURS, strict=False):
                curves = results[name][design.metric][list(CLIPS).index(clip)].astype(np.float64)
                low, high = bootstrap_interval(curves, np.mean)
                steps = np.arange(curves.shape[1])
                axis.plot(steps, curves.mean(0), color=colour, lw=1.6, label=clip)
                axis.fill_between(steps, low, high, color=colour, alpha=0.16, lw=0)
            axis.axvline(design.at, color="#888888", lw=0.9, ls=":")
            axis.set_title(name, fontsize=10)
            unit = " (nats)" if design.metric == ENTROPY else ""
            axis.set_ylabel(f"{'expected ' if not unit else ''}{design.metric}{unit}")
            axis.margins(x=0.02)
        for axis in figure.axes[2:]:
            axis.set_xlabel("rollout")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        title = "upper clip (lower: .2)"
        figure.legend(
            handles, labels, loc="outside lower center", ncols=4, frameon=False, title=title
        )
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    results, rows = {}, []
    for name in DESIGNS:
        results[name] = simulate(name)
        rows += summarise(name, results[name])
        print(table(name, rows[-len(CLIPS) :]), end="\n\n", flush=True)
    for name, higher, lower, _ in RULE:
        paired = difference(name, results[name], higher, lower)
        interval = f"[{paired.low:+.4f}, {paired.high:+.4f}]"
        print(f"{name}: {higher} minus {lower}: {paired.mean:+.4f} {interval}")
    write_csv(HERE / "results.csv", rows)
    draw(HERE / "figure.svg", results)
    wrong = misses(results)
    print("\n".join(wrong) if wrong else "PASS: it helps, reverses, and does nothing, as it should")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
