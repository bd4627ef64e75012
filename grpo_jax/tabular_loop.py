"""A whole training of a tabular policy as one pure function, for sweeps inside a single jit.

The loss, the advantages and the sampler are those that train a language model; only the policy is
a table (`models/tabular.py`). The answer to prompt p is token p, and its reward is 1. `train` may
be vmapped over keys (seeds), over `lr`, and over any constant of an axis:

    def curve(key, high):
        clip = partial(kernels.clip.bounded, low=0.2, high=high)
        return train(replace(algorithm, clip=clip), key, ...)

    jit(vmap(vmap(curve, (0, None)), (None, 0)))(keys, highs)
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jaxtyping import Array, Float, Key

from grpo_jax.kernels.advantage import advantage
from grpo_jax.kernels.filter import mixed
from grpo_jax.loss import policy_loss
from grpo_jax.models import tabular
from grpo_jax.rules import asks, call
from grpo_jax.types import Algorithm, Batch, Params, Rollout

# stream of the key for rules that draw at random; answers use the key with row numbers, which never
# get as high
UPDATE = 2**31 - 1


def train(
    algorithm: Algorithm,
    key: Key[Array, ""],
    *,
    prompts: int,
    vocab: int,
    group_size: int,
    steps: int,
    inner: int,
    lr: float | Float[Array, ""],
) -> dict[str, Float[Array, "steps"]]:
    """Train from the uniform policy with plain SGD; no jit of its own.

    Args:
      algorithm: all axes act. A KL is taken to the uniform policy. Groups that the filter drops are
        masked and not replaced.
      key: of the answers' noise, the only randomness there is.
      prompts: N, one group each in every rollout; the right answer to prompt p is token p.
      vocab: V >= N tokens to choose from.
      group_size: G answers to each prompt.
      steps: rollouts.
      inner: SGD updates on each rollout, all its rows at once.
      lr: learning rate of the SGD, may be traced.

    Returns:
      For each step, `reward`: mean over its N*G answers; `useful`: share of groups whose rewards
      differ; `p_correct`: mean over prompts of the right answer's probability, after the step's
      updates; `clip_ratio/low_mean` and `clip_ratio/high_mean`: share of the tokens that the clip
      holds back, mean over the step's updates.

    Raises:
      ValueError: V < N; a filter that draws anew, skips steps, or looks at another reward than
        `correct`; or a rule that the table cannot serve (baseline=greedy, kl=exact, a reference or
        an entropy coefficient that moves).
    """
    if vocab < prompts:
        raise ValueError(f"vocab={vocab}: the answer to prompt {prompts - 1} is not in it")
    _refuse(algorithm)
    rows = jnp.repeat(jnp.arange(prompts), group_size)
    first = tabular.init(prompts, vocab)
    optimizer = optax.sgd(lr)

    def step(state, number):
        rollout = tabular.sample(state[0], rows, key, number)
        reward = (rollout.completion[:, 0] == rows).astype(jnp.float32).reshape(prompts, -1)
        batch = _batch(algorithm, rollout, reward, state[0], first)
        noise = jax.random.fold_in(jax.random.fold_in(key, UPDATE), number)
        noise = jax.random.split(noise, inner)
        state, clipped = lax.scan(_update(algorithm, optimizer, batch), state, noise)
        right = jnp.diagonal(jax.nn.softmax(state[0]["logits"], axis=-1))
        metrics = {
            "reward": reward.mean(),
            "useful": mixed(reward).mean(),
            "p_correct": right.mean(),
        }
        return state, metrics | {name: share.mean() for name, share in clipped.items()}

    return lax.scan(step, (first, optimizer.init(first)), jnp.arange(steps))[1]


def _refuse(algorithm: Algorithm) -> None:
    rule = algorithm.filter
    if rule.max_rounds != 1 or rule.on_exhausted != "partial" or rule.on not in (None, "correct"):
        raise ValueError(
            "a tabular training samples once a step and has one reward: it needs "
            f"filter.max_rounds=1, on_exhausted=partial, on=correct or null, and got {rule}"
        )
    moves = algorithm.kl.refresh_every or algorithm.entropy.adapt is not None
    if algorithm.kl.exact or asks(algorithm.baseline, "greedy") or moves:
        raise ValueError(
            "a tabular training has no greedy answers and no full-vocabulary KL; its reference and "
            "its entropy coefficient are fixed"
        )


def _batch(
    algorithm: Algorithm,
    rollout: Rollout,
    reward: Float[Array, "N G"],
    params: Params,
    reference: Params,
) -> Batch:
    """Filter, shaping, KL in reward, baseline and scale, in the order of `kernels/__init__.py`."""
    prompts, kl = rollout.prompt[:, 0], algorithm.kl
    old_logp = tabular.logps(params, prompts, rollout.completion)
    ref_logp = tabular.logps(reference, prompts, rollout.completion) if kl.active else None
    keep = jnp.broadcast_to(algorithm.filter.rule(reward)[:, None], reward.shape)
    length = rollout.mask.sum(1).reshape(reward.shape)
    truncated = rollout.truncated.reshape(reward.shape)
    # groups that the filter drops leave every statistic, as unscorable rows do
    shaped = algorithm.shaping(jnp.where(keep, reward, jnp.nan), length, truncated)
    if ref_logp is not None and kl.where == "reward":
        penalty = kl(old_logp, ref_logp, log_ratio=jnp.zeros_like(old_logp))
        shaped -= kl.coef * penalty.reshape(reward.shape)

    def normalise(reward: Float[Array, "N G"]) -> Float[Array, "N G"]:
        return advantage(algorithm.baseline, algorithm.scale, reward, length)

    one_part = shaped[None], jnp.ones(1)
    value = call(algorithm.combine, *one_part, normalise, length=length)
    whole = algorithm.truncation(rollout.truncated)
    return Batch(
        rollout=rollout,
        advantage=value.reshape(-1),
        old_logp=old_logp,
        ref_logp=ref_logp if kl.where == "loss" else None,
        keep=keep.reshape(-1) & whole,
        group=prompts,
    )


def _update(algorithm: Algorithm, optimizer: optax.GradientTransformation, batch: Batch):
    """(state, key) -> (state, clip fractions): one SGD step on all rows of the batch."""
    rollout = batch.rollout
    mask = rollout.mask & batch.keep[:, None]
    weight = algorithm.aggregation(mask, batch.group)

    def loss(params: Params, key: Key[Array, ""]):
        prompts = rollout.prompt[:, 0]
        return policy_loss(
            algorithm,
            tabular.logps(params, prompts, rollout.completion),
            old_logp=batch.old_logp,
            sampler_logp=rollout.sampler_logp,
            ref_logp=batch.ref_logp,
            advantage=batch.advantage,
            mask=mask,
            weight=weight,
            entropy=tabular.entropy(params, prompts),
            key=key,
        )

    def update(state, key):
        params, opt_state = state
        grad, sums = jax.grad(loss, has_aux=True)(params, key)
        change, opt_state = optimizer.update(grad, opt_state, params)
        tokens = jnp.maximum(sums["tokens"], 1)
        clipped = {
            "clip_ratio/low_mean": sums["clip_low"] / tokens,
            "clip_ratio/high_mean": sums["clip_high"] / tokens,
        }
        return (optax.apply_updates(params, change), opt_state), clipped

    return update
