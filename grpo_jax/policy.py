"""The policy's parameters, and its log-probs of a rollout, by a full forward pass, a micro-batch at
a time."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from grpo_jax.kernels.logprobs import token_kl, token_logprobs
from grpo_jax.models import lora
from grpo_jax.models.llama import Model
from grpo_jax.sharding import ONE_DEVICE, Placement
from grpo_jax.types import Params, Rollout


@dataclass(frozen=True)
class PolicySettings:
    """How the update computes; `temperature` is the sampler's, so both speak of one policy."""

    temperature: float
    micro_batch_rows: int  # rows in one forward and backward pass, at most
    vocab_chunk: int  # vocabulary entries whose logits exist at one time
    share_prompts: bool = True  # compute a prompt once for the rows of its group in a micro-batch
    skip_silent: bool = True  # no pass over a micro-batch that can't have a gradient


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenStats:
    """What the loss needs of the policy at each completion token; all have a gradient."""

    logp: Float[Array, "B T"]  # of the token that was sampled
    entropy: Float[Array, "B T"]
    exact_kl: Float[Array, "B T"] | None  # KL(policy || reference); None without a reference


def whole(base: Params | None, trainable: Params) -> Params:
    """The policy's parameters: all of them are trained, or adapters beside a frozen base (LoRA)."""
    return trainable if base is None else lora.join(base, trainable)


def token_stats(
    model: Model,
    settings: PolicySettings,
    params: Params,
    rollout: Rollout,
    reference: Params | None = None,
    group: int = 1,
) -> TokenStats:
    """By a full forward pass; one more for the reference, if there is one.

    Each `group` consecutive rows, counted from a multiple of it, have one and the same prompt; 1
    promises nothing.
    """
    B, T = rollout.completion.shape
    temperature, chunk = settings.temperature, settings.vocab_chunk
    shared = math.gcd(B, group) if settings.share_prompts else 1
    hidden, head = _last_layer(model, params, rollout, shared)
    logp, entropy = token_logprobs(
        hidden, head, rollout.completion.reshape(B * T), temperature=temperature, chunk=chunk
    )
    kl = None
    if reference is not None:
        other = lax.stop_gradient(_last_layer(model, reference, rollout, shared))
        kl = token_kl(hidden, head, *other, temperature=temperature, chunk=chunk).reshape(B, T)
    return TokenStats(logp.reshape(B, T), entropy.reshape(B, T), kl)


def _last_layer(
    model: Model, params: Params, rollout: Rollout, shared: int
) -> tuple[Float[Array, "BT D"], Float[Array, "V D"]]:
    """The hidden state that each completion token is drawn from, and the head."""
    B, T = rollout.completion.shape
    if shared > 1:
        prompt, mask = rollout.prompt[::shared], rollout.prompt_mask[::shared]
        hidden = model.answers(params, prompt, mask, rollout.completion)
    else:
        tokens = jnp.concatenate([rollout.prompt, rollout.completion], 1)
        mask = jnp.concatenate([rollout.prompt_mask, rollout.mask], 1)
        hidden = model.hidden(params, tokens, mask)[:, -T - 1 : -1]
    return hidden.reshape(B * T, -1), model.head(params)


def sequence_logprobs(
    model: Model, settings: PolicySettings, params: Params, rollout: Rollout
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """(log-prob of each completion token, entropy at its place), by a full forward pass."""
    stats = token_stats(model, settings, params, rollout)
    return stats.logp, stats.entropy


def make_logprobs(
    model: Model,
    settings: PolicySettings,
    jit: Callable = jax.jit,
    place: Placement = ONE_DEVICE,
) -> Callable:
    """Jitted (params, rollout, group=1) -> (logp [B,T], entropy [B,T]), a micro-batch at a time;
    `group` as in `token_stats`. `jit`: what makes the program, as `jax.jit` does. `place`: rows are
    spread over its devices, which don't meet; results are everywhere."""

    @partial(jit, static_argnums=2)
    def logprobs(params: Params, rollout: Rollout, group: int = 1):
        def forward(params: Params, rollout: Rollout) -> TokenStats:
            one = partial(token_stats, model, settings, params, group=group)
            return stats_by_parts(one, settings, rollout)

        stats = on_all_rows(place, forward, (params,), rollout)
        return stats.logp, stats.entropy

    return logprobs


def make_exact_kl(
    model: Model,
    settings: PolicySettings,
    jit: Callable = jax.jit,
    place: Placement = ONE_DEVICE,
) -> Callable:
    """Jitted (params, reference, rollout, group=1) -> full-vocabulary KL(policy || reference)
    [B,T]; the others as in `make_logprobs`."""

    @partial(jit, static_argnums=3)
    def exact_kl(params: Params, reference: Params, rollout: Rollout, group: int = 1):
        def forward(params: Params, reference: Params, rollout: Rollout) -> TokenStats:
            one = partial(token_stats, model, settings, params, reference=reference, group=group)
            return stats_by_parts(one, settings, rollout)

        return on_all_rows(place, forward, (params, reference), rollout).exact_kl

    return exact_kl


def on_all_rows(
    place: Placement, forward: Callable[..., TokenStats], params: tuple, rollout: Rollout
) -> TokenStats:
    """`forward(*params, rollout)` spread over the devices, which the rows needn't divide."""
    if place.mesh is None:
        return forward(*params, rollout)
    rows = len(rollout.mask)
    spare = -rows % place.shards  # the last row, again and again
    filled = jax.tree.map(lambda a: jnp.concatenate([a, a[-1:].repeat(spare, 0)]), rollout)
    stats = place.by_rows(forward, params, (filled,))
    return place.everywhere(jax.tree.map(lambda a: a[:rows], stats))


def stats_by_parts(
    forward: Callable[[Rollout], TokenStats], settings: PolicySettings, rollout: Rollout
) -> TokenStats:
    """`forward` of all rows, a micro-batch at a time."""
    stats = lax.map(forward, cut(rollout, settings.micro_batch_rows))
    return jax.tree.map(lambda a: a.reshape(rollout.completion.shape), stats)


def cut(tree, most: int):
    """[B, ...] -> [B/rows, rows, ...] in every leaf; rows: B's largest divisor up to `most`."""

    def leaf(a):
        rows = next(n for n in range(min(most, a.shape[0]), 0, -1) if a.shape[0] % n == 0)
        return a.reshape(a.shape[0] // rows, rows, *a.shape[1:])

    return jax.tree.map(leaf, tree)
