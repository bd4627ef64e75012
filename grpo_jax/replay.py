"""A recorded rollout through other objectives: what a change does to the gradient, before any run.

Everything is computed as training computes it: `score_groups` makes the advantages, the rule of
`aggregation` the weights, `policy_loss` the loss, `token_stats` the policy. Two things differ from
a run. The whole batch is one minibatch. And the answers are those that were recorded: groups that
an objective's filter drops are masked, not replaced by others.

All objectives share the forward pass and the program of the backward one; what each compiles for
itself is a loss of [B, T] numbers.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

from grpo_jax.learner import UPDATE, loss
from grpo_jax.models.llama import Model
from grpo_jax.policy import PolicySettings, TokenStats, cut, stats_by_parts, token_stats, whole
from grpo_jax.recording import Recording
from grpo_jax.rollout import make_batch
from grpo_jax.rules import asks
from grpo_jax.types import Algorithm, Batch, Params, Rollout

# pass rates of a group, upper ends included, as in `metrics.weight_metrics`; the first and the last
# are groups in which all answers are alike
PASS_RATES = (("none", 0.0), ("hard", 0.25), ("medium", 0.75), ("easy", 1 - 1e-6), ("all", 1.0))


class ReplayError(ValueError):
    """An objective that this recording can't be put through. The text says which, and why."""


@dataclass(frozen=True)
class Objective:
    """An algorithm under a name. `entropy_coef` None: as in the first rollout of a run."""

    name: str
    algorithm: Algorithm
    entropy_coef: float | None = None


@dataclass(frozen=True)
class Bin:
    """Some of the recorded answers, the same for every objective."""

    kind: str  # "outcome", "length" or "pass rate"
    name: str
    rows: Bool[np.ndarray, "B"]
    answers: float  # their share of the answers
    tokens: float  # and of the tokens


@dataclass(frozen=True)
class Outcome:
    """One objective on the recorded rollout."""

    name: str
    loss: float
    grad_norm: float  # of the model's parameters
    clip_low: float  # share of the loss's tokens that are clipped, at A < 0
    clip_high: float  # and at A > 0
    kept: float  # share of the answers that are in the loss
    shares: tuple[float, ...]  # of the gradient, by bin (`gradient_shares`); NaN without gradient


@dataclass(frozen=True)
class Replay:
    """Objectives side by side."""

    step: int
    at: str
    bins: tuple[Bin, ...]
    outcomes: tuple[Outcome, ...]
    cosine: Float[np.ndarray, "K K"]  # of the gradients; NaN beside a gradient of 0


@dataclass(frozen=True)
class Passes:
    """The passes through the model that objectives share, each made once."""

    recording: Recording
    model: Model
    settings: PolicySettings
    base: Params | None = None  # with LoRA: the frozen one
    _made: dict[tuple, TokenStats | Params] = field(default_factory=dict)
    _programs: dict[str, Callable] = field(default_factory=dict)

    @property
    def rollout(self) -> Rollout:
        return jax.tree.map(jnp.asarray, self.recording.answers.rollout)

    def params(self, name: str) -> Params:
        """What the run trains: "before", "after" or the "reference" of it."""

        def load() -> Params:
            if name == "reference" and self.base is not None and not self.recording.moves:
                return {}  # the base itself
            return jax.tree.map(jnp.asarray, self.recording.params(name))

        return self._once((name,), load)

    def stats(self, name: str, exact: bool = False) -> TokenStats:
        """The policy with these weights at each recorded token; `exact`: and its KL from the
        reference."""

        def make() -> TokenStats:
            program = self._program("stats", _make_stats)
            return program(self.params(name), self.base, self._reference(exact), self.rollout)

        return self._once((name, exact), make)

    def pull_back(self, name: str, cotangent: TokenStats) -> Params:
        """The gradient in what the run trains, from the one in what the loss sees of the policy."""
        reference = self._reference(cotangent.exact_kl is not None)
        program = self._program("pull_back", _make_pull_back)
        return program(self.params(name), self.base, reference, self.rollout, cotangent)

    def _reference(self, exact: bool) -> Params | None:
        return whole(self.base, self.params("reference")) if exact else None

    def _once(self, name: tuple, make: Callable):
        if name not in self._made:
            self._made[name] = make()
        return self._made[name]

    def _program(self, name: str, make: Callable) -> Callable:
        if name not in self._programs:
            self._programs[name] = jax.jit(make(self.model, self.settings))
        return self._programs[name]


