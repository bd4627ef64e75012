"""Rotary position embedding (Su et al., arXiv:2104.09864) in Hugging Face's layout."""

from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from grpo_jax.models.config import LlamaConfig


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


def angles(config: LlamaConfig, position: Int[Array, "*b"]):
    angle = position[..., None].astype(jnp.float32) * inverse_frequencies(config)
    return jnp.cos(angle), jnp.sin(angle)


def rotate(x: Float[Array, "*b h"], cos, sin) -> Float[Array, "*b h"]:
    """RoPE in Hugging Face's layout: channel i is paired with i + h/2 (not with its neighbour)."""
    a, b = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(x.dtype)


def rotate_few(x: Float[Array, "*b h"], cos, sin) -> Float[Array, "*b h"]:
    """`rotate`, the pairs swapped by a product: quicker on a CPU for one token a row, where XLA
    puts two halves side by side number by number. For whole sequences it is slower."""
    h, x32 = x.shape[-1], x.astype(jnp.float32)
    swap = np.roll(np.eye(h, dtype=np.float32), h // 2, 1)
    swap[h // 2 :] *= -1  # (a, b) @ swap = (-b, a), exactly
    swapped = jnp.dot(x32.reshape(-1, h), swap, precision="highest").reshape(x.shape)
    cos, sin = (jnp.concatenate([angle, angle], -1) for angle in (cos, sin))
    return (x32 * cos + swapped * sin).astype(x.dtype)


def rotation(config: LlamaConfig, position: Int[Array, "*b"], *, few: bool = False) -> Callable:
    """What turns vectors [*b, *heads, h] of tokens at these positions; `few`: by `rotate_few`."""
    angle = angles(config, position)
    by = rotate_few if few else rotate

    def turn(x: Float[Array, "*b h"]) -> Float[Array, "*b h"]:
        heads = (1,) * (x.ndim - position.ndim - 1)
        return by(x, *(a.reshape(*position.shape, *heads, -1) for a in angle))

    return turn


def positions(mask: Bool[Array, "B T"]) -> Int[Array, "B T"]:
    """How many unmasked tokens stand before each slot; 0 in the padding on the left."""
    return jnp.maximum(jnp.cumsum(mask, -1) - 1, 0)
