"""From prompts to a scored batch: sample, score, filter, shape, compare within the group.

The order of the pipeline is in `kernels/__init__.py`. Everything here runs on the host, in numpy,
but for the sampler and the log-prob passes. Those need no reward, and JAX doesn't wait for what it
computes: where every row that is sampled will be in the batch, they are started before the rewards
are scored (`rollout.overlap`), and the device works while the host does. Where a filter may draw
other groups instead, they come after the choice: nothing is computed for a group that goes.

A batch is as wide as its longest answer needs, in a few steps (`rollout.length_buckets`); what
waits for a later step has the full budget of T tokens, so it fits with whatever comes then.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Key

from grpo_jax import hosts
from grpo_jax.answers import (
    Answers,
    RolloutSettings,
    cut_at_stop,
    draw,
    graded,
    narrowed,
    refuse_broken,
    scored,
)
from grpo_jax.kernels import correction as corrections
from grpo_jax.kernels.advantage import advantage
from grpo_jax.metrics import (
    correction_metrics,
    gap_metrics,
    length_metrics,
    outcome_metrics,
    reward_metrics,
    weight_metrics,
)
from grpo_jax.passes import PassResults, start_passes
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.rules import asks, call
from grpo_jax.screen import say
from grpo_jax.tasks.base import Task
from grpo_jax.tokenizer import Tokenizer
from grpo_jax.types import (
    Algorithm,
    Batch,
    Params,
    Rollout,
    Sampler,
    SamplingParams,
    TrainingError,
)


@dataclass(frozen=True)
class Collection:
    """One step's data: the batch to learn from, and all that was sampled to get it."""

    batch: Batch
    answers: Answers  # those in the batch
    position: int  # prompts consumed so far, this step's included
    metrics: dict[str, float]


