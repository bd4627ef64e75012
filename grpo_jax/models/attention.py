"""Attention over whole sequences: of rows, and of a group's answers over the prompt they share.

The softmax runs over segments of keys that are never put side by side: a row's own, and its
prompt's, which the rows of a group share. The backward pass computes the weights again from each
query's log-normaliser (as in FlashAttention, arXiv:2205.14135): what it keeps is as large as the
queries, and its products have bfloat16 factors where the forward's have. Queries go through in
blocks, so that no more than a block's scores exist at one time, backward included.

P prompts, G rows of each, K key heads with R queries each, h channels, T slots of a row.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

MASKED = -1e30  # added to a score; finite, so that a row with no key at all stays finite


@dataclass(frozen=True)
class Attention:
    """What the model calls; `q` is scaled, and every result has its shape and dtype.

    rows(q [B,T,K,R,h], k [B,T,K,h], v [B,T,K,h], mask bool[B,T]): causal attention within each row;
        `mask` is False at keys that nobody sees.
    answers(q, k, v, prompt_k [P,S,K,h], prompt_v, prompt_mask bool[P,S]): of each answer over its
        own tokens, causally, and over its prompt's, which B/P rows share. None: can't.
    """

    rows: Callable[..., Float[Array, "B T K R h"]]
    answers: Callable[..., Float[Array, "B T K R h"]] | None


def blockwise(block: int = 1024) -> Attention:
    """Plain XLA on every backend. `block`: query slots whose scores exist at one time, at most;
    memory, never the result."""
    return Attention(partial(_rows_of, block), partial(_answers_of, block))


def _rows_of(block, q, k, v, mask):
    own = _heads_first(k[:, None]), _heads_first(v[:, None]), mask[:, None]
    return _tokens_first(_attend(_queries(q, len(q)), (own,), _blocks(q.shape[1], block)), q.shape)


def _answers_of(block, q, k, v, prompt_k, prompt_v, prompt_mask):
    P, T = len(prompt_mask), q.shape[1]
    k, v = (a.reshape(P, -1, *a.shape[1:]) for a in (k, v))
    own = _heads_first(k), _heads_first(v), jnp.ones((1, 1, T), bool)
    shared = prompt_k.swapaxes(1, 2), prompt_v.swapaxes(1, 2), prompt_mask
    return _tokens_first(_attend(_queries(q, P), (own, shared), _blocks(T, block)), q.shape)


def _blocks(T: int, most: int) -> int:
    """Into how many blocks of equal size, none above `most`, T slots are cut."""
    return next(n for n in range(-(-T // most), T + 1) if T % n == 0)


def _queries(q, P):
    """[B, T, K, R, h] -> [P, K, G, T, R, h]: the queries of a slot side by side."""
    return q.reshape(P, -1, *q.shape[1:]).transpose(0, 3, 1, 2, 4, 5)


def _tokens_first(y, shape):
    """[P, K, G, T, R, h] -> [B, T, K, R, h]"""
    return y.transpose(0, 2, 3, 1, 4, 5).reshape(shape)


def _heads_first(k):
    """[P, G, T, K, h] -> [P, K, G, T, h]"""
    return k.transpose(0, 3, 1, 2, 4)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _attend(q, segments, blocks):
    """q [P,K,G,T,R,h]; a segment is (keys, values, mask): [P,K,G,T,h] and [#P,#G,T] of a row's own,
    seen causally, or [P,K,S,h] and [P,S] of the group's prompt. -> as q"""
    return _attend_forward(q, segments, blocks)[0]


def _attend_forward(q, segments, blocks):
    def one(start, q):
        q = _rows(q)
        scores = [_dot(q, k, (-1, -1)) + _bias(mask, start, q, R) for k, _, mask in segments]
        top = jnp.stack([s.max(-1) for s in scores]).max(0)
        weights = [jnp.exp(s - top[..., None]) for s in scores]
        total = reduce(jnp.add, [w.sum(-1) for w in weights])
        pairs = zip(weights, segments, strict=True)
        y = reduce(jnp.add, [_dot(w.astype(q.dtype), v, (-1, -2)) for w, (_, v, _) in pairs])
        return (y / total[..., None]).astype(q.dtype), top + jnp.log(total)

    R = q.shape[-2]
    if blocks == 1:
        y, log_total = one(0, q)
        return y.reshape(q.shape), (q, segments, y, log_total)
    starts, parts = _cut(q, blocks)
    y, log_total = lax.map(lambda x: one(*x), (starts, parts))
    return _join(y.reshape(parts.shape)), (q, segments, y, log_total)


def _attend_backward(blocks, saved, g):
    q, segments, y, log_total = saved
    R = q.shape[-2]

    def one(start, q, g, y, log_total):
        shape, q, g = q.shape, _rows(q), _rows(g)
        carried = (g.astype(jnp.float32) * y.astype(jnp.float32)).sum(-1, keepdims=True)
        back, keys_back = [], []
        for k, v, mask in segments:
            score = _dot(q, k, (-1, -1)) + _bias(mask, start, q, R)
            weight = jnp.exp(score - log_total[..., None])
            score = (weight * (_dot(g, v, (-1, -1)) - carried)).astype(q.dtype)
            back.append(_dot(score, k, (-1, -2)))
            weight = weight.astype(q.dtype)
            keys_back.append((_over_queries(score, q, k), _over_queries(weight, g, v)))
        return reduce(jnp.add, back).astype(q.dtype).reshape(shape), keys_back

    def step(total, x):
        back, keys_back = one(*x)
        return jax.tree.map(jnp.add, total, keys_back), back

    if blocks == 1:
        back, keys_back = one(0, q, g, y, log_total)
    else:
        zero = [(jnp.zeros(k.shape, jnp.float32),) * 2 for k, _, _ in segments]
        starts, parts = _cut(q, blocks)
        keys_back, back = lax.scan(step, zero, (starts, parts, _cut(g, blocks)[1], y, log_total))
        back = _join(back)
    keys_back = [(a.astype(q.dtype), b.astype(q.dtype), None) for a, b in keys_back]
    return back, tuple(keys_back)


_attend.defvjp(_attend_forward, _attend_backward)


def _cut(q, blocks):
    """(first slots [n], [n,P,K,G,T/n,R,h])"""
    P, K, G, T, R, h = q.shape
    parts = q.reshape(P, K, G, blocks, T // blocks, R, h)
    return jnp.arange(blocks) * (T // blocks), jnp.moveaxis(parts, 3, 0)


def _join(parts):
    """The inverse of `_cut`."""
    n, P, K, G, T, R, h = parts.shape
    return jnp.moveaxis(parts, 0, 3).reshape(P, K, G, n * T, R, h)


def _rows(q):
    """[P,K,G,T,R,h] -> [P,K,G,T R,h]: all queries that meet the same keys."""
    return q.reshape(*q.shape[:3], -1, q.shape[-1])


def _bias(mask, start, q, R: int):
    """0 where a query sees a key, of the scores' shape [P,K,G,T R,keys] or broadcast to it; made
    anew wherever it is read, and never kept."""
    if mask.ndim == 2:  # the prompt's, which lie before every query
        return jnp.where(mask, 0.0, MASKED)[:, None, None, None, :]
    slot = start + jnp.arange(q.shape[-2]) // R
    seen = (jnp.arange(mask.shape[-1]) <= slot[:, None]) & mask[:, None, :, None, :]
    return jnp.where(seen, 0.0, MASKED)


def _dot(a, b, contract):
    """Over one axis of each, counted from the back; all axes before the last two go together."""
    if a.ndim > b.ndim:  # a shared segment: the group's rows lie one after the other
        y = _dot(a.reshape(*a.shape[:2], -1, a.shape[-1]), b, contract)
        return y.reshape(*a.shape[:4], -1)
    batch = tuple(range(a.ndim - 2))
    sides = (a.ndim + contract[0],), (b.ndim + contract[1],)
    return lax.dot_general(a, b, (sides, (batch, batch)), preferred_element_type=jnp.float32)


def _over_queries(a, b, like):
    """a [P,K,G,M,x], b [P,K,G,M,h] -> [.., x, h] float32, summed over the queries that see the keys
    `like`: those of a row, or of all the group."""
    if like.ndim == 4:
        a, b = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in (a, b))
    return _dot(b, a, (-2, -2)).swapaxes(-1, -2)
