"""Llama and its kin in Flax NNX: declared here, split once, and seen by everything else as `Model`.

`Model` holds pure functions of a nested dict of arrays (the parameter tree below); no NNX object
crosses a `jit` boundary. Layers are stacked on axis 0. Query, key and value weights of one key head
lie together (as do gate and up), so each is one matmul and a tensor mesh can split whole heads.

    embed/embedding [V, D]
    layers/attention_norm/scale [L, D]    layers/attention/qkv [L, D, K, R+2, h]   (R queries, k, v)
    layers/attention/out [L, K, R, h, D]  layers/mlp_norm/scale [L, D]
    layers/mlp/gate_up [L, D, 2, F]       layers/mlp/down [L, F, D]
    norm/scale [D]                        head/embedding [V, D] (untied models only)
    layers/attention/qkv_bias [L, K, R+2, h]      (only with `qkv_bias`: Qwen2)
    layers/attention/q_norm/scale, k_norm/scale [L, h]    (only with `qk_norm`: Qwen3)

A dict "lora" in a layer's attention or mlp (see lora.py) is applied; without one, the plain base.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax
from jaxtyping import Array, Bool, Float, Int, Key

from grpo_jax.models import lora
from grpo_jax.models.config import LlamaConfig
from grpo_jax.models.linear import dot
from grpo_jax.types import Params

MASKED = -1e30  # added to a score; finite, so that a row with no key at all stays finite
UNROLL_LAYERS = 8  # decode loops over more layers than this instead of unrolling them


@dataclass(frozen=True)
class Model:
    """A Llama as pure functions of its parameters. Results have the compute dtype, which is bound.

    hidden(params, tokens i32[B,T], mask bool[B,T]) -> [B,T,D]: the normed last hidden state. Rows
        may be padded on either side; positions count the unmasked tokens before each.
    prefill(params, tokens i32[P,S], mask bool[P,S]) -> (hidden [P,D] of the last slot, cache)
    decode(params, token i32[B], position i32[B], prompt cache, prompt_mask bool[P,S], cache, t)
        -> (hidden [B,D], cache): token t of each completion; B/P rows share a prompt's cache.
        Its parameters are `unstack(params)`, called once, outside the loop.
    empty_cache(rows, slots) -> cache for `slots` completion tokens
    head(params) -> [V,D]: logits are `hidden @ head.T`
    """

    config: LlamaConfig
    init: Callable[[Key[Array, ""]], Params]
    hidden: Callable[..., Float[Array, "B T D"]]
    prefill: Callable
    unstack: Callable[[Params], Params]
    decode: Callable
    empty_cache: Callable
    head: Callable[[Params], Float[Array, "V D"]]


def build(
    config: LlamaConfig, *, dtype: str = "float32", remat: bool = False, lora_scale: float = 1.0
) -> Model:
    """The model's functions. `dtype`: of the matmuls; `remat`: recompute layers in the backward;
    `lora_scale`: of the adapters, where the parameters have some."""
    compute, block = jnp.dtype(dtype), partial(_block, config, lora_scale)
    return Model(
        config=config,
        init=partial(init, config),
        hidden=partial(_hidden, config, block, compute, remat),
        prefill=partial(_prefill, config, block, compute),
        unstack=partial(_unstack, config),
        decode=partial(_decode, config, block, compute),
        empty_cache=partial(_empty_cache, config, compute),
        head=partial(_head, config),
    )


def init(config: LlamaConfig, key: Key[Array, ""]) -> Params:
    """Random float32 parameters: N(0, 1/fan_in), outputs into the residual also / sqrt(2L)."""
    return nnx.to_pure_dict(nnx.state(Llama(config, rngs=nnx.Rngs(params=key)), nnx.Param))


# ------------------------------------------------------------------------------- declaration


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> nnx.Param:
    return nnx.Param(std * jax.random.normal(rngs.params(), shape))


class RMSNorm(nnx.Module):
    def __init__(self, size: int, eps: float):
        self.scale = nnx.Param(jnp.ones(size))
        self.eps = eps

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        y = x.astype(jnp.float32)
        y = y * lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + self.eps)
        return (y * self.scale[...]).astype(x.dtype)


class Attention(nnx.Module):
    """Projections of one layer; the attention itself depends on the cache and lies outside."""

    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs, ranks: dict[str, int], scale: float):
        D, K, R, h = c.hidden_size, c.num_kv_heads, c.queries_per_kv, c.head_dim
        self.qkv = _normal(rngs, (D, K, R + 2, h), D**-0.5)
        self.out = _normal(rngs, (K, R, h, D), (K * R * h * 2 * c.num_layers) ** -0.5)
        self.qkv_bias = nnx.Param(jnp.zeros((K, R + 2, h))) if c.qkv_bias else None
        self.q_norm = RMSNorm(h, c.rms_norm_eps) if c.qk_norm else None
        self.k_norm = RMSNorm(h, c.rms_norm_eps) if c.qk_norm else None
        self.lora = lora.declare(c, "attention", ranks, scale, rngs)

    def project(self, x, cos, sin):
        """x [*b, D] -> q [*b, K, R, h] (rotated, scaled), k and v [*b, K, h] (k rotated)."""
        y = dot(x, self.qkv[...], 1)
        if self.qkv_bias is not None:
            y = y + self.qkv_bias[...]
        y = y if self.lora else y.astype(x.dtype)  # the product's own output, where it is whole
        parts = {"q": y[..., :-2, :], "k": y[..., -2, :], "v": y[..., -1, :]}
        q, k, v = (lora.adapted(self.lora, t, x, y).astype(x.dtype) for t, y in parts.items())
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q = rotate(q, cos[..., None, None, :], sin[..., None, None, :]) * q.shape[-1] ** -0.5
        return q.astype(x.dtype), rotate(k, cos[..., None, :], sin[..., None, :]), v

    def merge(self, heads: Float[Array, "*b K R h"]) -> Float[Array, "*b D"]:
        y = dot(heads, self.out[...], 3)
        return lora.adapted(self.lora, "o", heads, y).astype(heads.dtype)


class MLP(nnx.Module):
    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs, ranks: dict[str, int], scale: float):
        D, F = c.hidden_size, c.intermediate_size
        self.gate_up = _normal(rngs, (D, 2, F), D**-0.5)
        self.down = _normal(rngs, (F, D), (F * 2 * c.num_layers) ** -0.5)
        self.lora = lora.declare(c, "mlp", ranks, scale, rngs)

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        y = dot(x, self.gate_up[...], 1)
        y = y if self.lora else y.astype(x.dtype)
        parts = {"gate": y[..., 0, :], "up": y[..., 1, :]}
        gate, up = (lora.adapted(self.lora, t, x, y).astype(x.dtype) for t, y in parts.items())
        inner = jax.nn.silu(gate) * up
        return lora.adapted(self.lora, "down", inner, dot(inner, self.down[...], 1)).astype(x.dtype)


class Block(nnx.Module):
    """One layer. `ranks`: of its adapters by target (none to begin with), which `scale` scales."""

    def __init__(
        self, c: LlamaConfig, rngs: nnx.Rngs, ranks: dict[str, int] | None = None, scale: float = 1
    ):
        ranks = ranks or {}
        self.attention_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.attention = Attention(c, rngs, ranks, scale)
        self.mlp_norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = MLP(c, rngs, ranks, scale)

    def __call__(self, x, cos, sin, attend):
        """attend(q, k, v) -> (heads [*b, K, R, h], extra); returns (x, extra)."""
        heads, extra = attend(*self.attention.project(self.attention_norm(x), cos, sin))
        x = x + self.attention.merge(heads)
        return x + self.mlp(self.mlp_norm(x)), extra


class Embedding(nnx.Module):
    def __init__(self, c: LlamaConfig, std: float, rngs: nnx.Rngs):
        self.embedding = _normal(rngs, (c.vocab_size, c.hidden_size), std)


class Llama(nnx.Module):
    """Holds the parameters; `_run` below applies them."""

    def __init__(self, c: LlamaConfig, *, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=c.num_layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stack(rngs):
            return Block(c, rngs)

        self.embed = Embedding(c, c.hidden_size**-0.5, rngs)
        self.layers = stack(rngs)
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        if not c.tie_embeddings:
            self.head = Embedding(c, c.hidden_size**-0.5, rngs)


def _module(declare: Callable, params: Params):
    """The declared module with `params` in place of its own (which are never allocated)."""
    graph, state = nnx.split(nnx.eval_shape(declare))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def _block(config: LlamaConfig, lora_scale: float, layer: Params) -> Block:
    """One layer, from that layer's slice of the stacked parameters, with the adapters in it."""
    return _module(lambda: Block(config, nnx.Rngs(0), lora.ranks(layer), lora_scale), layer)


