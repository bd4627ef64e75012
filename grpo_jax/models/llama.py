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
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Key

from grpo_jax.kernels.matmul import lookup
from grpo_jax.kernels.rms_norm import rms_norm
from grpo_jax.models import decoding, lora
from grpo_jax.models.attention import Attention, blockwise
from grpo_jax.models.config import LlamaConfig
from grpo_jax.models.linear import PRODUCT, dot, gated
from grpo_jax.models.rope import positions, rotation
from grpo_jax.types import Params

KEPT = jax.checkpoint_policies.save_only_these_names(PRODUCT)  # by `remat="dots"`


@dataclass(frozen=True)
class Model:
    """A Llama as pure functions of its parameters. Results have the compute dtype, which is bound.

    hidden(params, tokens i32[B,T], mask bool[B,T]) -> [B,T,D]: the normed last hidden state. Rows
        may be padded on either side; positions count the unmasked tokens before each.
    answers(params, prompt i32[P,S], prompt_mask bool[P,S], completion i32[B,T]) -> [B,T,D]: the
        normed state that each completion token is drawn from. B/P consecutive rows share a prompt,
        which is computed once, gradient included. Prompts are left-padded, completions start at
        slot 0. Equal to `hidden` of prompt and completion side by side, shifted by one.
    prefill(params, tokens i32[P,S], mask bool[P,S]) -> (hidden [P,D] of the last slot, cache)
    decode(params, token i32[B], position i32[B], prompt cache, prompt_mask bool[P,S], cache,
        column, visible bool[#B,slots]) -> (hidden [B,D], cache): one more token of each completion,
        written to the cache's slot `column`; `visible` says which slots a row sees (this one too).
        B/P consecutive rows share a prompt's cache. Its parameters are `unstack(params)`, made
        once, outside the loop.
    select(prompt cache, prompts i32[R]) -> the prompt cache of those prompts, in that order
    empty_cache(rows, slots) -> cache for `slots` completion tokens
    head(params) -> [V,D]: logits are `hidden @ head.T`
    """

    config: LlamaConfig
    init: Callable[[Key[Array, ""]], Params]
    hidden: Callable[..., Float[Array, "B T D"]]
    answers: Callable[..., Float[Array, "B T D"]]
    prefill: Callable
    unstack: Callable[[Params], Params]
    decode: Callable
    select: Callable
    empty_cache: Callable
    head: Callable[[Params], Float[Array, "V D"]]


