"""Attention over whole sequences: of rows, and of a group's answers over the prompt they share."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

MASKED = -1e30  # added to a score; finite, so that a row with no key at all stays finite


def attend_rows(
    q: Float[Array, "B T K R h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    mask: Bool[Array, "B T"],
) -> Float[Array, "B T K R h"]:
    """Causal attention within each row. `q` is scaled; `mask` is False at keys nobody sees."""
    T = mask.shape[1]
    visible = jnp.tril(jnp.ones((T, T), bool)) & mask[:, None, :]
    bias = jnp.where(visible, 0.0, MASKED)[:, None, None]
    score = jnp.einsum("btkrh,bskh->bkrts", q, k, preferred_element_type=jnp.float32) + bias
    weight = jax.nn.softmax(score, -1).astype(v.dtype)
    y = jnp.einsum("bkrts,bskh->btkrh", weight, v, preferred_element_type=jnp.float32)
    return y.astype(q.dtype)


def attend_answers(
    q: Float[Array, "B T K R h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    prompt_k: Float[Array, "P S K h"],
    prompt_v: Float[Array, "P S K h"],
    prompt_mask: Bool[Array, "P S"],
) -> Float[Array, "B T K R h"]:
    """Causal attention of each answer over its own tokens and its prompt's, which B/P rows share.

    One softmax over both, whose two parts are never put together: each keeps its own layout.
    """
    P, (B, T) = len(prompt_mask), q.shape[:2]
    bias = jnp.where(jnp.tril(jnp.ones((T, T), bool)), 0.0, MASKED)
    prompt_bias = jnp.where(prompt_mask, 0.0, MASKED)[:, None, None, None, None]
    grouped = q.reshape(P, B // P, *q.shape[1:])
    f32 = jnp.float32
    own = jnp.einsum("btkrh,bskh->bkrts", q, k, preferred_element_type=f32) + bias
    first = jnp.einsum("pgtkrh,pskh->pkrgts", grouped, prompt_k, preferred_element_type=f32)
    first = first + prompt_bias

    def rows(a):  # [P, K, R, G, T, ...] -> [B, K, R, T, ...]
        return a.swapaxes(2, 3).swapaxes(1, 2).reshape(B, *a.shape[1:3], *a.shape[4:])

    def groups(a):
        return a.reshape(P, B // P, *a.shape[1:]).swapaxes(1, 2).swapaxes(2, 3)

    top = jnp.maximum(own.max(-1, keepdims=True), rows(first.max(-1, keepdims=True)))
    top = jax.lax.stop_gradient(top)
    own, first = jnp.exp(own - top), jnp.exp(first - groups(top))
    total = own.sum(-1) + rows(first.sum(-1))
    y = jnp.einsum("bkrts,bskh->btkrh", own.astype(v.dtype), v, preferred_element_type=f32)
    more = jnp.einsum(
        "pkrgts,pskh->pgtkrh", first.astype(v.dtype), prompt_v, preferred_element_type=f32
    )
    y = y + more.reshape(y.shape)
    return (y / total.transpose(0, 3, 1, 2)[..., None]).astype(q.dtype)
