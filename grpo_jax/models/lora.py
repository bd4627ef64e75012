"""Low-rank adapters (LoRA, arXiv 2106.09685, section 4.1): y = x W + scale * (x A) B.

Adapters are a nested dict of arrays beside the base's, in the same places: a layer's "attention"
and "mlp" have a dict "lora" with a pair of matrices for each target. `join` lays the two trees over
each other, and llama.py applies a pair where it finds one; the base alone is the model without
adapters. Layers are stacked on axis 0, r is the rank, the other letters are those of llama.py:

    layers/attention/lora/q   a [L, D, r]        b [L, r, K, R, h]
    layers/attention/lora/k   a [L, D, r]        b [L, r, K, h]       (v alike)
    layers/attention/lora/o   a [L, K, R, h, r]  b [L, r, D]
    layers/mlp/lora/gate      a [L, D, r]        b [L, r, F]          (up alike)
    layers/mlp/lora/down      a [L, F, r]        b [L, r, D]
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jaxtyping import Array, Float, Key

from grpo_jax.models.config import LlamaConfig
from grpo_jax.models.linear import dot
from grpo_jax.types import Params

PART = dict.fromkeys(("q", "k", "v", "o"), "attention") | dict.fromkeys(
    ("gate", "up", "down"), "mlp"
)
TARGETS = tuple(PART)


@dataclass(frozen=True)
class LoraSettings:
    """`lora` in the config. Raises ValueError for what no adapter can have."""

    rank: int  # 0: no adapters, all parameters are trained
    alpha: float  # the adapters' output is multiplied by alpha / rank
    targets: tuple[str, ...]  # of q, k, v, o, gate, up, down

    def __post_init__(self):
        if self.rank < 0:
            raise ValueError(f"lora.rank={self.rank}: a positive number, or 0 for no adapters")
        unknown = [name for name in self.targets if name not in TARGETS]
        if unknown:
            raise ValueError(f"lora.targets: unknown {unknown}; there are {', '.join(TARGETS)}")
        twice = sorted({name for name in self.targets if self.targets.count(name) > 1})
        if twice:
            raise ValueError(f"lora.targets: {', '.join(twice)} more than once")
        if not self.active:
            return
        if not self.targets:
            raise ValueError(f"lora.targets is empty, but lora.rank={self.rank}")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora.alpha={self.alpha}: a positive number")

    @property
    def active(self) -> bool:
        """Whether there are adapters at all."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """What the adapters' output is multiplied by; 1 where there are none."""
        return self.alpha / self.rank if self.active else 1.0


class LowRank(nnx.Module):
    """One target of one layer. A is uniform in +-1/sqrt(fan-in), as peft's; B is zero."""

    def __init__(self, config: LlamaConfig, target: str, rank: int, scale: float, rngs: nnx.Rngs):
        inside, outside = _shape(config, target)
        bound = math.prod(inside) ** -0.5
        self.a = nnx.Param(
            jax.random.uniform(rngs.params(), (*inside, rank), minval=-bound, maxval=bound)
        )
        self.b = nnx.Param(jnp.zeros((rank, *outside)))
        self.scale = scale

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """x [*b, *in] -> float32 [*b, *out]; between the factors it has x's dtype."""
        a = self.a[...]
        return self.scale * dot(dot(x, a, a.ndim - 1).astype(x.dtype), self.b[...], 1)


def declare(
    config: LlamaConfig, part: str, ranks: Mapping[str, int], scale: float, rngs: nnx.Rngs
) -> nnx.Dict:
    """The adapters of `part` ("attention" or "mlp") of one layer, out of all of its `ranks`."""
    own = {target: rank for target, rank in ranks.items() if PART[target] == part}
    return nnx.Dict({t: LowRank(config, t, rank, scale, rngs) for t, rank in own.items()})


def ranks(layers: Params) -> dict[str, int]:
    """target -> rank of the adapters that a layer's parameters (or the stacked ones) have."""
    pairs = {}
    for part in ("attention", "mlp"):
        pairs |= layers[part].get("lora", {})
    return {target: pair["a"].shape[-1] for target, pair in pairs.items()}


