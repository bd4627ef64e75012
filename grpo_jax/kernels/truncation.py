"""Axis `truncation`: whether an answer that was cut off at the length limit is trained on.

Every value is `(truncated bool[B]) -> keep bool[B]`. A row that isn't kept has an empty mask in the
loss. Its reward still counts in its group's statistics, and the row itself in the denominators that
count rows (`kernels/aggregation.py`): only its own terms are gone.
"""

import jax.numpy as jnp
from jaxtyping import Array, Bool


def keep(truncated: Bool[Array, "B"]) -> Bool[Array, "B"]:
    """Every row, cut off or not."""
    return jnp.ones_like(truncated)


def mask(truncated: Bool[Array, "B"]) -> Bool[Array, "B"]:
    """The rows that came to an end (overlong filtering, a part of DAPO, arXiv:2503.14476, section
    3.4; TRL's `mask_truncated_completions`)."""
    return ~truncated
