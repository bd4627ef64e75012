"""Axis `entropy`: how the coefficient of the entropy bonus follows the policy's entropy.

Every value is `(coef, entropy) -> (coef of the next rollout, coef applied to this one)`, where
`entropy` is the mean over the tokens of the current rollout, in nats. Both are plain numbers or
scalars. (`types.Entropy` without such a rule keeps its coefficient.)
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from grpo_jax.kernels.masked import Knob


def adaptive(
    coef: Knob, entropy: Knob, *, target: Knob, step: Knob, low: Knob, high: Knob
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """A bonus only where the entropy is at or below a target, larger the longer it stays there
    (Skywork-OR1, arXiv:2505.22312).

    The coefficient of rollout k applies if the entropy of rollout k is at most `target`, else 0;
    the next one is `step` higher or lower, by the same test. TRL does the same once an optimizer
    step with the entropy of the step before, so that its first step has no bonus at all.

    Args:
      target: nats a token.
      low, high: bounds of the coefficient.

    Returns:
      The next coefficient, and the one to apply now.
    """
    scarce = jnp.asarray(entropy) <= target
    following = jnp.clip(jnp.where(scarce, coef + step, coef - step), low, high)
    return following, jnp.where(scarce, coef, 0.0)