def adapted(adapters: Mapping[str, LowRank], target: str, x: Any, y: Any) -> Any:
    """y, with the low-rank product of x added where there is one for `target`."""
    pair = adapters.get(target)
    return y if pair is None else y + pair(x)


def init(config: LlamaConfig, settings: LoraSettings, key: Key[Array, ""]) -> Params:
    """Fresh float32 adapters, which change nothing yet.

    A target's numbers depend on `key` and on its name, not on what other targets there are.
    """
    parts: dict[str, dict] = {}
    for target in settings.targets if settings.active else ():
        own = jax.random.fold_in(key, TARGETS.index(target))
        draw = partial(_draw, config, target, settings.rank)
        pair = jax.vmap(draw)(jax.random.split(own, config.num_layers))
        parts.setdefault(PART[target], {"lora": {}})["lora"][target] = pair
    return {"layers": parts} if parts else {}


def _draw(config: LlamaConfig, target: str, rank: int, key: Key[Array, ""]) -> Params:
    pair = LowRank(config, target, rank, 1.0, nnx.Rngs(params=key))
    return nnx.to_pure_dict(nnx.state(pair, nnx.Param))


def join(base: Params, adapters: Params) -> Params:
    """Both trees in one: new dicts, the same arrays. Raises ValueError for a leaf in both."""
    result = dict(base)
    for key, value in adapters.items():
        mine = base.get(key)
        if isinstance(mine, dict) and isinstance(value, dict):
            result[key] = join(mine, value)
        elif key in base:
            raise ValueError(f"both the base and the adapters have {key!r}")
        else:
            result[key] = value
    return result


def merge(config: LlamaConfig, params: Params, scale: float) -> Params:
    """Base and adapters (as `join` makes them) -> plain parameters of the same function.

    The products and sums are float32, and so are the weights that an adapter has changed, whatever
    the base's dtype is; all others stay as they are. Without adapters, `params` itself.
    """
    layers = params["layers"]
    rank = ranks(layers)
    if not rank:
        return params
    plain = dict(layers)
    for part in ("attention", "mlp"):
        pairs = layers[part].get("lora", {})
        weights = {name: value for name, value in layers[part].items() if name != "lora"}
        for target, pair in pairs.items():
            leaf, index = _place(config, target)
            weight = jnp.asarray(weights[leaf], jnp.float32)
            weights[leaf] = weight.at[index].add(scale * _product(pair))
        plain[part] = weights
    return params | {"layers": plain}


def _product(pair: Params) -> Float[Array, "L ..."]:
    """a [L, *in, r] and b [L, r, *out] -> [L, *in, *out], float32 at any default precision."""
    a, b = (jnp.asarray(pair[name], jnp.float32) for name in ("a", "b"))
    contract = (((a.ndim - 1,), (1,)), ((0,), (0,)))
    return lax.dot_general(a, b, contract, precision=lax.Precision.HIGHEST)


def count(tree: Any) -> int:
    """How many numbers a tree of arrays (or of their shapes) holds."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def _shape(config: LlamaConfig, target: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Input and output axes of the weight that `target` adapts."""
    D, F, h = config.hidden_size, config.intermediate_size, config.head_dim
    K, R = config.num_kv_heads, config.queries_per_kv
    return {
        "q": ((D,), (K, R, h)),
        "k": ((D,), (K, h)),
        "v": ((D,), (K, h)),
        "o": ((K, R, h), (D,)),
        "gate": ((D,), (F,)),
        "up": ((D,), (F,)),
        "down": ((F,), (D,)),
    }[target]


def _place(config: LlamaConfig, target: str) -> tuple[str, tuple[Any, ...]]:
    """The leaf of the target's weight, and its part of the stacked leaf."""
    R = config.queries_per_kv
    return {
        "q": ("qkv", (..., slice(R), slice(None))),
        "k": ("qkv", (..., R, slice(None))),
        "v": ("qkv", (..., R + 1, slice(None))),
        "o": ("out", (...,)),
        "gate": ("gate_up", (..., 0, slice(None))),
        "up": ("gate_up", (..., 1, slice(None))),
        "down": ("down", (...,)),
    }[target]
