"""KL estimators: value, spread and gradient, through the production kernels and loss.

    python experiments/kl_estimators/run.py

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
from jax import lax
from matplotlib.figure import Figure

from grpo_jax.config import load_algorithm
from grpo_jax.kernels.advantage import advantage
from grpo_jax.loss import policy_loss
from grpo_jax.models import tabular
from grpo_jax.report import COLOURS, STYLE
from grpo_jax.stats import bootstrap_interval
from grpo_jax.types import Algorithm

HERE = Path(__file__).parent
MEANS = (0.1, 1.0)  # of the reference N(mean, 1) of the policy N(0, 1)
SEEDS, SAMPLES = 100, 100_000  # 1e7 in all
VOCAB, DRAWS = 16, 200  # pairs of policy and reference
DRIFTS = (0.1, 0.5, 1.0, 2.0)  # deviation of the policy's logits from the reference's
MOVED = 0.5  # deviation of the policy's logits from the older policy's that sampled
ESTIMATORS = ("k1", "k2", "k3")
PENALTIES = {  # name -> overrides
    "k1 in the loss": ("kl=k1", "kl.where=loss"),
    "k1 in the reward": ("kl=k1", "kl.where=reward"),
    "k2 in the loss": ("kl=k2",),
    "k3 in the loss (GRPO)": ("kl=k3",),
    "k3_weighted in the loss": ("kl=k3_weighted",),
    "k3_plus in the loss": ("kl=k3_plus",),
}
EXACT = tuple(name for name in PENALTIES if name not in ("k1 in the loss", "k3 in the loss (GRPO)"))
FORWARD, ALWAYS = "k3 in the loss (GRPO)", "k3_weighted in the loss"
TOLERANCE = 1e-6
# bias and deviation over the KL, as printed at http://joschu.net/blog/kl-approx.html
PRINTED = {
    (0.1, "k1"): (0, 20),
    (0.1, "k2"): (0.002, 1.42),
    (0.1, "k3"): (0, 1.42),
    (1.0, "k1"): (0, 2),
    (1.0, "k2"): (0.25, 1.73),
    (1.0, "k3"): (0, 1.7),
}
Errors = dict[str, np.ndarray]


def penalised(penalty: str) -> Algorithm:
    """GRPO's loss with this KL of coefficient 1 and nothing else: no baseline, scale or clip."""
    plain = ("baseline=none", "scale=none", "clip=importance", "kl.coef=1.0")
    return load_algorithm("grpo", *PENALTIES[penalty], *plain)


