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
from grpo_jax.models.rope import angles
from grpo_jax.types import Params


def _attend(prompt_kv, prompt_bias, kv, bias, q):
    """One query a row over its prompt's keys (shared by the group) and its own: [B,K,R,h].

    prompt_kv: two [P,K,S,h]; prompt_bias [P,1,1,S]; kv: [B,K,h,T] and [B,K,T,h]; bias [#B,1,1,T];
    q [B,K,R,h]. Own keys lie channel-first: a query that meets T of them is twice as fast on a CPU.
    """
    (pk, pv), (k, v) = prompt_kv, kv
    P, K, S, h = pk.shape
    B, _, R, _ = q.shape
    G = B // P
    grouped = q.reshape(P, G, K, R, h).transpose(0, 2, 1, 3, 4).reshape(P, K, G * R, h)
    first = jnp.einsum("pkmh,pksh->pkms", grouped, pk, preferred_element_type=jnp.float32)
    first = (first + prompt_bias).reshape(P, K, G, R, S).transpose(0, 2, 1, 3, 4)
    second = jnp.einsum("bkrh,bkhs->bkrs", q, k, preferred_element_type=jnp.float32) + bias
    score = jnp.concatenate([first.reshape(B, K, R, S), second], -1)
    weight = jax.nn.softmax(score, -1).astype(q.dtype)
    wp = weight[..., :S].reshape(P, G, K, R, S).transpose(0, 2, 1, 3, 4).reshape(P, K, G * R, S)
    y = jnp.einsum("pkms,pksh->pkmh", wp, pv, preferred_element_type=jnp.float32)
    y = y.reshape(P, K, G, R, h).transpose(0, 2, 1, 3, 4).reshape(B, K, R, h)
    own = jnp.einsum("bkrs,bksh->bkrh", weight[..., S:], v, preferred_element_type=jnp.float32)
    return (y + own).astype(q.dtype)


def by_layer(unrolled: bool, stacked):
    """A tuple of layers where decode unrolls them: sliced here, not at every token."""
    if not unrolled:
        return stacked
    layers = len(jax.tree.leaves(stacked)[0])
    return tuple(jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(layers))


SUMMED = {"qkv": 1, "out": 3, "gate_up": 1, "down": 1}  # axes of these weights that a product sums
_SMALL = 512  # of a model's width; below it a matrix stays in the caches, however it lies


def turning_pays(config, dtype) -> bool:
    """Whether weights that are turned are read quicker, as measured: docs/performance.md."""
    return jax.default_backend() == "cpu" and dtype == jnp.bfloat16 and config.hidden_size >= _SMALL


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
    """Keys and values of the completions: one pair a layer when unrolled, else one stacked pair."""
    L, head = config.num_layers, (rows, config.num_kv_heads)
    keys, values = (*head, config.head_dim, slots), (*head, slots, config.head_dim)
    if unrolled:
        return tuple((jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in range(L))
    return jnp.zeros((L, *keys), dtype), jnp.zeros((L, *values), dtype)


def decode(
    config,
    block,
    norm,
    dtype,
    unrolled,
    params,
    token,
    position,
    prompt_cache,
    prompt_mask,
    cache,
    column,
    visible,
):
    """`Model.decode`; `block` makes a layer of its weights, `norm` is the last one."""
    cos, sin = angles(config, position)
    prompt_bias = jnp.where(prompt_mask, 0.0, MASKED)[:, None, None]
    bias = jnp.where(visible, 0.0, MASKED)[:, None, None]
    places = [(0, 0, 0, column), (0, 0, column, 0)]  # of a new key and a new value in the cache
    x = params["embed"]["embedding"][token].astype(dtype)

    def layer(x, weights, prompt_kv, write):
        def attend(q, k, v):
            kv, kept = write((k[..., None], v[:, :, None]))
            return _attend(prompt_kv, prompt_bias, kv, bias, q), kept

        return block(weights)(x, cos, sin, attend)

    if unrolled:
        new = []
        for weights, prompt_kv, pair in zip(params["layers"], prompt_cache, cache, strict=True):

            def write(new, pair=pair):
                kv = tuple(map(lax.dynamic_update_slice, pair, new, places))
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
            kept = tuple(map(lax.dynamic_update_slice, cache, new, at_layer))
            return at(kept, index), kept

        return layer(x, at(params["layers"], index), at(prompt_cache, index), write)

    x, cache = lax.fori_loop(0, config.num_layers, body, (x, cache))
    return norm(params, x), cache
