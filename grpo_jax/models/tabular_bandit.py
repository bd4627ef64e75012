"""Starts and rewards for the one-token policy of `tabular.py` as a bandit of many arms.

Every token of the vocabulary is an arm with its own chance of a reward of 1, the same for all
prompts. What the policy earns can be read off its table, with no sampling noise, and a reward may
come to many different answers, so that there is something to keep exploring.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from grpo_jax.kernels.sampling import row_uniform
from grpo_jax.types import Params


def peaked(prompts: int, vocab: int, share: float) -> Params:
    """Token 0 has probability `share` under every prompt; the others have the rest in equal parts.

    Args:
      vocab: V >= 2.
      share: between 0 and 1, both excluded.
    """
    rest = jnp.full(vocab - 1, (1 - share) / (vocab - 1), jnp.float32)
    row = jnp.log(jnp.concatenate([jnp.array([share], jnp.float32), rest]))
    return {"logits": jnp.tile(row, (prompts, 1))}


def diffuse(prompts: int, vocab: int, spread: float, key: Key[Array, ""]) -> Params:
    """Independent normal logits of standard deviation `spread`: a start of its own for each key."""
    return {"logits": spread * jax.random.normal(key, (prompts, vocab), jnp.float32)}


def pull(
    value: Float[Array, "V"],
    tokens: Int[Array, "B 1"],
    key: Key[Array, ""],
    step: int | Int[Array, ""],
) -> Float[Array, "B"]:
    """A reward of 1 with probability `value[token]`, else 0, for each row.

    The noise of row i is a function of (key, i, step) only; a value of 0 or 1 is a sure thing. The
    key has to be another than that of the tokens, or a reward depends on how its token was drawn.
    """
    uniform = row_uniform(key, jnp.arange(len(tokens)), step)
    return (uniform < value[tokens[:, 0]]).astype(jnp.float32)


def expected_reward(params: Params, value: Float[Array, "V"]) -> Float[Array, ""]:
    """J: the mean over prompts of what an answer is expected to earn."""
    return (jax.nn.softmax(params["logits"], axis=-1) @ value).mean()
