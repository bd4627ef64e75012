"""A policy that is a table: one row of logits a prompt, and answers of a single token.

Small enough that thousands of trainings fit into one compiled program, and with probabilities that
can be read off. The parameter tree is {"logits": f32[N, V]}; prompts are row numbers.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from grpo_jax.kernels.sampling import row_uniform
from grpo_jax.kernels.sampling import sample as inverse_cdf
from grpo_jax.types import Params, Rollout


def init(prompts: int, vocab: int) -> Params:
    """The uniform policy over `vocab` tokens, for each of `prompts` prompts."""
    return {"logits": jnp.zeros((prompts, vocab), jnp.float32)}


def logps(
    params: Params, prompts: Int[Array, "B"], tokens: Int[Array, "B 1"]
) -> Float[Array, "B 1"]:
    """Log-probability (nats, f32) of each row's token under the policy at temperature 1."""
    table = jax.nn.log_softmax(params["logits"], axis=-1)
    return jnp.take_along_axis(table[prompts], tokens, axis=1)


def entropy(params: Params, prompts: Int[Array, "B"]) -> Float[Array, "B 1"]:
    """Entropy (nats, f32) of each row's distribution."""
    table = jax.nn.log_softmax(params["logits"], axis=-1)
    return -(jnp.exp(table) * table).sum(-1)[prompts][:, None]


def sample(
    params: Params, prompts: Int[Array, "B"], key: Key[Array, ""], step: int | Int[Array, ""]
) -> Rollout:
    """One token for each row at temperature 1, as a rollout with S = T = 1.

    The noise of row i is a function of (key, i, step) only (`kernels.sampling.row_uniform`). The
    answer is over after its token, so no row counts as truncated.
    """
    rows = len(prompts)
    uniform = row_uniform(key, jnp.arange(rows), step)
    token, logp = inverse_cdf(uniform, params["logits"][prompts], temperature=1.0)
    return Rollout(
        prompt=prompts[:, None],
        prompt_mask=jnp.ones((rows, 1), bool),
        completion=token[:, None],
        mask=jnp.ones((rows, 1), bool),
        sampler_logp=logp[:, None],
        truncated=jnp.zeros(rows, bool),
        version=jnp.full(rows, step, jnp.int32),
    )