@dataclass
class Collector:
    """Makes one step's `Collection`. `logprobs` and `exact_kl` are the learner's jitted passes."""

    algorithm: Algorithm
    task: Task
    tokenizer: Tokenizer
    sampler: Sampler
    parts: list[RewardPart]
    settings: RolloutSettings
    logprobs: Callable
    exact_kl: Callable
    seed: int
    told: set[str] = field(default_factory=set)  # reward parts whose failures were announced
    surplus: Answers | None = None  # groups of earlier steps that wait (`filter.surplus=keep`)

    def collect(
        self,
        params: Params,
        reference: Params | None,
        step: int,
        position: int,
        key: Key[Array, ""],
    ) -> Collection:
        """Roll out until N groups pass the filter or the rounds run out.

        `params` must be what the sampler holds, loaded as version `step`; `key` is this step's.
        `reference` is needed where the algorithm has a KL. Groups beyond N are discarded (as verl
        does) or wait for the next step; with too few, `filter.on_exhausted` decides.
        """
        N, rule = self.settings.prompts, self.algorithm.filter
        carried, self.surplus = self.surplus, None
        start, passes = partial(self._start, params, reference), None
        # one round, and nothing that waits: its rows are the batch, whatever their rewards are
        early = self.settings.overlap and rule.max_rounds == 1 and carried is None
        kept = 0 if carried is None else len(carried)
        rounds: list[tuple[Answers, np.ndarray]] = []
        while len(rounds) < rule.max_rounds and kept < N:
            noise = jax.random.fold_in(key, len(rounds))
            answers, passes = self._round(position, noise, start if early else None)
            position += N
            rounds.append((answers, self._keep(answers)))
            kept += int(rounds[-1][1].sum())
        if kept < N and rule.on_exhausted == "error":
            raise TrainingError(
                f"dynamic sampling found {kept} of {N} groups in {len(rounds)} rounds at step "
                f"{step}; raise filter.max_rounds or set filter.on_exhausted=partial"
            )
        found = int(sum(k.sum() for _, k in rounds))
        metrics = self._sampling_metrics([a for a, _ in rounds], found, step)
        if carried is not None:
            rounds.insert(0, (carried, np.ones(len(carried), bool)))
        answers, keep, rest = _choose(rounds, N)
        if rule.surplus == "keep":
            self.surplus = rest
            metrics["filter/carried_groups"] = 0.0 if carried is None else float(len(carried))
        if kept < N and rule.on_exhausted == "skip":
            if rule.surplus == "keep":  # too few for now: they wait, all of them
                self.surplus = answers.take(np.flatnonzero(keep)) if kept else None
            keep = np.zeros_like(keep)
        answers = replace(answers, rollout=narrowed(answers.rollout, self.settings.widths))
        if passes is None:
            passes = hosts.local(start(answers.rollout))
        else:
            passes = hosts.local(passes).take(_kept_first(rounds[0][1]), answers.group_size)
        batch, extra = self._batch(passes, answers, keep, step)
        metrics |= extra | self._batch_metrics(batch, passes.entropy, answers, step)
        return Collection(batch, answers, position, metrics)

    def waiting(self) -> dict | None:
        """The surplus as JSON; `restore` makes the same groups of it again."""
        if self.surplus is None:
            return None
        leaves = {f.name: getattr(self.surplus.rollout, f.name) for f in fields(Rollout)}
        return {
            "numbers": list(self.surplus.numbers),
            "greedy": None if self.surplus.greedy is None else self.surplus.greedy.tolist(),
            "rollout": {name: [str(a.dtype), a.tolist()] for name, a in leaves.items()},
        }

    def restore(self, waiting: dict | None) -> None:
        """Take up the surplus of a checkpoint. Prompts and rewards are functions of their numbers
        and texts, and are made again."""
        if waiting is None:
            return
        rollout = Rollout(**{n: np.array(a, kind) for n, (kind, a) in waiting["rollout"].items()})
        answers = scored(
            [self.task.train(number, self.seed) for number in waiting["numbers"]],
            rollout,
            task=self.task,
            tokenizer=self.tokenizer,
            parts=self.parts,
        )
        greedy = waiting["greedy"]
        self.surplus = replace(
            answers,
            numbers=tuple(waiting["numbers"]),
            greedy=None if greedy is None else np.array(greedy, np.float32),
        )

    def _round(
        self, position: int, key: Key[Array, ""], start: Callable[[Rollout], PassResults] | None
    ) -> tuple[Answers, PassResults | None]:
        """N prompts, sampled and scored. `start` is called once the answers are known, before their
        rewards are."""
        numbers = range(position, position + self.settings.prompts)
        prompts = [self.task.train(number, self.seed) for number in numbers]

        def sample(group_size: int, sampling: SamplingParams) -> Rollout:
            return draw(
                prompts,
                group_size,
                tokenizer=self.tokenizer,
                sampler=self.sampler,
                sampling=sampling,
                key=key,
            )

        sampling, best = self.settings.sampling, None
        drawn = sample(self.settings.group_size, sampling)
        if asks(self.algorithm.baseline, "greedy"):
            best = sample(1, sampling._replace(temperature=0.0))
        rollout, texts = cut_at_stop(drawn, self.tokenizer, self.task.stop_strings)
        passes = None if start is None else start(rollout)
        answers = replace(graded(prompts, rollout, texts, self.parts), numbers=tuple(numbers))
        if best is not None:
            best = scored(prompts, best, task=self.task, tokenizer=self.tokenizer, parts=self.parts)
            answers = replace(answers, greedy=best.rewards.total, extra_tokens=best.lengths.sum())
        return answers, passes

    def _keep(self, answers: Answers) -> Bool[np.ndarray, "N"]:
        on = self.algorithm.filter.on
        if on is not None and on not in answers.rewards.parts:
            known = ", ".join(answers.rewards.parts)
            raise ValueError(f"filter.on={on!r} names no part of the reward; parts are: {known}")
        values = answers.rewards.total if on is None else answers.rewards.parts[on]
        return np.asarray(self.algorithm.filter.rule(jnp.asarray(answers.grouped(values))))

    def _start(self, params: Params, reference: Params | None, rollout: Rollout) -> PassResults:
        return start_passes(
            self.algorithm.kl,
            self.logprobs,
            self.exact_kl,
            params,
            reference,
            narrowed(rollout, self.settings.widths),
            self.settings.group_size,
        )

    def _batch(
        self, passes: PassResults, answers: Answers, keep: Bool[np.ndarray, "N"], step: int
    ) -> tuple[Batch, dict[str, float]]:
        """Shaping -> KL in reward -> combine (baseline, scale): the batch, and that KL's metric."""
        kl, rollout = self.algorithm.kl, passes.rollout
        # a group that waited was sampled by an earlier policy, which alone knows how likely it was
        fresh = (rollout.version == step)[:, None]
        old_logp = jnp.where(fresh, passes.logp, rollout.sampler_logp)
        penalty, extra = None, {}
        if passes.ref_logp is not None and kl.where == "reward":
            on_policy, exact = jnp.zeros_like(old_logp), passes.exact_kl
            kl_now = kl(old_logp, passes.ref_logp, log_ratio=on_policy, exact=exact)
            per_token = jnp.where(rollout.mask, kl_now, 0.0)
            penalty = kl.coef * per_token.sum(-1).reshape(len(answers), -1)
            extra["kl"] = float(per_token.sum() / rollout.mask.sum())
        weights = {part.name: part.weight for part in self.parts}
        known = old_logp, passes.ref_logp, penalty
        return make_batch(self.algorithm, weights, answers, keep, rollout, *known), extra

    def _sampling_metrics(self, rounds: list[Answers], kept: int, step: int) -> dict[str, float]:
        """Of all that was sampled, dropped groups included: curves of filtered runs compare."""
        all_of = Answers.concatenate(rounds)
        refuse_broken(all_of, f"of step {step}")
        self._tell_failures(all_of, step)
        style = self.task.style
        correct = all_of.rewards.parts.get("correct")
        metrics = reward_metrics(
            all_of.grouped(all_of.rewards.total),
            {name: all_of.grouped(v) for name, v in all_of.rewards.parts.items()},
        )
        metrics |= length_metrics(
            all_of.lengths,
            all_of.rollout.truncated,
            None if correct is None else np.nan_to_num(correct) > 0,
            None if style is None else [style(text) for text in all_of.texts],
        )
        metrics |= outcome_metrics(all_of.rewards.parts, all_of.rewards.lost)
        return metrics | {
            "filter/rounds": float(len(rounds)),
            "filter/kept_groups": float(kept),
            "filter/kept_fraction": kept / len(all_of),
            "num_tokens_step": float(all_of.lengths.sum() + sum(a.extra_tokens for a in rounds)),
        }

    def _tell_failures(self, answers: Answers, step: int) -> None:
        """Once a reward part: that its function failed on some rows, and how."""
        for name, text in answers.rewards.errors.items():
            if name not in self.told:
                self.told.add(name)
                count = f"{answers.rewards.failed[name]} of {len(answers.texts)} answers"
                say(f"note: the reward {name!r} failed on {count} of step {step}: {text}")

    def _batch_metrics(
        self, batch: Batch, entropy: Array, answers: Answers, step: int
    ) -> dict[str, float]:
        mask = batch.rollout.mask & batch.keep[:, None]
        weight = np.asarray(self.algorithm.aggregation(mask, batch.group))
        correct = answers.rewards.parts.get("correct")
        if correct is not None:
            correct = answers.grouped(np.nan_to_num(correct) > 0).mean(-1)
        metrics = weight_metrics(weight, np.asarray(batch.advantage), correct)
        fresh = np.asarray(batch.rollout.version) == step
        old, sampler = np.asarray(batch.old_logp), np.asarray(batch.rollout.sampler_logp)
        mask = np.asarray(batch.rollout.mask) & fresh[:, None]
        metrics |= gap_metrics(old, sampler, np.asarray(entropy), mask)
        rule = self.algorithm.correction
        if getattr(rule, "func", rule) is corrections.none:
            return metrics
        given = batch.old_logp, jnp.asarray(sampler), jnp.asarray(mask)
        weight = call(rule, *given, logp=given[0], advantage=batch.advantage[:, None])
        return metrics | correction_metrics(np.asarray(weight), old, sampler, mask)