def gaussian(mean: float) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(mean, deviation) [SEEDS] of each estimator over the true KL, from SAMPLES draws a seed."""
    true = mean**2 / 2

    def estimate(key):
        x = jax.random.normal(key, (SAMPLES, 1))
        logp, ref_logp = -(x**2) / 2, -((x - mean) ** 2) / 2
        values = {name: load_kl(name)(logp, ref_logp) / true for name in ESTIMATORS}
        return {name: (value.mean(), value.std()) for name, value in values.items()}

    keys = jax.vmap(jax.random.key)(jnp.arange(SEEDS))
    return jax.tree.map(np.asarray, jax.jit(partial(lax.map, estimate, batch_size=10))(keys))


def load_kl(name: str):
    return load_algorithm("grpo", f"kl={name}").kl.estimator


def kl(logits: jax.Array, other: jax.Array) -> jax.Array:
    """KL(softmax(logits) || softmax(other)), in full."""
    logp, logq = jax.nn.log_softmax(logits), jax.nn.log_softmax(other)
    return (jnp.exp(logp) * (logp - logq)).sum()


def expected_loss(
    algorithm: Algorithm, logits: jax.Array, sampler: jax.Array, reference: jax.Array
) -> jax.Array:
    """The production loss's expectation over one token that `sampler` draws; all are logits [V].

    Each token of the vocabulary is a row, and its weight is its probability.
    """
    rows, tokens = jnp.zeros(VOCAB, int), jnp.arange(VOCAB)[:, None]
    logp, old_logp, ref_logp = (
        tabular.logps({"logits": table[None]}, rows, tokens)
        for table in (logits, sampler, reference)
    )
    reward, penalty = jnp.zeros((VOCAB, 1)), algorithm.kl
    if penalty.where == "reward":
        reward -= penalty.coef * penalty(old_logp, ref_logp, log_ratio=jnp.zeros_like(old_logp))
    length = jnp.ones_like(tokens)
    return policy_loss(
        algorithm,
        logp,
        old_logp=old_logp,
        sampler_logp=old_logp,
        ref_logp=ref_logp if penalty.where == "loss" else None,
        advantage=advantage(algorithm.baseline, algorithm.scale, reward, length)[:, 0],
        mask=jnp.ones((VOCAB, 1), bool),
        weight=jnp.exp(old_logp),
    )[0]


def gradients(key: jax.Array, drift: float, moved: float) -> dict[str, jax.Array]:
    """One random pair: relative distances of each penalty's gradient from the reverse and the
    forward KL's, and the estimators' exact bias and deviation over the KL."""
    parts = jax.random.split(key, 3)
    reference, step, back = (jax.random.normal(part, (VOCAB,)) for part in parts)
    logits = reference + drift * step
    sampler = logits + moved * back
    true = kl(logits, reference)
    reverse = jax.grad(kl)(logits, reference)
    forward = jax.grad(kl, argnums=1)(reference, logits)
    result = {"kl": true}
    for name in PENALTIES:
        loss = partial(expected_loss, penalised(name))
        grad = jax.grad(loss)(logits, sampler, reference)
        for which, wanted in (("reverse", reverse), ("forward", forward)):
            gap = jnp.linalg.norm(grad - wanted) / jnp.linalg.norm(wanted)
            result[f"{name}, {which}"] = gap
    p, q = jax.nn.softmax(logits), jax.nn.log_softmax(reference)
    for name in ESTIMATORS:
        value = load_kl(name)(jnp.log(p)[:, None], q[:, None])[:, 0]
        mean = p @ value
        deviation = jnp.sqrt(jnp.maximum(p @ value**2 - mean**2, 0))
        result |= {f"{name}, bias": (mean - true) / true, f"{name}, deviation": deviation / true}
    return result


_over_pairs = jax.jit(jax.vmap(gradients, in_axes=(0, None, None)))


def simulate(drift: float, moved: float = 0.0, draws: int = DRAWS) -> Errors:
    """`gradients` of pair i = `key(i)`, for all pairs in one program: name -> f64[draws]."""
    keys = jax.vmap(jax.random.key)(jnp.arange(draws))
    return jax.tree.map(np.asarray, _over_pairs(keys, drift, moved))


def misses(on_policy: dict[float, Errors], moved: dict[float, Errors]) -> list[str]:
    """What breaks the pass rule: the largest distance over pairs counts; one line each."""
    lines = []
    for drift, errors in on_policy.items():
        wanted = {f"{name}, reverse": errors for name in EXACT} | {f"{FORWARD}, forward": errors}
        for name, source in wanted.items():
            if not source[name].max() < TOLERANCE:
                lines.append(f"drift {drift}: {name}: {source[name].max():.2e}")
    name = f"{ALWAYS}, reverse"
    lines += [
        f"off policy, drift {drift}: {name}: {errors[name].max():.2e}"
        for drift, errors in moved.items()
        if not errors[name].max() < TOLERANCE
    ]
    return lines


def interval(values: np.ndarray, digits: int = 3, statistic=np.median) -> str:
    low, high = bootstrap_interval(values, statistic)
    return f"{statistic(values):.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def distance(values: np.ndarray) -> str:
    """A relative distance: its median and interval, or only a bound where it is rounding."""
    if values.max() < TOLERANCE:
        return f"< {10 ** np.ceil(np.log10(max(values.max(), 1e-17))):.0e}"
    return interval(values)


def spread(values: np.ndarray) -> str:
    low, mid, high = np.quantile(values, [0.025, 0.5, 0.975])
    return f"{mid:.3g} ({low:.3g} to {high:.3g})"


def tables(gaussians: dict, on_policy: dict[float, Errors], moved: dict[float, Errors]) -> str:
    """README.md's tables."""
    lines = [
        "| reference | estimator | bias / KL [95 %] | printed | deviation / KL [95 %] | printed |",
        "|---|---|---|---:|---|---:|",
    ]
    for (mean, name), (bias, deviation) in PRINTED.items():
        means, deviations = gaussians[mean][name]
        lines.append(
            f"| N({mean:g}, 1), KL {mean**2 / 2:g} | {name} | {interval(means - 1, 4, np.mean)} "
            f"| {bias} | {interval(deviations, 3, np.mean)} | {deviation} |"
        )
    head = " | ".join(f"drift {d:g}" for d in DRIFTS)
    rule = "|---|" + "---|" * len(DRIFTS)

    def row(label: str, name: str, errors: dict[float, Errors], show=spread) -> str:
        return f"| {label} | " + " | ".join(show(errors[d][name]) for d in DRIFTS) + " |"

    lines += ["", f"| V = {VOCAB}, exact | {head} |", rule, row("KL, nats", "kl", on_policy)]
    for what in ("bias", "deviation"):
        for name in ESTIMATORS if what == "deviation" else ("k2",):
            lines.append(row(f"{name}, {what} / KL", f"{name}, {what}", on_policy))
    for title, errors in (("on policy", on_policy), ("sampled by an older policy", moved)):
        lines += ["", f"| gradient, {title}: relative distance | {head} |", rule]
        lines += [row(name, f"{name}, reverse", errors, distance) for name in PENALTIES]
        lines.append(
            row(f"{FORWARD}, to the forward KL's", f"{FORWARD}, forward", errors, distance)
        )
    return "\n".join(lines)