def replay(
    recording: Recording,
    objectives: Sequence[Objective],
    model: Model,
    settings: PolicySettings,
    at: str = "after",
    base: Params | None = None,
) -> Replay:
    """Put a recorded rollout through objectives, at the weights of before or after its updates.

    "before" is the first update of the rollout: on-policy, every ratio is 1 and no clip acts.
    "after" is what one more epoch would do: the policy has moved by the run's own updates, so that
    ratio and clip act. All gradients are held in host memory at once, in float32. With a `base`
    (frozen, LoRA), what was recorded are adapters, and so are the gradients.

    Raises ReplayError (before anything compiles) and RecordingError.
    """
    refuse(recording, objectives)
    if recording.moment.base is not None and base is None:
        raise ReplayError("this is a recording of adapters (LoRA): it is replayed with their base")
    passes = Passes(recording, model, settings, base)
    bins = make_bins(recording)
    outcomes, gradients = [], []
    for objective in objectives:
        outcome, gradient = measure(passes, objective, at, bins)
        outcomes.append(outcome)
        gradients.append(jax.device_get(gradient))
    return Replay(recording.moment.step, at, bins, tuple(outcomes), cosines(gradients))


def refuse(recording: Recording, objectives: Sequence[Objective]) -> None:
    """Raise ReplayError for the first objective that needs what was not recorded."""
    parts = recording.answers.rewards.parts
    for objective in objectives:
        algorithm = objective.algorithm
        if asks(algorithm.baseline, "greedy") and recording.answers.greedy is None:
            raise ReplayError(
                f"{objective.name}: its baseline needs the reward of a greedy answer, which the "
                "recorded run did not sample; record a run with baseline=greedy"
            )
        on = algorithm.filter.on
        if on is not None and on not in parts:
            raise ReplayError(
                f"{objective.name}: filter.on={on} is no part of the recorded reward "
                f"({', '.join(parts)})"
            )


def measure(
    passes: Passes, objective: Objective, at: str, bins: Sequence[Bin]
) -> tuple[Outcome, Params]:
    """One objective, and its gradient in what the run trains."""
    recording, algorithm = passes.recording, objective.algorithm
    batch = batch_for(passes, algorithm)
    exact = algorithm.kl.exact and algorithm.kl.where == "loss"
    key = jax.random.fold_in(jax.random.key(recording.moment.config["seed"]), UPDATE)
    backward = jax.jit(partial(loss_and_cotangent, algorithm))
    value, sums, cotangent = backward(
        passes.stats(at, exact),
        batch,
        _entropy_coef(recording, objective),
        jax.random.fold_in(key, recording.moment.updates),  # that of the rollout's first update
    )
    gradient = passes.pull_back(at, cotangent)
    sums = {name: float(total) for name, total in sums.items()}
    tokens = max(sums["tokens"], 1.0)
    outcome = Outcome(
        name=objective.name,
        loss=float(value),
        grad_norm=_product(gradient, gradient) ** 0.5,
        clip_low=sums["clip_low"] / tokens,
        clip_high=sums["clip_high"] / tokens,
        kept=float(batch.keep.mean()),
        shares=gradient_shares(np.asarray(cotangent.logp), bins),
    )
    return outcome, gradient


def batch_for(passes: Passes, algorithm: Algorithm) -> Batch:
    """The batch that a run of this algorithm would make of the recorded answers."""
    recording, kl, rollout = passes.recording, algorithm.kl, passes.rollout
    answers, old_logp = recording.answers, jnp.asarray(recording.old_logp)
    on = algorithm.filter.on
    score = answers.rewards.total if on is None else answers.rewards.parts[on]
    keep = np.asarray(algorithm.filter.rule(jnp.asarray(answers.grouped(score))))
    ref_logp, penalty = None, None
    if kl.active:
        ref_logp = passes.stats("reference").logp
        if kl.where == "reward":
            exact = passes.stats("before", exact=True).exact_kl if kl.exact else None
            now = kl(old_logp, ref_logp, log_ratio=jnp.zeros_like(old_logp), exact=exact)
            per_row = jnp.where(rollout.mask, now, 0.0).sum(-1)
            penalty = kl.coef * per_row.reshape(len(answers), -1)
    known = old_logp, ref_logp, penalty
    return make_batch(algorithm, recording.moment.weights, answers, keep, rollout, *known)


