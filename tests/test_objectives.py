"""Each paper's objective, written out token by token in float64 numpy, against `policy_loss`.

The transcriptions share nothing with the package: loops over prompts, answers and tokens, and a
gradient derived by hand beside each value. Those of the presets are in `test_objectives_*.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import aggregation, baseline, clip, kl, ratio, scale
from grpo_jax.kernels.advantage import advantage
from grpo_jax.loss import policy_loss
from grpo_jax.rules import call
from grpo_jax.types import Kl
from tests.cases import make_algorithm

BUDGET, BETA = 9, 0.04


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def make_problem(seed=0, prompts=3, group=4, width=6, drift=0.3):
    """Rewards and log-probs of `prompts` prompts with `group` answers each, one prompt tied."""
    rng = np.random.default_rng(seed)
    shape = (prompts, group, width)
    length = rng.integers(1, width + 1, (prompts, group))
    reward = rng.choice([0.0, 0.5, 1.0], (prompts, group))
    reward[0], reward[1, :2] = 0.7, (0.0, 1.0)
    logp = -rng.exponential(1.0, shape) - 0.05
    old = logp + rng.normal(0, drift, shape)
    return {
        "reward": reward,
        "length": length,
        "logp": logp,
        "old": old,
        "ref": logp + rng.normal(0, 0.3, shape),
        "sampler": old + rng.normal(0, 0.3, shape),
        "entropy": rng.exponential(0.5, shape),
    }


def advantages(problem, algorithm, keep):
    """[N, G], as a rollout is scored, in float64: shaping, KL in the reward, combine, baseline,
    scale. Reward parts by weight: `parts`, or the reward alone."""
    length, parts = jnp.asarray(problem["length"]), problem.get("parts", {1.0: problem["reward"]})
    parts = {w: jnp.where(keep[:, None], jnp.asarray(part), jnp.nan) for w, part in parts.items()}
    total = sum(w * part for w, part in parts.items())
    added = algorithm.shaping(total, length, jnp.zeros(length.shape, bool)) - total
    if algorithm.kl.active and algorithm.kl.where == "reward":
        shape = problem["old"].shape
        old, ref = (jnp.asarray(problem[n]).reshape(-1, shape[2]) for n in ("old", "ref"))
        sampled = np.arange(shape[2]) < problem["length"][..., None]
        per_token = algorithm.kl(old, ref).reshape(shape)
        added -= algorithm.kl.coef * jnp.where(sampled, per_token, 0).sum(-1)
    return call(
        algorithm.combine,
        jnp.stack([*parts.values(), added]),
        jnp.asarray([*parts, 1.0]),
        lambda reward: advantage(algorithm.baseline, algorithm.scale, reward, length),
        length=length,
    )


def ours(problem, algorithm, **more):
    """Value of the objective (minus the loss) and its gradient, [N, G, T]."""
    prompts, group, width = problem["logp"].shape
    names = ("logp", "old", "ref", "sampler", "entropy")
    flat = {n: jnp.asarray(problem[n]).reshape(-1, width) for n in names}
    keep = algorithm.filter.rule(jnp.asarray(problem["reward"]))
    length = jnp.where(keep[:, None], jnp.asarray(problem["length"]), 0)
    mask = jnp.arange(width) < length.reshape(-1, 1)
    adv = advantages(problem, algorithm, keep).reshape(-1)
    weight = algorithm.aggregation(mask, jnp.repeat(jnp.arange(prompts), group))

    def objective(logp):
        return -policy_loss(
            algorithm,
            logp,
            old_logp=flat["old"],
            sampler_logp=flat["sampler"],
            ref_logp=flat["ref"],
            advantage=adv,
            mask=mask,
            weight=weight,
            entropy=flat["entropy"],
            key=jax.random.key(0),
            **more,
        )[0]

    value, gradient = jax.value_and_grad(objective)(flat["logp"])
    return float(value), np.asarray(gradient).reshape(problem["logp"].shape)


def standardised(rewards, divide=True):
    """The advantages of one group, 0 where all rewards are equal."""
    if np.ptp(rewards) == 0:
        return np.zeros_like(rewards)
    centred = rewards - np.mean(rewards)
    return centred / (np.std(rewards) + 1e-8) if divide else centred


def surrogate(rho, a, low, high):
    """min(rho A, clip(rho) A) and its derivative with respect to log rho."""
    clipped = min(max(rho, 1 - low), 1 + high) * a
    return (rho * a, rho * a) if rho * a <= clipped else (clipped, 0.0)


def walk(problem):
    """(prompt, answer, token) of every token that was sampled."""
    for q, lengths in enumerate(problem["length"]):
        for i, n in enumerate(lengths):
            for t in range(n):
                yield q, i, t


def over_tokens(problem, adv, term, share):
    """sum of share[prompt, answer] * term(logp, old, ref, adv[prompt, answer]) over tokens, and its
    gradient; `term` gives a value and its derivative with respect to logp."""
    value, gradient = 0.0, np.zeros_like(problem["logp"])
    for q, i, t in walk(problem):
        at = (problem[name][q, i, t] for name in ("logp", "old", "ref"))
        v, g = term(*at, adv[q, i])
        value += share[q, i] * v
        gradient[q, i, t] = share[q, i] * g
    return value, gradient


def per_answer(problem):
    """Shares of a mean over answers of the mean over their tokens."""
    return 1 / (problem["length"].size * np.maximum(problem["length"], 1))


def per_token(problem):
    """Shares of a mean over all tokens."""
    return np.full(problem["length"].shape, 1 / problem["length"].sum())


def per_prompt(problem):
    """Shares of a mean over prompts of the mean over the tokens of their answers."""
    tokens = np.maximum(problem["length"].sum(1), 1)
    return np.repeat(1 / (len(tokens) * tokens[:, None]), problem["length"].shape[1], 1)


def per_row(problem):
    """Shares of a mean over answers of the sum over their tokens."""
    return np.full(problem["length"].shape, 1 / problem["length"].size)


def surrogate_sum(problem, share, *, low=0.2, high=0.2, divide=True, beta=0.0):
    """sum of share(prompt, answer) * (surrogate - beta * k3) over tokens, and its gradient."""
    value, gradient = 0.0, np.zeros_like(problem["logp"])
    for q, i, t in walk(problem):
        a = standardised(problem["reward"][q], divide)[i]
        lp, old, ref = (problem[name][q, i, t] for name in ("logp", "old", "ref"))
        v, g = surrogate(np.exp(lp - old), a, low, high)
        value += share(q, i) * (v - beta * (np.exp(ref - lp) - (ref - lp) - 1))
        gradient[q, i, t] = share(q, i) * (g - beta * (1 - np.exp(ref - lp)))
    return value, gradient


def check(printed, algorithm, seeds=(0, 1, 2), make=make_problem):
    for seed in seeds:
        problem = make(seed)
        agree(ours(problem, algorithm), printed(problem))


def agree(measured, expected):
    """Values and gradients, of which there is one at all."""
    assert np.abs(expected[1]).max() > 0
    np.testing.assert_allclose(measured[0], expected[0], rtol=1e-11)
    np.testing.assert_allclose(measured[1], expected[1], rtol=1e-11, atol=1e-15)


def test_grpo(x64):
    """DeepSeekMath, eq. 3: 1/G sum_i 1/|o_i| sum_t (surrogate - beta k3), a mean over prompts."""

    def printed(problem):
        prompts, group = problem["length"].shape
        share = lambda q, i: 1 / (prompts * group * problem["length"][q, i])  # noqa: E731
        return surrogate_sum(problem, share, beta=BETA)

    check(printed, make_algorithm(kl=Kl(kl.k3, BETA, "loss")))


def test_dr_grpo(x64):
    """No division by the std, and the generation budget in place of |o_i|."""

    def printed(problem):
        prompts, group = problem["length"].shape
        share = lambda q, i: 1 / (prompts * group * BUDGET)  # noqa: E731
        return surrogate_sum(problem, share, divide=False)

    check(
        printed,
        make_algorithm(scale=scale.none, aggregation=partial(aggregation.constant, length=BUDGET)),
    )


def test_dapo_as_printed(x64):
    """DAPO, eq. 8: one over the tokens of the prompt's answers, clip-higher, no KL."""

    def printed(problem):
        length = problem["length"]
        share = lambda q, i: 1 / (len(length) * length[q].sum())  # noqa: E731
        return surrogate_sum(problem, share, high=0.28)

    rule = partial(clip.bounded, low=0.2, high=0.28)
    check(printed, make_algorithm(clip=rule, aggregation=aggregation.prompt_mean))


