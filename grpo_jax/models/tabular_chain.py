"""A tabular policy that writes answers of T tokens: a row of logits for each slot and last token.

All answers are equally long, and a token depends on its slot and on the token before it, so the
tokens of an answer are not independent. The task is to match a hidden target token at each slot;
accuracy and entropy can be computed from the table alone, through the distribution of the token at
each slot.

The parameter tree is {"logits": f32[T, V, V]}: slot, token before it, token. At the first slot the
token before it counts as 0.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, Key

from grpo_jax.kernels.sampling import row_uniform
from grpo_jax.kernels.sampling import sample as inverse_cdf
from grpo_jax.types import Params, Rollout


def init(
    key: Key[Array, ""], *, slots: int, vocab: int, spread: float, bias: float
) -> tuple[Params, Int[Array, "T"]]:
    """A random policy and its target.

    Args:
      slots: T.
      vocab: V.
      spread: standard deviation of the logits, which are independent and normal.
      bias: added to the logit of the target at each slot, whatever token stands before it.

    Returns:
      The parameters, and the target token of each slot (uniform, independent).
    """
    for_target, for_logits = jax.random.split(key)
    target = jax.random.randint(for_target, (slots,), 0, vocab)
    logits = spread * jax.random.normal(for_logits, (slots, vocab, vocab), jnp.float32)
    return {"logits": logits + bias * jax.nn.one_hot(target, vocab)[:, None, :]}, target


def logps(params: Params, tokens: Int[Array, "B T"]) -> Float[Array, "B T"]:
    """Log-probability (nats, f32) of each token given the one before it, at temperature 1."""
    table = jax.nn.log_softmax(params["logits"], axis=-1)
    before = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)))
    return table[jnp.arange(tokens.shape[1]), before, tokens]


def sample(
    params: Params, prompts: Int[Array, "B"], key: Key[Array, ""], step: int | Int[Array, ""]
) -> Rollout:
    """One answer for each row at temperature 1, as a rollout of T tokens and S = 1.

    The prompt is a number that the policy does not see. The noise of row i is a function of
    (key, i, step) only. An answer is over after T tokens, so no row counts as truncated.
    """
    rows = len(prompts)
    noise = jax.random.fold_in(key, step)

    def write(before, place):
        slot, logits = place
        uniform = row_uniform(noise, jnp.arange(rows), slot)
        token, logp = inverse_cdf(uniform, logits[before], temperature=1.0)
        return token, (token, logp)

    slots = jnp.arange(len(params["logits"]))
    _, (tokens, logp) = lax.scan(write, jnp.zeros(rows, jnp.int32), (slots, params["logits"]))
    return Rollout(
        prompt=prompts[:, None],
        prompt_mask=jnp.ones((rows, 1), bool),
        completion=tokens.T,
        mask=jnp.ones(tokens.T.shape, bool),
        sampler_logp=logp.T,
        truncated=jnp.zeros(rows, bool),
        version=jnp.full(rows, step, jnp.int32),
    )


def accuracy(params: Params, target: Int[Array, "T"]) -> Float[Array, ""]:
    """The expected share of slots with the target token."""
    table = jax.nn.softmax(params["logits"], axis=-1)
    at_slot = jnp.einsum("tu,tuv->tv", _before(table), table)
    return jnp.take_along_axis(at_slot, target[:, None], axis=1).mean()


def entropy(params: Params) -> Float[Array, ""]:
    """Entropy of a whole answer, per token (nats)."""
    table = jax.nn.log_softmax(params["logits"], axis=-1)
    each = -(jnp.exp(table) * table).sum(-1)
    return (_before(jnp.exp(table)) * each).sum(1).mean()


def _before(table: Float[Array, "T V V"]) -> Float[Array, "T V"]:
    """The distribution of the token before each slot."""

    def forward(before, slot):
        return before @ slot, before

    return lax.scan(forward, jax.nn.one_hot(0, table.shape[1]), table)[1]