# ------------------------------------------------------------------------------ RoPE, attention


def inverse_frequencies(config: LlamaConfig) -> np.ndarray:
    """[h/2] radians per position, float32; with Llama 3's scaling where the config has it."""
    freq = config.rope_theta ** -(np.arange(0, config.head_dim, 2) / config.head_dim)
    s = config.rope_scaling
    if s is not None:
        # long waves are slowed down by `factor`, short ones kept, the band between interpolated
        turns = s.original_max_position * freq / (2 * np.pi)
        smooth = (turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)
        smooth = np.clip(smooth, 0.0, 1.0)
        freq = freq * (smooth + (1.0 - smooth) / s.factor)
    return freq.astype(np.float32)


def _angles(config: LlamaConfig, position: Int[Array, "*b"]):
    angle = position[..., None].astype(jnp.float32) * inverse_frequencies(config)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "*b h"], cos, sin) -> Float[Array, "*b h"]:
    """RoPE in Hugging Face's layout: channel i is paired with i + h/2 (not with its neighbour)."""
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def positions(mask: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """How many unmasked tokens stand before each slot; 0 in the padding on the left."""
    return jnp.maximum(jnp.cumsum(mask, -1) - 1, 0)


def _attend_full(bias, q, k, v):
    """q [B,T,K,R,h], k and v [B,T,K,h], bias [B,1,1,T,T] -> [B,T,K,R,h]."""
    score = jnp.einsum("btkrh,bskh->bkrts", q, k, preferred_element_type=jnp.float32) + bias
    weight = jax.nn.softmax(score, -1).astype(v.dtype)
    y = jnp.einsum("bkrts,bskh->btkrh", weight, v, preferred_element_type=jnp.float32)
    return y.astype(q.dtype)


def _attend_shared(prompt_kv, prompt_bias, kv, bias, q):
    """One query a row over its prompt's keys (shared by the group) and its own: [B,K,R,h].

    prompt_kv: two [P,K,S,h]; prompt_bias [P,1,1,S]; kv: [B,K,h,T] and [B,K,T,h]; bias [T];
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


# ---------------------------------------------------------------------------------- application


def _head(config: LlamaConfig, params: Params) -> Float[Array, "V D"]:
    return params["embed" if config.tie_embeddings else "head"]["embedding"]


def _final_norm(config: LlamaConfig, params: Params, x):
    declare = partial(RMSNorm, config.hidden_size, config.rms_norm_eps)
    return _module(declare, params["norm"])(x)


def _run(config, block, dtype, remat, params, tokens, mask, keep_kv):
    """Every layer over a whole padded batch -> (x [B,T,D], stacked keys and values or None)."""
    cos, sin = _angles(config, positions(mask))
    T = tokens.shape[1]
    visible = jnp.tril(jnp.ones((T, T), bool)) & mask[:, None, :]
    bias = jnp.where(visible, 0.0, MASKED)[:, None, None]

    def attend(q, k, v):
        return _attend_full(bias, q, k, v), ((k, v) if keep_kv else None)

    def layer(x, weights):
        return block(weights)(x, cos, sin, attend)

    x = params["embed"]["embedding"].astype(dtype)[tokens]
    return lax.scan(jax.checkpoint(layer) if remat else layer, x, params["layers"])


def _hidden(config, block, dtype, remat, params, tokens, mask):
    x, _ = _run(config, block, dtype, remat, params, tokens, mask, keep_kv=False)
    return _final_norm(config, params, x)


def _prefill(config, block, dtype, params, tokens, mask):
    x, (k, v) = _run(config, block, dtype, False, params, tokens, mask, keep_kv=True)
    cache = (k.transpose(0, 1, 3, 2, 4), v.transpose(0, 1, 3, 2, 4))  # [L, P, K, S, h]
    return _final_norm(config, params, x[:, -1]), _by_layer(config, cache)


def _by_layer(config, stacked):
    """A tuple of layers where decode unrolls them: sliced here, not at every token."""
    if config.num_layers > UNROLL_LAYERS:
        return stacked
    return tuple(jax.tree.map(lambda a, i=i: a[i], stacked) for i in range(config.num_layers))


def _unstack(config, params: Params) -> Params:
    return params | {"layers": _by_layer(config, params["layers"])}


def _empty_cache(config, dtype, rows: int, slots: int):
    """Keys and values of the completions: one pair a layer when unrolled, else one stacked pair."""
    L, head = config.num_layers, (rows, config.num_kv_heads)
    keys, values = (*head, config.head_dim, slots), (*head, slots, config.head_dim)
    if L <= UNROLL_LAYERS:
        return tuple((jnp.zeros(keys, dtype), jnp.zeros(values, dtype)) for _ in range(L))
    return jnp.zeros((L, *keys), dtype), jnp.zeros((L, *values), dtype)


def _decode(config, block, dtype, params, token, position, prompt_cache, prompt_mask, cache, t):
    cos, sin = _angles(config, position)
    prompt_bias = jnp.where(prompt_mask, 0.0, MASKED)[:, None, None]
    slots = jax.tree.leaves(cache)[0].shape[-1]
    bias = jnp.where(jnp.arange(slots) <= t, 0.0, MASKED)
    places = [(0, 0, 0, t), (0, 0, t, 0)]  # of a new key and a new value in the cache
    x = params["embed"]["embedding"].astype(dtype)[token]

    def layer(x, weights, prompt_kv, write):
        def attend(q, k, v):
            kv, kept = write((k[..., None], v[:, :, None]))
            return _attend_shared(prompt_kv, prompt_bias, kv, bias, q), kept

        return block(weights)(x, cos, sin, attend)

    if config.num_layers <= UNROLL_LAYERS:
        new = []
        for weights, prompt_kv, pair in zip(params["layers"], prompt_cache, cache, strict=True):

            def write(new, pair=pair):
                kv = tuple(map(lax.dynamic_update_slice, pair, new, places))
                return kv, kv

            x, kv = layer(x, weights, prompt_kv, write)
            new.append(kv)
        return _final_norm(config, params, x), tuple(new)

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
    return _final_norm(config, params, x), cache