def test_dapo_as_coded(x64):
    """verl's and TRL's DAPO: one over the tokens of the whole batch."""

    def printed(problem):
        share = lambda q, i: 1 / problem["length"].sum()  # noqa: E731
        return surrogate_sum(problem, share, high=0.28)

    rule = partial(clip.bounded, low=0.2, high=0.28)
    check(printed, make_algorithm(clip=rule, aggregation=aggregation.token_mean))


def test_gspo(x64):
    """1/G sum_i of the surrogate of the row's geometric mean ratio; its gradient is shared by
    the row's tokens, 1/|o_i| each."""
    low, high = 0.03, 0.04

    def printed(problem):
        prompts, group = problem["length"].shape
        value, gradient = 0.0, np.zeros_like(problem["logp"])
        for q in range(prompts):
            adv = standardised(problem["reward"][q])
            for i in range(group):
                n = problem["length"][q, i]
                log = problem["logp"][q, i, :n] - problem["old"][q, i, :n]
                v, g = surrogate(np.exp(log.sum() / n), adv[i], low, high)
                value += v / (prompts * group)
                gradient[q, i, :n] = g / n / (prompts * group)
        return value, gradient

    rule = partial(clip.bounded, low=low, high=high)
    check(printed, make_algorithm(ratio=ratio.sequence, clip=rule))