def make_batch(
    algorithm: Algorithm,
    weights: dict[str, float],
    answers: Answers,
    keep: Bool[np.ndarray, "N"],
    rollout: Rollout,
    old_logp: Float[Array, "B T"],
    ref_logp: Float[Array, "B T"] | None,
    penalty: Float[Array, "N G"] | None,
) -> Batch:
    """What the learner gets of these answers; `rollout` is theirs, on the device. The others as in
    `score_groups`."""
    value, scorable = score_groups(algorithm, weights, answers, keep, penalty)
    whole = np.asarray(algorithm.truncation(rollout.truncated))
    return Batch(
        rollout=rollout,
        advantage=value.reshape(-1),
        old_logp=old_logp,
        ref_logp=ref_logp if algorithm.kl.where == "loss" else None,
        keep=jnp.asarray(scorable.reshape(-1) & whole),
        group=jnp.repeat(jnp.arange(len(answers)), answers.group_size),
    )


def score_groups(
    algorithm: Algorithm,
    weights: dict[str, float],
    answers: Answers,
    keep: Bool[np.ndarray, "N"],
    penalty: Float[Array, "N G"] | None,
) -> tuple[Float[Array, "N G"], Bool[np.ndarray, "N G"]]:
    """(advantages, which rows have one): filter, shaping, KL in reward, combine, baseline, scale.

    Args:
      weights: of the reward parts, by name.
      keep: the groups that the filter keeps. The others only fill the batch up, and leave every
        statistic, as unscorable rows do.
      penalty: the KL in the reward, coefficient included; None for none.
    """
    total = np.where(keep[:, None], answers.grouped(answers.rewards.total), np.nan)
    total = jnp.asarray(total, jnp.float32)
    lengths = jnp.asarray(answers.grouped(answers.lengths), jnp.int32)
    truncated = jnp.asarray(answers.grouped(answers.rollout.truncated))
    greedy = None if answers.greedy is None else jnp.asarray(answers.greedy)[:, None]

    def normalise(reward: Float[Array, "N G"]) -> Float[Array, "N G"]:
        return advantage(algorithm.baseline, algorithm.scale, reward, lengths, greedy)

    # what shaping and the KL add is one more part, so that each part can be normalised alone
    added = algorithm.shaping(total, lengths, truncated) - total
    added = added if penalty is None else added - penalty
    parts = [jnp.asarray(answers.grouped(answers.rewards.parts[name])) for name in weights]
    parts = [jnp.where(keep[:, None], part, jnp.nan) for part in parts]
    value = call(
        algorithm.combine,
        jnp.stack([*parts, added]).astype(jnp.float32),
        jnp.asarray([*weights.values(), 1.0], jnp.float32),
        normalise,
        length=lengths,
    )
    return value, np.asarray(~jnp.isnan(total))


def _choose(
    rounds: list[tuple[Answers, np.ndarray]], count: int
) -> tuple[Answers, np.ndarray, Answers | None]:
    """(the first `count` kept groups, keep, kept groups that are left over). Where they are too
    few, dropped ones (keep False) fill up."""
    answers = Answers.concatenate([a for a, _ in rounds])
    keep = np.concatenate([k for _, k in rounds])
    order = _kept_first(keep)
    rest = np.flatnonzero(keep)[count:]
    order = order[:count]
    return answers.take(order), keep[order], answers.take(rest) if len(rest) else None


def _kept_first(keep: Bool[np.ndarray, "N"]) -> Int[np.ndarray, "N"]:
    """Group numbers, those that are kept before the others."""
    return np.argsort(~keep, kind="stable")