def build(
    config: LlamaConfig,
    *,
    dtype: str = "float32",
    remat: bool | str = False,
    lora_scale: float = 1.0,
    attention: Attention | None = None,
    unroll_layers: int = 64,
    turn_weights: bool | str = "auto",
    gather: Callable[[Params], Params] | None = None,
    backend: str | None = None,
) -> Model:
    """The model's functions. `dtype`: of the matmuls; `remat`: recompute layers in the backward,
    True or "dots" (keep the products with weights, but for gate and up); `lora_scale`: of the
    adapters, where the parameters have some; `attention`: over whole sequences (None:
    `attention.blockwise()`); `unroll_layers`: decode loops over the layers where there are more;
    `turn_weights`: decode has its weights as [out, in] ("auto": where that is quicker); `gather`:
    makes parameters whole that are spread over devices (sharding.py), a layer at a time, in
    `hidden`, `answers` and `head` (None: they are); `backend`: what decode is laid out for, if not
    jax's own (a CPU wants other layouts)."""
    attention, unrolled = attention or blockwise(), config.num_layers <= unroll_layers
    compute, block = jnp.dtype(dtype), partial(_block, config, lora_scale)
    cpu = (backend or jax.default_backend()) == "cpu"
    wide = cpu and config.hidden_size >= decoding.TURNED_FROM
    turned = wide if turn_weights == "auto" else bool(turn_weights)
    gather = gather or _as_they_are
    whole = partial(_gathered, config, lora_scale, gather)
    sequences = config, whole, gather, attention, compute, remat
    return Model(
        config=config,
        init=partial(init, config),
        hidden=partial(_hidden, *sequences),
        answers=partial(_answers, *sequences),
        prefill=partial(_prefill, config, block, attention, compute, unrolled),
        unstack=partial(decoding.unstack, unrolled, turned, compute),
        decode=partial(
            decoding.decode, config, block, partial(_final_norm, config), compute, unrolled, cpu
        ),
        select=partial(decoding.select, unrolled),
        empty_cache=partial(
            decoding.empty_cache, config, unrolled, jnp.float32 if cpu else compute
        ),
        head=partial(_head, config, gather),
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
        return rms_norm(x, self.scale[...], self.eps)


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

    def project(self, x, turn):
        """x [*b, D] -> q [*b, K, R, h] (rotated, scaled), k and v [*b, K, h] (k rotated)."""
        y = dot(x, self.qkv.get_value(), 1)
        if self.qkv_bias is not None:
            y = y + self.qkv_bias[...]
        y = y if self.lora else y.astype(x.dtype)  # the product's own output, where it is whole
        R = y.shape[-2] - 2  # split and not sliced: the gradient of a slice is padded and added
        q, k, v = jnp.split(y, (R, R + 1), -2)
        parts = {"q": q, "k": k.squeeze(-2), "v": v.squeeze(-2)}
        q, k, v = (lora.adapted(self.lora, t, x, y).astype(x.dtype) for t, y in parts.items())
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return (turn(q) * q.shape[-1] ** -0.5).astype(x.dtype), turn(k), v

    def merge(self, heads: Float[Array, "*b K R h"]) -> Float[Array, "*b D"]:
        y = dot(heads, self.out.get_value(), 3)
        return lora.adapted(self.lora, "o", heads, y).astype(heads.dtype)


class MLP(nnx.Module):
    def __init__(self, c: LlamaConfig, rngs: nnx.Rngs, ranks: dict[str, int], scale: float):
        D, F = c.hidden_size, c.intermediate_size
        self.gate_up = _normal(rngs, (D, 2, F), D**-0.5)
        self.down = _normal(rngs, (F, D), (F * 2 * c.num_layers) ** -0.5)
        self.lora = lora.declare(c, "mlp", ranks, scale, rngs)

    def __call__(self, x: Float[Array, "*b D"]) -> Float[Array, "*b D"]:
        if not self.lora:
            inner = gated(x, self.gate_up.get_value())
        else:
            y = jnp.split(dot(x, self.gate_up.get_value(), 1), 2, -2)
            parts = {"gate": y[0].squeeze(-2), "up": y[1].squeeze(-2)}
            gate, up = (lora.adapted(self.lora, t, x, y).astype(x.dtype) for t, y in parts.items())
            inner = jax.nn.silu(gate) * up
        return lora.adapted(self.lora, "down", inner, dot(inner, self.down.get_value(), 1)).astype(
            x.dtype
        )


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

    def __call__(self, x, turn, attend):
        """turn: `rope.rotation` of the tokens; attend(q, k, v) -> (heads [*b, K, R, h], extra).
        Returns (x, extra)."""
        heads, extra = attend(*self.attention.project(self.attention_norm(x), turn))
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


@lru_cache
def _declared(declare: Callable, *arguments):
    """(graph, abstract state) of the module that `declare` makes, whose parameters are never
    allocated. Once: declaring a layer takes as long as tracing it."""
    return nnx.split(nnx.eval_shape(partial(declare, *arguments)))


def _module(params: Params, declare: Callable, *arguments):
    """The declared module with `params` in place of its own."""
    graph, state = _declared(declare, *arguments)
    state = jax.tree.map(lambda leaf: leaf, state)  # a copy, to be written to
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def _layer(config: LlamaConfig, lora_scale: float, ranks: tuple[tuple[str, int], ...]) -> Block:
    return Block(config, nnx.Rngs(0), dict(ranks), lora_scale)


def _block(config: LlamaConfig, lora_scale: float, layer: Params) -> Block:
    """One layer, from that layer's slice of the stacked parameters, with the adapters in it."""
    return _module(layer, _layer, config, lora_scale, tuple(lora.ranks(layer).items()))


def _as_they_are(params: Params) -> Params:
    return params


def _gathered(config: LlamaConfig, lora_scale: float, gather, layer: Params) -> Block:
    return _block(config, lora_scale, gather(layer))


# ---------------------------------------------------------------------------------- application


def _head(config: LlamaConfig, gather, params: Params) -> Float[Array, "V D"]:
    return gather(params["embed" if config.tie_embeddings else "head"])["embedding"]


def _final_norm(config: LlamaConfig, params: Params, x):
    return _module(params["norm"], RMSNorm, config.hidden_size, config.rms_norm_eps)(x)


def _run(block, remat, params, x, turn, attend):
    """Every layer over x [*b, D], the embedded tokens -> (x, what `attend` keeps, stacked).

    turn: `rope.rotation` of the tokens. attend(q [*b,K,R,h], k, v [*b,K,h]) -> (heads
    [*b,K,R,h], kept).
    """

    def layer(x, weights):
        return block(weights)(x, turn, attend)

    again = jax.checkpoint(layer, policy=KEPT if remat == "dots" else None)
    return lax.scan(again if remat else layer, x, params["layers"])


def _embed(dtype, gather, params, tokens):
    return lookup(gather(params["embed"])["embedding"], tokens).astype(dtype)


def _hidden(config, block, gather, attention, dtype, remat, params, tokens, mask):
    def attend(q, k, v):
        return attention.rows(q, k, v, mask), None

    turn = rotation(config, positions(mask))
    x, _ = _run(block, remat, params, _embed(dtype, gather, params, tokens), turn, attend)
    return _final_norm(config, params, x)


def _answers(
    config, block, gather, attention, dtype, remat, params, prompt, prompt_mask, completion
):
    (P, S), (B, T) = prompt.shape, completion.shape
    if attention.answers is None:  # row by row, then
        prompt, prompt_mask = (a.repeat(B // P, 0) for a in (prompt, prompt_mask))
        tokens = jnp.concatenate([prompt, completion], 1)
        mask = jnp.pad(prompt_mask, ((0, 0), (0, T)), constant_values=True)
        x = _hidden(config, block, gather, attention, dtype, remat, params, tokens, mask)
        return x[:, S - 1 : -1]
    split, place = P * S, positions(prompt_mask)
    place = place, (place[:, -1:] + 1 + jnp.arange(T)).repeat(B // P, 0)

    def flat(prompts, answers):
        """One axis of tokens, so that each matmul is one."""
        a, b = prompts, answers
        return jnp.concatenate([a.reshape(split, *a.shape[2:]), b.reshape(B * T, *b.shape[2:])])

    def parts(x):
        first, then = jnp.split(x, (split,))
        return first.reshape(P, S, *x.shape[1:]), then.reshape(B, T, *x.shape[1:])

    def attend(q, k, v):
        first, then = zip(*map(parts, (q, k, v)), strict=True)
        prompts = attention.rows(*first, prompt_mask)
        return flat(prompts, attention.answers(*then, *first[1:], prompt_mask)), None

    x = _embed(dtype, gather, params, flat(prompt, completion))
    x, _ = _run(block, remat, params, x, rotation(config, flat(*place)), attend)
    first, then = parts(x)
    start = first[:, -1:].repeat(B // P, 0)  # what the first tokens are drawn from
    return _final_norm(config, params, jnp.concatenate([start, then[:, :-1]], 1))


def _prefill(config, block, attention, dtype, unrolled, params, tokens, mask):
    def attend(q, k, v):
        return attention.rows(q, k, v, mask), (k.swapaxes(1, 2), v.swapaxes(1, 2))  # [P, K, S, h]

    turn = rotation(config, positions(mask))
    x = _embed(dtype, _as_they_are, params, tokens)
    x, cache = _run(block, False, params, x, turn, attend)
    return _final_norm(config, params, x[:, -1]), decoding.by_layer(unrolled, cache)
