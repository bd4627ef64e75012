"""One token at a time: keys and values of prompts and answers, and the layers over one new token.

A prompt's keys and values exist once and are read by all of its rows. An answer's are written in
place, one column a step, into arrays that the decode loop carries.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax

from grpo_jax.models.attention import MASKED
from grpo_jax.models.linear import Turned
from grpo_jax.models.rope import rotation
from grpo_jax.types import Params


def _attend(prompt_kv, prompt_bias, kv, bias, q):
    """One query a row over its prompt's keys (shared by the group) and its own: [B,K,R,h].

    prompt_kv: two [P,K,S,h]; prompt_bias [P,1,1,S]; kv: [B,K,h,T] and [B,K,T,h]; bias [#B,1,1,T];
    q [B,K,R,h]. Own keys lie channel-first: a query that meets T of them is twice as fast on a CPU.
    One softmax over both, in two parts: side by side they would be copied and slower to add up.
    """
    (pk, pv), (k, v) = prompt_kv, kv
    P, K, *_ = pk.shape
    B, _, R, _ = q.shape
    G = B // P

    def by_prompt(a):
        """[B,K,R,n] -> [P,K,G*R,n], the queries that meet the same keys."""
        return a.reshape(P, G, K, R, -1).transpose(0, 2, 1, 3, 4).reshape(P, K, G * R, -1)

    def by_row(a):
        return a.reshape(P, K, G, R, -1).transpose(0, 2, 1, 3, 4).reshape(B, K, R, -1)

    product = partial(jnp.einsum, preferred_element_type=jnp.float32)
    first = product("pkmh,pksh->pkms", by_prompt(q), pk) + prompt_bias
    second = product("bkrh,bkhs->bkrs", q.astype(k.dtype), k) + bias
    top = jnp.maximum(by_row(first.max(-1)), second.max(-1, keepdims=True))
    first, second = jnp.exp(first - by_prompt(top)), jnp.exp(second - top)
    total = by_row(first.sum(-1)) + second.sum(-1, keepdims=True)
    y = by_row(product("pkms,pksh->pkmh", first.astype(q.dtype), pv))
    y = y + product("bkrs,bksh->bkrh", second.astype(q.dtype).astype(v.dtype), v)
    return (y / total).astype(q.dtype)


def by_layer(unrolled: bool, stacked):
    """A tuple of layers where decode unrolls them: sliced here, not at every token."""
    if not unrolled:
        return stacked
    layers = len(jax.tree.leaves(stacked)[0])
    return tuple(jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(layers))


SUMMED = {"qkv": 1, "out": 3, "gate_up": 1, "down": 1}  # axes of these weights that a product sums
TURNED_FROM = 512  # of a model's width, on a CPU; smaller matrices stay in its caches anyway


def unstack(unrolled: bool, turned: bool, dtype, params: Params) -> Params:
    """As the loop reads them: converted once, taken apart where it is unrolled, and laid out
    anew where `turned`."""

    def converted(path, leaf):
        exact = path[-1].key in ("scale", "qkv_bias")  # added or multiplied in float32
        return leaf if exact else leaf.astype(dtype)

    def turn(path, leaf):
        axes = SUMMED.get(path[-1].key)
        if axes is None:
            return leaf
        of = partial(Turned.of, axes=axes)
        return of(leaf) if unrolled else jax.vmap(of)(leaf)

    layers = jax.tree_util.tree_map_with_path(converted, params["layers"])
    layers = by_layer(unrolled, layers)
    layers = jax.tree_util.tree_map_with_path(turn, layers) if turned else layers
    return params | {"layers": layers}


def select(unrolled: bool, prompt_cache, prompts):
    """Copies of the keys and values of `prompts` [R], in that order."""
    axis = 0 if unrolled else 1  # behind the layers, where stacked
    return jax.tree.map(lambda a: a.take(prompts, axis, mode="clip"), prompt_cache)


def empty_cache(config, unrolled: bool, dtype, rows: int, slots: int):
    """Keys and values of the completions: one pair a layer when unrolled, else one stacked pair.

    `dtype` holds those of the compute dtype. On a CPU it is float32: XLA writes into a bfloat16
    array by converting all of it, there and back (ten times slower, more so the longer it is).
    """
    L, head = config.num_layers, (rows, config.num_kv_heads)
    keys, values = (*head, config.head_dim, slots), (*head, slots, config.head_dim)
    if unrolled:
        return tuple((jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in range(L))
    return jnp.zeros((L, *keys), dtype), jnp.zeros((L, *values), dtype)


def _written(kept, new, place):
    return lax.dynamic_update_slice(kept, new.astype(kept.dtype), place)


def decode(
    config,
    block,
    norm,
    dtype,
    unrolled,
    few,
    params,
    token,
    position,
    prompt_cache,
    prompt_mask,
    cache,
    column,
    visible,
):
    """`Model.decode`; `block` makes a layer of its weights, `norm` is the last one, `few` is that
    of `rope.rotation`."""
    turn = rotation(config, position, few=few)
    prompt_bias = jnp.where(prompt_mask, 0.0, MASKED)[:, None, None]
    bias = jnp.where(visible, 0.0, MASKED)[:, None, None]
    places = [(0, 0, 0, column), (0, 0, column, 0)]  # of a new key and a new value in the cache
    x = params["embed"]["embedding"][token].astype(dtype)

    def layer(x, weights, prompt_kv, write):
        def attend(q, k, v):
            kv, kept = write((k[..., None], v[:, :, None]))
            return _attend(prompt_kv, prompt_bias, kv, bias, q), kept

        return block(weights)(x, turn, attend)

    if unrolled:
        new = []
        for weights, prompt_kv, pair in zip(params["layers"], prompt_cache, cache, strict=True):

            def write(new, pair=pair):
                kv = tuple(map(_written, pair, new, places))
                return kv, kv

            x, kv = layer(x, weights, prompt_kv, write)
            new.append(kv)
        return norm(params, x), tuple(new)

    def at(tree, index):
        return jax.tree.map(lambda a: lax.dynamic_index_in_dim(a, index, 0, keepdims=False), tree)

    def body(index, carry):
        # the stacked cache is carried and written in place: as a scan's xs/ys it would be copied
        x, cache = carry

        def write(new):
            new = jax.tree.map(lambda a: a[None], new)
            at_layer = [(index, *place) for place in places]
            kept = tuple(map(_written, cache, new, at_layer))
            return at(kept, index), kept

        return layer(x, at(params["layers"], index), at(prompt_cache, index), write)

    x, cache = lax.fori_loop(0, config.num_layers, body, (x, cache))
    return norm(params, x), cache
