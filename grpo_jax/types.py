"""The data types that the layers exchange (DESIGN.md section 4).

N prompts, G answers each, B = N*G rows (row i of prompt n is row n*G+i), S prompt slots
(left-padded), T completion slots (right-padded). The array types are registered dataclasses:
they pass through `jax.jit`, `jax.tree.map` and `jax.lax.scan` as they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from grpo_jax.rules import asks, call, proportional, sees_all_rows

Leaf = Any  # jax or numpy: a rollout is scored in host memory, and trained on in the device's
Params = dict[str, Any]  # a nested dict of arrays; everything outside models/ sees nothing else


class TrainingError(RuntimeError):
    """The run can't go on for a reason that the user can act on; the text says which."""


class RefusedError(TrainingError):
    """The run folder belongs to another run, or another process: nothing is written there."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Rollout:
    """What a sampler returns: token ids, never text."""

    prompt: Int[Leaf, "B S"]  # left-padded
    prompt_mask: Bool[Leaf, "B S"]
    completion: Int[Leaf, "B T"]  # right-padded
    mask: Bool[Leaf, "B T"]  # True through the first EOS, inclusive
    sampler_logp: Float[Leaf, "B T"]  # under the distribution really sampled; 0 behind the mask
    truncated: Bool[Leaf, "B"]  # no EOS (or stop string) within T
    version: Int[Leaf, "B"]  # of the weights that sampled the row


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Batch:
    """One rollout, scored: what the learner consumes."""

    rollout: Rollout
    advantage: Float[Array, "B"]
    old_logp: Float[Array, "B T"]
    ref_logp: Float[Array, "B T"] | None  # None when the algorithm has no KL in its loss
    keep: Bool[Array, "B"]  # False: unscorable or unfilled; the row's mask counts as empty
    group: Int[Array, "B"]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything an update changes. A frozen base (LoRA) lives outside: not donated, not saved."""

    trainable: Params  # float32 masters
    opt_state: Any
    step: Int[Array, ""]  # optimizer updates tried so far, skipped ones included
    key: Key[Array, ""]  # the run's root key: never advanced, streams are folded in
    reference: Params | None = None  # where it moves (`kl.refresh_every`); else outside


@dataclass(frozen=True)
class Kl:
    """The KL penalty: an estimator (`kernels/kl.py`), its coefficient, and where it acts."""

    estimator: Callable[..., Array]
    coef: float
    where: str  # "loss" (GRPO) or "reward" (classic RLHF)
    refresh_every: int = 0  # rollouts after which the reference moves; 0: it stays (TRL: 512 steps)
    refresh_mix: float = 0.6  # to mix * policy + (1 - mix) * reference (TR-DPO, arXiv:2404.09656)

    def __call__(self, logp: Array, ref_logp: Array, **offered: Array | None) -> Array:
        return call(self.estimator, logp, ref_logp, **offered)

    @property
    def active(self) -> bool:
        """Whether a reference policy is needed at all. A traced coefficient may be anything."""
        return not (isinstance(self.coef, int | float) and self.coef == 0)

    @property
    def exact(self) -> bool:
        """Whether the estimator needs the whole distributions at each token."""
        return self.active and asks(self.estimator, "exact")


@dataclass(frozen=True)
class Entropy:
    """The entropy bonus: its coefficient, and how it follows the entropy (`kernels/entropy.py`)."""

    coef: float  # of the first rollout
    adapt: Callable[..., tuple[Array, Array]] | None  # None: the coefficient stays

    @property
    def active(self) -> bool:
        fixed = self.adapt is None and isinstance(self.coef, int | float)
        return not (fixed and self.coef == 0)


@dataclass(frozen=True)
class Filter:
    """Which groups are trained on, and how hard to look for more of them (dynamic sampling)."""

    rule: Callable[[Array], Array]  # score [N, G] -> keep bool[N]
    on: str | None  # the reward part that `rule` sees, before shaping; None: the total
    max_rounds: int  # rollouts per step at most; 1 masks the dropped groups and draws no more
    on_exhausted: str  # "partial", "skip" or "error"
    surplus: str = "drop"  # kept groups beyond the batch: "drop", or "keep" for the next step


@dataclass(frozen=True)
class Algorithm:
    """One value an axis (DESIGN.md section 2). Closed over by the jitted step, never traced."""

    shaping: Callable[..., Array]
    filter: Filter
    truncation: Callable[..., Array]
    combine: Callable[..., Array]
    baseline: Callable[..., Array]
    scale: Callable[..., Array]
    ratio: Callable[..., Array]
    clip: Callable[..., tuple[Array, Array]]
    select: Callable[..., Array]
    aggregation: Callable[..., Array]
    kl: Kl
    correction: Callable[..., Array]
    entropy: Entropy

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss needs the policy's entropy at each token."""
        return self.entropy.active or asks(self.select, "entropy")

    @property
    def silent_when_tied(self) -> bool:
        """Whether rows without an advantage can't have a gradient: no KL, no bonus, and an
        objective that is known to be a multiple of the advantage (this project's are)."""
        leash = self.kl.active and self.kl.where == "loss"
        known = proportional(self.clip) and not self.needs_entropy
        return known and not leash and not self.sees_all_rows

    @property
    def sees_all_rows(self) -> bool:
        """Whether a rule of the loss compares rows, and so needs the whole minibatch at once."""
        rules = (self.ratio, self.clip, self.select, self.kl.estimator, self.correction)
        return any(sees_all_rows(rule) for rule in rules)


class SamplingParams(NamedTuple):
    """How to draw: hashable, so that it can select a compiled program."""

    max_tokens: int
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 is off


class Sampler(Protocol):
    """Anything that turns prompts into rollouts: token ids in and out, never text."""

    def load(self, params: Params, version: int) -> None:
        """Take new weights; `version` is stamped on every row sampled from them."""
        ...

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        row_ids: Int[np.ndarray, "B"],
        params: SamplingParams,
        key: Key[Array, ""],
    ) -> Rollout:
        """B = len(row_ids) completions of P = len(prompts) prompts, B/P of each, prompt-major."""
        ...