def test_cispo(x64):
    """MiniMax-M1: sg(clip(ratio)) A log pi, over the tokens; no lower clip."""
    high = 0.28

    def printed(problem):
        tokens = problem["length"].sum()
        value, gradient = 0.0, np.zeros_like(problem["logp"])
        for q, i, t in walk(problem):
            lp, old = problem["logp"][q, i, t], problem["old"][q, i, t]
            a = standardised(problem["reward"][q])[i]
            weight = min(np.exp(lp - old), 1 + high)
            value += weight * a * lp / tokens
            gradient[q, i, t] = weight * a / tokens
        return value, gradient

    rule = partial(clip.cispo, low=1.0, high=high)
    check(printed, make_algorithm(clip=rule, aggregation=aggregation.token_mean))


def test_reinforce_with_a_baseline(x64):
    """1/B sum_i (r_i - b) log pi(o_i), b the mean reward of the batch."""

    def printed(problem):
        rows = problem["reward"].size
        value, gradient = 0.0, np.zeros_like(problem["logp"])
        for q, i, t in walk(problem):
            a = problem["reward"][q, i] - problem["reward"].mean()
            value += a * problem["logp"][q, i, t] / rows
            gradient[q, i, t] = a / rows
        return value, gradient

    check(
        printed,
        make_algorithm(
            baseline=baseline.batch_mean,
            scale=scale.none,
            clip=clip.none,
            aggregation=aggregation.sequence_sum,
        ),
    )


def test_rloo(x64):
    """1/B sum_i (r_i - mean of the others) log pi(o_i): G/(G-1) times the centred gradient."""

    def printed(problem):
        rows = problem["reward"].size
        value, gradient = 0.0, np.zeros_like(problem["logp"])
        for q, i, t in walk(problem):
            others = np.delete(problem["reward"][q], i)
            a = problem["reward"][q, i] - others.mean() if np.ptp(problem["reward"][q]) else 0.0
            value += a * problem["logp"][q, i, t] / rows
            gradient[q, i, t] = a / rows
        return value, gradient

    axes = {"scale": scale.none, "clip": clip.none, "aggregation": aggregation.sequence_sum}
    rloo = make_algorithm(baseline=baseline.leave_one_out, **axes)
    check(printed, rloo)
    problem = make_problem()
    centred = ours(problem, make_algorithm(**axes))[1]
    np.testing.assert_allclose(ours(problem, rloo)[1], centred * 4 / 3, rtol=1e-12)