def loss_and_cotangent(
    algorithm: Algorithm, stats: TokenStats, batch: Batch, entropy_coef, key
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""]], TokenStats]:
    """(loss, sums of `policy_loss`, gradient of the loss in each of `stats`), of all rows at once.

    Micro-batches add up to this (`learner.make_gradient`), so there are none here.
    """
    mask = batch.rollout.mask & batch.keep[:, None]
    weight = algorithm.aggregation(mask, batch.group)

    def of(stats: TokenStats):
        return loss(algorithm, entropy_coef, key, stats, batch, mask, weight)

    (value, sums), cotangent = jax.value_and_grad(of, has_aux=True)(stats)
    return value, sums, cotangent


def gradient_shares(cotangent: Float[np.ndarray, "B T"], bins: Sequence[Bin]) -> tuple[float, ...]:
    """By bin: the sum over its tokens of |d loss / d logp|, divided by that over all tokens.

    logp is that of the sampled token. What the loss sees of the policy beside it, the entropy (of
    a bonus) and the full-vocabulary KL (kl=exact), pulls at the parameters too and isn't in here.
    NaN where no token has a gradient.
    """
    rows = np.abs(cotangent.astype(np.float64)).sum(-1)
    total = rows.sum()
    return tuple(float(rows[bin.rows].sum() / total) if total > 0 else np.nan for bin in bins)


def make_bins(recording: Recording) -> tuple[Bin, ...]:
    """Right and wrong answers, quarters by length, and groups by pass rate.

    What is right is said by the reward part `correct`, as in the metrics (unscorable: wrong);
    without such a part there are only lengths. Answers of one length are never parted, so quarters
    can be of unequal size; their names are their lengths in tokens. Empty bins are left out.
    """
    answers = recording.answers
    lengths = np.asarray(answers.lengths)
    rows: list[tuple[str, str, np.ndarray]] = []
    correct = answers.rewards.parts.get("correct")
    if correct is not None:
        right = np.nan_to_num(correct) > 0
        rows += [("outcome", "right", right), ("outcome", "wrong", ~right)]
    quarter = np.searchsorted(np.quantile(lengths, (0.25, 0.5, 0.75)), lengths)
    for inside in (quarter == i for i in np.unique(quarter)):
        least, most = lengths[inside].min(), lengths[inside].max()
        rows.append(("length", f"{least}" if least == most else f"{least}–{most}", inside))
    if correct is not None:
        rate = np.repeat(answers.grouped(right).mean(-1), answers.group_size)
        place = np.searchsorted([most for _, most in PASS_RATES], rate)
        rows += [("pass rate", name, place == i) for i, (name, _) in enumerate(PASS_RATES)]
    return tuple(
        Bin(kind, name, inside, float(inside.mean()), float(lengths[inside].sum() / lengths.sum()))
        for kind, name, inside in rows
        if inside.any()
    )


def cosines(gradients: Sequence[Params]) -> Float[np.ndarray, "K K"]:
    """Between every two; NaN where one of them is 0."""
    gram = np.array([[_product(a, b) for b in gradients] for a in gradients])
    norm = np.sqrt(np.diag(gram))
    with np.errstate(invalid="ignore", divide="ignore"):
        return gram / np.outer(norm, norm)


def _product(a: Params, b: Params) -> float:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return float(sum(float(np.vdot(np.asarray(x), np.asarray(y))) for x, y in pairs))


def _entropy_coef(recording: Recording, objective: Objective) -> Array:
    bonus = objective.algorithm.entropy
    if objective.entropy_coef is not None:
        return jnp.float32(objective.entropy_coef)
    if bonus.adapt is None:
        return jnp.float32(bonus.coef)
    return bonus.adapt(jnp.float32(bonus.coef), jnp.float32(recording.moment.entropy))[1]


def _make_stats(model: Model, settings: PolicySettings) -> Callable:
    def stats(params: Params, base, reference, rollout: Rollout) -> TokenStats:
        params = whole(base, params)
        forward = partial(token_stats, model, settings, params, reference=reference)
        return stats_by_parts(forward, settings, rollout)

    return stats


def _make_pull_back(model: Model, settings: PolicySettings) -> Callable:
    def pull_back(params: Params, base, reference, rollout: Rollout, cotangent) -> Params:
        def add(total, micro):
            rows, pull = micro

            def forward(params: Params) -> TokenStats:
                return token_stats(model, settings, whole(base, params), rows, reference)

            _, back = jax.vjp(forward, params)
            return jax.tree.map(jnp.add, total, back(pull)[0]), None

        zero = jax.tree.map(jnp.zeros_like, params)
        return lax.scan(add, zero, cut((rollout, cotangent), settings.micro_batch_rows))[0]

    return pull_back
