"""Axis `clip`, the rules that follow the covariance of log-probability and advantage.

"The Entropy Mechanism of RL for Reasoning Language Models" (arXiv:2505.22617): where
cov = (A - mean A) (log p - mean log p) of a token is large, an update costs the most entropy. The
means are over all tokens of the minibatch, which therefore has to be seen at once (`across_rows`);
verl and SkyRL take them over the micro-batch. `clip.py` has the contract of the axis.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key

from grpo_jax.kernels import clip
from grpo_jax.kernels.masked import Knob, masked_mean
from grpo_jax.rules import across_rows


@across_rows
def clip_cov(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    key: Key[Array, ""],
    low: Knob,
    high: Knob,
    share: Knob,
    covariance_low: Knob,
    covariance_high: Knob,
) -> clip.Clipped:
    """PPO's clip, and a few tokens of high covariance lose their term wholly (Clip-Cov).

    Candidates are the tokens that the clip leaves alone and with covariance_low < cov <
    covariance_high. max(floor(share * tokens), 1) of them are drawn at random, all of them where
    they are fewer; they count as `clipped`, with the clip's own. verl doesn't bound the exponent of
    the ratio here.

    Args:
      key: draws the tokens; another key, another draw.
      low, high: of the ratio, as in `clip.bounded`. The authors' script has 1 and 1.
      share: of all tokens of the minibatch.
    """
    objective, clipped = clip.bounded(log_ratio, advantage, logp, mask, low=low, high=high)
    covariance = _covariance(advantage, logp, mask)
    candidate = mask & ~clipped & (covariance > covariance_low) & (covariance < covariance_high)
    # token by token, then row by row: how much padding there is behind them changes no draw
    noise = jax.random.uniform(key, mask.shape[::-1]).T
    score = jnp.where(candidate, noise, -jnp.inf)
    drawn = candidate & (_rank(score) < _count(share, mask))
    return jnp.where(drawn, 0, objective), clipped | drawn


@across_rows
def kl_cov(
    log_ratio: Float[Array, "B T"],
    advantage: Float[Array, "B #T"],
    logp: Float[Array, "B T"],
    mask: Bool[Array, "B T"],
    *,
    share: Knob,
    coef: Knob,
) -> clip.Clipped:
    """ratio A, minus coef |log ratio| for the tokens of highest covariance (KL-Cov).

    Those are the first max(floor(share * tokens), 1); of equal ones the earlier. No ratio is
    clipped at all. |log ratio| stands for the KL to the policy at rollout, as in the authors' code
    and in verl; its gradient at ratio 1 is 0. verl doesn't bound the exponent of the ratio here.

    Args:
      share: of all tokens of the minibatch.
      coef: of the penalty. The paper has 1; verl's configuration 0.1.
    """
    objective, clipped = clip.importance(log_ratio, advantage, logp, mask)
    top = _rank(_covariance(advantage, logp, mask)) < _count(share, mask)
    log_ratio = jnp.where(mask, log_ratio, 0)
    # `jnp.abs` has the slope 1 at 0, which is where every token of an on-policy step is.
    penalty = coef * jax.lax.stop_gradient(jnp.sign(log_ratio)) * log_ratio
    return objective - jnp.where(top, penalty, 0), clipped


def _covariance(
    advantage: Float[Array, "B #T"], logp: Float[Array, "B T"], mask: Bool[Array, "B T"]
) -> Float[Array, "B T"]:
    """A token's part of it, without gradient; -inf behind the mask."""
    advantage, logp = jax.lax.stop_gradient((advantage, logp))
    part = (advantage - masked_mean(advantage, mask)) * (logp - masked_mean(logp, mask))
    return jnp.where(mask, part, -jnp.inf)


def _count(share: Knob, mask: Bool[Array, "B T"]) -> Float[Array, ""]:
    return jnp.maximum(jnp.floor(share * mask.sum().astype(float)), 1)


def _rank(score: Float[Array, "B T"]) -> Int[Array, "B T"]:
    """Place of each entry from the highest score, 0, down; of equal ones the earlier first."""
    flat = score.reshape(-1)
    order = jnp.argsort(flat, descending=True, stable=True)
    place = jnp.zeros_like(order).at[order].set(jnp.arange(order.size, dtype=order.dtype))
    return place.reshape(score.shape)
