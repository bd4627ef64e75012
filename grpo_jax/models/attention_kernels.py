"""Attention by the kernel of an accelerator: cuDNN's on a GPU, Pallas' splash attention on a TPU.

Both see rows without padding on the left: each row is shifted to its first slot, which makes plain
causal attention right for every token that counts, and shifted back. They hold no scores at all,
but know nothing of shared prompts: with them, prompts are computed row by row.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.models.attention import Attention, blockwise

NAMES = ("xla", "cudnn", "splash")
_LANES = 128  # of a TPU: what sequence lengths have to be multiples of


def choose(name: str, block: int) -> Attention:
    """`xla` (any backend, float32 too; `block` is its query slots at one time), `cudnn` (a GPU of
    compute capability 8.0 or more, bfloat16 or float16) or `splash` (a TPU).

    Raises ValueError for another name.
    """
    if name == "xla":
        return blockwise(block)
    kernels = {"cudnn": _cudnn, "splash": _splash}
    if name not in kernels:
        raise ValueError(f"model.attention={name!r}: there are {', '.join(NAMES)}")
    return Attention(partial(_shifted, kernels[name]), None)


def _shifted(kernel, q, k, v, mask: Bool[Array, "B T"]):
    """`kernel(q, k, v, lengths)` of the rows moved to their first slot. What lies behind a row's
    tokens is 0: neither value nor gradient depends on what a kernel does there."""
    T, first = mask.shape[1], jnp.argmax(mask, -1)
    there = (jnp.arange(T) + first[:, None]) % T
    back = (jnp.arange(T) - first[:, None]) % T

    def move(x, place):
        return jnp.take_along_axis(x, place.reshape(*place.shape, *[1] * (x.ndim - 2)), 1)

    q, k, v = (move(x, there) for x in (q, k, v))
    lengths = mask.sum(-1, dtype=jnp.int32)
    y = kernel(q, k, v, lengths)
    y = jnp.where((jnp.arange(T) < lengths[:, None])[..., None, None, None], y, 0)
    return move(y, back)


def _cudnn(
    q: Float[Array, "B T K R h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    lengths: Int[Array, "B"],
    implementation: str = "cudnn",
) -> Float[Array, "B T K R h"]:
    B, T, K, R, h = q.shape
    y = jax.nn.dot_product_attention(  # type: ignore (its overloads want a literal)
        q.reshape(B, T, K * R, h),
        k,
        v,
        scale=1.0,  # the queries are scaled
        is_causal=True,
        query_seq_lengths=lengths,
        key_value_seq_lengths=lengths,
        implementation=implementation,
    )
    return y.reshape(q.shape)


def _splash(
    q: Float[Array, "B T K R h"],
    k: Float[Array, "B T K h"],
    v: Float[Array, "B T K h"],
    lengths: Int[Array, "B"],
    interpret: bool = False,
) -> Float[Array, "B T K R h"]:
    """Needs no lengths: behind a row's tokens there is nothing that they see."""
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    T, R = q.shape[1], q.shape[3]
    padding = -T % _LANES
    q, k, v = (jnp.pad(x, ((0, 0), (0, padding), *[(0, 0)] * (x.ndim - 2))) for x in (q, k, v))
    size = next(n for n in (512, 256, 128) if (T + padding) % n == 0)
    block = {name: size for name in ("block_q", "block_kv", "block_kv_compute")}
    block |= {f"{name}_dkv": size for name in ("block_q", "block_kv")}
    block |= {"block_kv_dkv_compute": size, "block_q_dq": size, "block_kv_dq": size}
    mask = splash.MultiHeadMask([splash.CausalMask((T + padding, T + padding))] * R)
    heads = splash.make_splash_mqa_single_device(
        mask,
        block_sizes=splash.BlockSizes(**block),  # type: ignore (one number is its default)
        interpret=interpret,
    )
    y = jax.vmap(jax.vmap(heads))(  # rows, key heads
        q.transpose(0, 2, 3, 1, 4), k.swapaxes(1, 2), v.swapaxes(1, 2)
    )
    return y.transpose(0, 3, 1, 2, 4)[:, :T].astype(q.dtype)
