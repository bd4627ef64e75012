"""What the models say of a rollout: log-probs of policy and reference, entropy, exact KL.

None of it needs a reward. JAX returns before the device is done, so whoever starts the passes first
and scores afterwards has the host and the device work at the same time.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from grpo_jax import hosts
from grpo_jax.types import Kl, Params, Rollout


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class PassResults:
    """Arrays on the device, which may still be computing them."""

    rollout: Rollout
    logp: Float[Array, "B T"]  # the policy's
    entropy: Float[Array, "B T"]
    ref_logp: Float[Array, "B T"] | None  # None: the algorithm has no KL
    exact_kl: Float[Array, "B T"] | None  # None unless the reward has one

    def take(self, groups: Int[np.ndarray, "N"], size: int) -> "PassResults":
        """All the groups, of `size` rows, in that order."""
        if np.array_equal(groups, np.arange(len(groups))):
            return self  # as they are, without a copy
        rows = (groups[:, None] * size + np.arange(size)).reshape(-1)
        return jax.tree.map(lambda leaf: leaf[rows], self)


def start_passes(
    kl: Kl,
    logprobs: Callable,
    exact_kl: Callable,
    params: Params,
    reference: Params | None,
    rollout: Rollout,
    group: int,
) -> PassResults:
    """Dispatch the passes that a batch of this rollout (numpy leaves) needs.

    `logprobs` and `exact_kl` are made by `policy.make_logprobs` and `policy.make_exact_kl`, which
    say what `group` is. The first call for a width compiles, and that is waited for.
    """
    if hosts.count() == 1:  # else numpy is what a program of several processes takes
        rollout = jax.tree.map(jnp.asarray, rollout)
    logp, entropy = logprobs(params, rollout, group)
    ref_logp, exact = None, None
    if kl.active:
        ref_logp, _ = logprobs(reference, rollout, group)
    if kl.exact and kl.where == "reward":
        exact = exact_kl(params, reference, rollout, group)
    return PassResults(rollout, logp, entropy, ref_logp, exact)
