"""The policy's log-probs of a rollout, by a full forward pass, a micro-batch at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from grpo_jax.kernels.logprobs import token_logprobs
from grpo_jax.models.llama import Model
from grpo_jax.types import Params, Rollout


@dataclass(frozen=True)
class PolicySettings:
    """How the update computes; `temperature` is the sampler's, so both speak of one policy."""

    temperature: float
    micro_batch_rows: int  # rows in one forward and backward pass, at most
    vocab_chunk: int  # vocabulary entries whose logits exist at one time


def sequence_logprobs(
    model: Model, settings: PolicySettings, params: Params, rollout: Rollout
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(log-prob of each completion token, entropy at its place), by a full forward pass."""
    B, T = rollout.completion.shape
    tokens = jnp.concatenate([rollout.prompt, rollout.completion], 1)
    mask = jnp.concatenate([rollout.prompt_mask, rollout.mask], 1)
    hidden = model.hidden(params, tokens, mask)[:, -T - 1 : -1]
    logp, entropy = token_logprobs(
        hidden.reshape(B * T, -1),
        model.head(params).astype(hidden.dtype),
        rollout.completion.reshape(B * T),
        temperature=settings.temperature,
        chunk=settings.vocab_chunk,
    )
    return logp.reshape(B, T), entropy.reshape(B, T)


def make_logprobs(model: Model, settings: PolicySettings) -> Callable:
    """Jitted (params, rollout) -> (logp [B,T], entropy [B,T]), a micro-batch at a time."""

    @jax.jit
    def logprobs(params: Params, rollout: Rollout):
        micro = cut(rollout, settings.micro_batch_rows)
        logp, entropy = lax.map(partial(sequence_logprobs, model, settings, params), micro)
        shape = rollout.completion.shape
        return logp.reshape(shape), entropy.reshape(shape)

    return logprobs


def cut(tree, most: int):
    """[B, ...] -> [B/rows, rows, ...] in every leaf; rows: B's largest divisor up to `most`."""

    def leaf(a):
        rows = next(n for n in range(min(most, a.shape[0]), 0, -1) if a.shape[0] % n == 0)
        return a.reshape(a.shape[0] // rows, rows, *a.shape[1:])

    return jax.tree.map(leaf, tree)