def write_csv(path: Path, gaussians: dict, categorical: dict[str, dict[float, Errors]]) -> None:
    """Mean, median, smallest and largest over seeds or pairs, one row a quantity."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["part", "drift", "quantity", "mean", "median", "min", "max"])
        rows = [
            ("gaussian", mean, f"{name}, {what}", values)
            for mean, estimates in gaussians.items()
            for name, pair in estimates.items()
            for what, values in (("bias", pair[0] - 1), ("deviation", pair[1]))
        ]
        rows += [
            (part, drift, name, values)
            for part, by_drift in categorical.items()
            for drift, errors in by_drift.items()
            for name, values in errors.items()
            if part == "on policy" or "loss" in name or "reward" in name
        ]
        for part, drift, name, values in rows:
            numbers = values.mean(), np.median(values), values.min(), values.max()
            writer.writerow([part, drift, name, *(f"{x:.5g}" for x in numbers)])


def draw(path: Path, on_policy: dict[float, Errors], moved: dict[float, Errors]) -> None:
    """Distance of each penalty's gradient from the reverse KL's, on policy and off it."""
    ticks = (0, 0.1, 0.3, 1, 3)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(8.4, 4.2), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        titles = ("on policy", f"sampled by an older policy (logits ±{MOVED:g})")
        for axis, errors, title in zip(axes, (on_policy, moved), titles, strict=True):
            for i, (name, colour) in enumerate(zip(PENALTIES, COLOURS, strict=False)):
                values = np.array([errors[d][f"{name}, reverse"] for d in DRIFTS])
                low, mid, high = np.quantile(values, [0.025, 0.5, 0.975], axis=1)
                beside = np.array(DRIFTS) * 1.08 ** (i - 2.5)  # curves that coincide stay visible
                axis.errorbar(
                    beside,
                    mid,
                    yerr=(mid - low, high - mid),
                    fmt="os^vDX"[i] + "-",
                    color=colour,
                    lw=1.2,
                    ms=5,
                    label=name,
                )
            axis.set(xscale="log", xlabel="drift of the logits from the reference")
            axis.set_yscale("symlog", linthresh=0.1, linscale=0.5)
            axis.set_yticks(ticks, [f"{t:g}" for t in ticks])
            axis.set_yticks([], minor=True)
            axis.set_xticks(DRIFTS, [f"{d:g}" for d in DRIFTS])
            axis.set_xticks([], minor=True)
            axis.set_title(title, fontsize=10)
        axes[0].set_ylabel(
            "relative distance of the gradient\nfrom that of KL(policy || reference)"
        )
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> int:
    with jax.enable_x64(True):  # the pass rule asks for more digits than float32 has
        gaussians = {mean: gaussian(mean) for mean in MEANS}
        on_policy = {drift: simulate(drift) for drift in DRIFTS}
        moved = {drift: simulate(drift, MOVED) for drift in DRIFTS}
    print(tables(gaussians, on_policy, moved))
    write_csv(HERE / "results.csv", gaussians, {"on policy": on_policy, "older policy": moved})
    draw(HERE / "figure.svg", on_policy, moved)
    wrong = misses(on_policy, moved)
    print("\n".join(wrong) if wrong else "\nPASS: every gradient is the one it should be")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
