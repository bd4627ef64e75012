"""From prompts to a scored batch: sample, score, filter, shape, compare within the group.

The order of the pipeline is in `kernels/__init__.py`. Everything here runs on the host, in numpy,
but for the sampler and the log-prob pass; shapes are the same at every step.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Key

from grpo_jax.answers import Answers, RolloutSettings, answer
from grpo_jax.kernels.advantage import advantage
from grpo_jax.metrics import gap_metrics, length_metrics, reward_metrics, weight_metrics
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.tasks.base import Task
from grpo_jax.tokenizer import Tokenizer
from grpo_jax.types import Algorithm, Batch, Params, Sampler, TrainingError


@dataclass(frozen=True)
class Collection:
    """One step's data: the batch to learn from, and all that was sampled to get it."""

    batch: Batch
    answers: Answers  # those in the batch
    position: int  # prompts consumed so far, this step's included
    metrics: dict[str, float]


@dataclass
class Collector:
    """Makes one step's `Collection`. `logprobs` is the learner's jitted pass."""

    algorithm: Algorithm
    task: Task
    tokenizer: Tokenizer
    sampler: Sampler
    parts: list[RewardPart]
    settings: RolloutSettings
    logprobs: Callable
    ref_params: Params | None
    seed: int

    def collect(self, params: Params, step: int, position: int, key: Key[Array, ""]) -> Collection:
        """Roll out until N groups pass the filter or the rounds run out.

        `params` must be what the sampler holds; `key` is this step's. Surplus groups of the last
        round are discarded (as verl does); with too few, `filter.on_exhausted` decides.
        """
        N, rule = self.settings.prompts, self.algorithm.filter
        rounds: list[tuple[Answers, np.ndarray]] = []
        while len(rounds) < rule.max_rounds and sum(k.sum() for _, k in rounds) < N:
            answers = self._round(position, jax.random.fold_in(key, len(rounds)))
            position += N
            rounds.append((answers, self._keep(answers)))
        kept = int(sum(k.sum() for _, k in rounds))
        if kept < N and rule.on_exhausted == "error":
            raise TrainingError(
                f"dynamic sampling found {kept} of {N} groups in {len(rounds)} rounds at step "
                f"{step}; raise filter.max_rounds or set filter.on_exhausted=partial"
            )
        answers, keep = _choose(rounds, N)
        if kept < N and rule.on_exhausted == "skip":
            keep = np.zeros_like(keep)
        batch, entropy, extra = self._batch(params, answers, keep)
        metrics = self._sampling_metrics([a for a, _ in rounds], kept) | extra
        metrics |= self._batch_metrics(batch, entropy, answers)
        return Collection(batch, answers, position, metrics)

    def _round(self, position: int, key: Key[Array, ""]) -> Answers:
        numbers = range(position, position + self.settings.prompts)
        return answer(
            [self.task.train(number, self.seed) for number in numbers],
            self.settings.group_size,
            task=self.task,
            tokenizer=self.tokenizer,
            sampler=self.sampler,
            parts=self.parts,
            sampling=self.settings.sampling,
            key=key,
        )

    def _keep(self, answers: Answers) -> Bool[np.ndarray, "N"]:
        on = self.algorithm.filter.on
        if on is not None and on not in answers.rewards.parts:
            known = ", ".join(answers.rewards.parts)
            raise ValueError(f"filter.on={on!r} names no part of the reward; parts are: {known}")
        values = answers.rewards.total if on is None else answers.rewards.parts[on]
        return np.asarray(self.algorithm.filter.rule(jnp.asarray(answers.grouped(values))))

    def _batch(self, params: Params, answers: Answers, keep: Bool[np.ndarray, "N"]):
        """Shaping -> KL in reward -> baseline -> scale: (Batch, entropy, metrics of that KL)."""
        G, kl = answers.group_size, self.algorithm.kl
        rollout = jax.tree.map(jnp.asarray, answers.rollout)
        old_logp, entropy = self.logprobs(params, rollout)
        ref_logp, extra = None, {}
        if kl.active:
            ref_logp, _ = self.logprobs(self.ref_params, rollout)
        # groups that only fill the batch up leave every statistic, like unscorable rows
        reward = np.where(keep[:, None], answers.grouped(answers.rewards.total), np.nan)
        lengths = jnp.asarray(answers.grouped(answers.lengths), jnp.int32)
        shaped = self.algorithm.shaping(
            jnp.asarray(reward, jnp.float32),
            lengths,
            jnp.asarray(answers.grouped(answers.rollout.truncated)),
        )
        if ref_logp is not None and kl.where == "reward":
            per_token = jnp.where(rollout.mask, kl(old_logp, ref_logp), 0.0)
            shaped = shaped - kl.coef * per_token.sum(-1).reshape(shaped.shape)
            extra["kl"] = float(per_token.sum() / rollout.mask.sum())
        value = advantage(self.algorithm.baseline, self.algorithm.scale, shaped, lengths)
        batch = Batch(
            rollout=rollout,
            advantage=value.reshape(-1),
            old_logp=old_logp,
            ref_logp=ref_logp if kl.where == "loss" else None,
            keep=jnp.asarray(~np.isnan(reward).reshape(-1)),
            group=jnp.repeat(jnp.arange(len(answers)), G),
        )
        return batch, entropy, extra

    def _sampling_metrics(self, rounds: list[Answers], kept: int) -> dict[str, float]:
        """Of all that was sampled, dropped groups included: curves of filtered runs compare."""
        all_of = Answers.concatenate(rounds)
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
        for answers in rounds:
            for kind in ("unscorable", "failed"):
                for name, count in getattr(answers.rewards, kind).items():
                    key = f"rewards/{name}/{kind}"
                    metrics[key] = metrics.get(key, 0.0) + count
        return metrics | {
            "filter/rounds": float(len(rounds)),
            "filter/kept_groups": float(kept),
            "filter/kept_fraction": kept / len(all_of),
            "num_tokens_step": float(all_of.lengths.sum()),
        }

    def _batch_metrics(self, batch: Batch, entropy: Array, answers: Answers) -> dict[str, float]:
        mask = batch.rollout.mask & batch.keep[:, None]
        weight = np.asarray(self.algorithm.aggregation(mask, batch.group))
        correct = answers.rewards.parts.get("correct")
        if correct is not None:
            correct = answers.grouped(np.nan_to_num(correct) > 0).mean(-1)
        metrics = weight_metrics(weight, np.asarray(batch.advantage), correct)
        return metrics | gap_metrics(
            np.asarray(batch.old_logp),
            np.asarray(batch.rollout.sampler_logp),
            np.asarray(entropy),
            np.asarray(batch.rollout.mask),
        )


def _choose(rounds: list[tuple[Answers, np.ndarray]], count: int) -> tuple[Answers, np.ndarray]:
    """The first `count` kept groups; when they are too few, dropped ones (keep False) fill up."""
    answers = Answers.concatenate([a for a, _ in rounds])
    keep = np.concatenate([k for _, k in rounds])
    order = np.concatenate([np.flatnonzero(keep), np.flatnonzero(~keep)])[:count]
    return answers.take(order), keep[order]
