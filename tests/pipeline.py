"""The way from rewards to a gradient, as the collector and the learner go it, on made-up numbers.

Log-probs stand in for a policy, so that a whole algorithm is a fraction of a second.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from grpo_jax.answers import Answers
from grpo_jax.loss import policy_loss
from grpo_jax.rewards.combine import RewardTable
from grpo_jax.rollout import score_groups
from grpo_jax.tasks.base import Prompt
from grpo_jax.trainer import _entropy_bonus
from grpo_jax.types import Algorithm, Rollout

WEIGHTS = {"correct": 1.0, "form": 0.5}
ENTROPIES = (0.1, 0.1, 0.5, 0.5, 0.1, 0.1)  # of the rollouts before this one and of this one, nats


@dataclass(frozen=True)
class Problem:
    """Answers that are scored, and what a policy, a sampler and a reference say of their tokens."""

    answers: Answers
    logp: jax.Array
    old_logp: jax.Array
    ref_logp: jax.Array
    entropy: jax.Array
    exact_kl: jax.Array


def problem(prompts: int = 6, group: int = 4, width: int = 12, binary: bool = False) -> Problem:
    """Off-policy by all its log-probs. Rewards of the first group are equal, those of the second
    in `correct` alone; means go from 0 to about 0.7. Some answers reach `width`."""
    rng = np.random.default_rng(0)
    B = prompts * group
    levels = np.resize([0, 0, 0.3, 0.8, 0.8, 1], prompts)[:, None]
    correct = rng.uniform(0, 1, (prompts, group)) * levels
    correct[-1] = (1 + correct[-1]) / 2
    form = rng.uniform(0, 0.4, (prompts, group)) * (np.arange(prompts) > 0)[:, None]
    if binary:
        correct, form = np.round(correct), 0 * form
    length = rng.integers(3, width + 1, B)
    mask = np.arange(width) < length[:, None]
    logp = -rng.exponential(1.0, mask.shape) - 0.02
    old = logp + rng.normal(0, 1, mask.shape)
    rollout = Rollout(
        prompt=np.zeros((B, 1), np.int32),
        prompt_mask=np.ones((B, 1), bool),
        completion=np.zeros(mask.shape, np.int32),
        mask=mask,
        sampler_logp=old + rng.normal(0, 0.7, mask.shape),
        truncated=length == width,
        version=np.zeros(B, np.int32),
    )
    parts = {"correct": correct.ravel(), "form": form.ravel()}
    total = sum(weight * parts[name] for name, weight in WEIGHTS.items())
    answers = Answers(
        prompts=(Prompt("", ""),) * prompts,
        rollout=rollout,
        texts=("",) * B,
        rewards=RewardTable(total, parts, {}, {}, {}),
        greedy=rng.uniform(0, 0.5, prompts),
    )
    return Problem(
        answers=answers,
        logp=jnp.asarray(logp, float),
        old_logp=jnp.asarray(old, float),
        ref_logp=jnp.asarray(logp + rng.normal(0, 0.7, mask.shape), float),
        entropy=jnp.asarray(rng.exponential(0.5, mask.shape), float),
        exact_kl=jnp.asarray(rng.exponential(0.1, mask.shape), float),
    )


def follow(algorithm: Algorithm, data: Problem) -> dict[str, np.ndarray]:
    """All that an algorithm makes of the problem: `keep`, `advantage`, `weight`, `coefs` of the
    entropy bonus, `loss`, and its gradients `d_logp`, `d_entropy`, `d_exact_kl`."""
    answers, kl = data.answers, algorithm.kl
    rewards, rollout = answers.rewards, jax.tree.map(jnp.asarray, answers.rollout)
    seen = rewards.total if algorithm.filter.on is None else rewards.parts[algorithm.filter.on]
    keep = np.asarray(algorithm.filter.rule(jnp.asarray(answers.grouped(seen))))
    penalty = None
    if kl.active and kl.where == "reward":
        on_policy = jnp.zeros_like(data.old_logp)
        per_token = kl(data.old_logp, data.ref_logp, log_ratio=on_policy, exact=data.exact_kl)
        penalty = jnp.where(rollout.mask, kl.coef * per_token, 0).sum(1).reshape(len(answers), -1)
    value, scorable = score_groups(algorithm, WEIGHTS, answers, keep, penalty)
    whole = np.asarray(algorithm.truncation(rollout.truncated))
    mask = rollout.mask & (scorable.reshape(-1) & whole)[:, None]
    weight = algorithm.aggregation(mask, jnp.repeat(jnp.arange(len(answers)), answers.group_size))
    coefs = applied(algorithm)

    def loss(given):
        return policy_loss(
            algorithm,
            given["logp"],
            old_logp=data.old_logp,
            sampler_logp=rollout.sampler_logp,
            ref_logp=data.ref_logp,
            advantage=value.reshape(-1),
            mask=mask,
            weight=weight,
            entropy=given["entropy"],
            entropy_coef=coefs[-1],
            exact_kl=given["exact_kl"],
            key=jax.random.key(0),
        )[0]

    given = {"logp": data.logp, "entropy": data.entropy, "exact_kl": data.exact_kl}
    total, gradient = jax.value_and_grad(loss)(given)
    return {
        "keep": keep,
        "advantage": np.asarray(value),
        "weight": np.asarray(weight),
        "coefs": np.array(coefs),
        "loss": np.asarray(total),
    } | {f"d_{name}": np.asarray(x) for name, x in gradient.items()}


def applied(algorithm: Algorithm) -> list[float]:
    """The coefficient of the entropy bonus, one rollout after the other, as the trainer has it."""
    run = SimpleNamespace(algorithm=algorithm)
    out = SimpleNamespace(entropy_coef=float(algorithm.entropy.coef))
    return [_entropy_bonus(run, entropy, out) for entropy in ENTROPIES]
