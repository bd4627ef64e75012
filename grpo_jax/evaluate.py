"""Evaluation on held-out problems. Its noise comes from a seed of its own, so training never sees
whether, when or how often a run evaluates; and the same parameters give the same numbers twice.
"""

from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

from grpo_jax.answers import Answers, RolloutSettings, answer, refuse_broken
from grpo_jax.generate import JaxSampler, given_rollout
from grpo_jax.metrics import known_only, length_metrics, outcome_metrics, reward_metrics, tied
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.tasks.base import Prompt, Task, prompt_ids
from grpo_jax.tokenizer import Tokenizer
from grpo_jax.types import Params, Sampler, SamplingParams, TrainingError


@dataclass(frozen=True)
class EvalSettings:
    """`eval` in the config. The first and the last step are always evaluated."""

    every: int  # steps; 0: only first and last
    prompts: int  # of the held-out set, the first ones
    samples: int  # answers to each, at the rollout's temperature
    greedy: bool  # one more answer at temperature 0
    exact: bool  # exact probability of the right completion, where the task knows it
    forced_prefix: str | None  # probe: how long answers get that are made to begin like this
    forced_prompts: int  # held-out prompts of that probe
    seed: int
    allow_chance: bool  # train on although the base policy is no better than chance


@dataclass
class Evaluator:
    """Everything an evaluation needs but the parameters, which the samplers are loaded with."""

    settings: EvalSettings
    rollout: RolloutSettings
    task: Task
    tokenizer: Tokenizer
    sampler: Sampler
    probe_sampler: Sampler | None  # has room for the forced prefix in its prompts
    parts: list[RewardPart]
    logprobs: Callable

    def __call__(self, params: Params, version: int) -> tuple[dict[str, float], list[dict]]:
        """(metrics, rows for completions.jsonl)."""
        prompts = list(self.task.heldout[: self.settings.prompts])
        self.sampler.load(params, version)
        sampled = self._answers(prompts, self.rollout.sampling, self.settings.samples)
        metrics = self._sampled_metrics(sampled)
        if self.settings.greedy:
            greedy = SamplingParams(self.rollout.max_completion_length, temperature=0.0)
            answers = self._answers(prompts, greedy, 1)
            metrics["eval/greedy_accuracy"] = _mean(_correct(answers))
        if self.settings.exact:
            metrics |= self._exact_probability(params)
        if self.probe_sampler is not None:
            self.probe_sampler.load(params, version)
            metrics["probe/forced_length"] = self._forced_length()
        return known_only(metrics), sampled.sample()

    def _answers(self, prompts: list[Prompt], sampling: SamplingParams, each: int) -> Answers:
        """In chunks of as many rows as a training step has: they share its compiled program."""
        size = max(self.rollout.prompts * self.rollout.group_size // each, 1)
        chunks = []
        for number, start in enumerate(range(0, len(prompts), size)):
            chunk = prompts[start : start + size]
            filled = chunk + [chunk[0]] * (size - len(chunk))
            answers = answer(
                filled,
                each,
                task=self.task,
                tokenizer=self.tokenizer,
                sampler=self.sampler,
                parts=self.parts,
                sampling=sampling,
                key=jax.random.fold_in(jax.random.key(self.settings.seed), number),
            )
            chunks.append(answers.take(np.arange(len(chunk))))
        return Answers.concatenate(chunks)

    def _sampled_metrics(self, answers: Answers) -> dict[str, float]:
        correct = _correct(answers)
        refuse_broken(answers, "of an evaluation")
        style = self.task.style
        lengths = length_metrics(
            answers.lengths,
            answers.rollout.truncated,
            correct > 0,
            None if style is None else [style(text) for text in answers.texts],
        )
        parts = {name: answers.grouped(part) for name, part in answers.rewards.parts.items()}
        rewards = reward_metrics(answers.grouped(answers.rewards.total), parts)
        rewards |= outcome_metrics(answers.rewards.parts, answers.rewards.lost)
        metrics = {f"eval/{name}": value for name, value in (lengths | rewards).items()}
        metrics["eval/accuracy"] = _mean(correct)
        metrics["eval/mixed_groups"] = _mean(~tied(answers.grouped(correct)))
        levels = np.repeat([str(p.level) for p in answers.prompts], answers.group_size)
        return metrics | _by_level("eval/accuracy", levels, correct)

    def _exact_probability(self, params: Params) -> dict[str, float]:
        """Mean probability of the right completion, by teacher forcing: no sampling noise. Over all
        held-out problems, and over those of each level."""
        if self.task.exact_text is None:
            raise TrainingError(f"eval.exact: task {self.task.name!r} has no one right completion")
        T = self.rollout.max_completion_length
        rows = self.rollout.prompts * self.rollout.group_size
        found, prompts = [], list(self.task.heldout)
        slots = max(len(prompt_ids(p, self.tokenizer)) for p in prompts)
        if isinstance(self.sampler, JaxSampler):
            slots = self.sampler.prompt_slots
        longest = max(len(self.tokenizer.encode(self.task.exact_text(p))) for p in prompts)
        if longest > T:
            raise TrainingError(
                f"eval.exact: a right answer takes {longest} tokens, and "
                f"rollout.max_completion_length is {T}"
            )
        for start in range(0, len(prompts), rows):
            chunk = prompts[start : start + rows]
            filled = chunk + [chunk[0]] * (rows - len(chunk))
            rollout = given_rollout(
                [prompt_ids(p, self.tokenizer) for p in filled],
                [self.tokenizer.encode(self.task.exact_text(p)) for p in filled],
                slots,
                T,
                self.tokenizer.pad_id,
            )
            logp, _ = self.logprobs(params, rollout)
            found.append(np.exp(np.where(rollout.mask, logp, 0.0).sum(-1))[: len(chunk)])
        probability = np.concatenate(found)
        levels = np.array([str(p.level) for p in prompts])
        return {"exact/probability": _mean(probability)} | _by_level(
            "exact/probability", levels, probability
        )

    def _forced_length(self) -> float:
        """Mean length of answers that are made to begin with `forced_prefix`, in tokens.

        A probe of the length bias that never runs out of wrong answers (see
        experiments/length_bias): the policy goes on from a prefix that marks the answer as wrong.
        """
        prefix = self.tokenizer.encode(self.settings.forced_prefix or "")
        prompts = self.task.heldout[: self.settings.forced_prompts]
        ids = [[*prompt_ids(p, self.tokenizer), *prefix] for p in prompts]
        rest = SamplingParams(
            self.rollout.max_completion_length - len(prefix), self.rollout.temperature
        )
        key = jax.random.key(self.settings.seed)
        assert self.probe_sampler is not None
        rollout = self.probe_sampler.sample(ids, np.arange(len(ids)), rest, key)
        return len(prefix) + float(np.asarray(rollout.mask).sum(-1).mean())


def _correct(answers: Answers) -> np.ndarray:
    """1 or 0 a row: the part named `correct`, else the total reward; unscorable is not right."""
    part = answers.rewards.parts.get("correct", answers.rewards.total)
    return (np.nan_to_num(part) > 0).astype(np.float32)


def _by_level(name: str, levels: np.ndarray, values: np.ndarray) -> dict[str, float]:
    """Means of `values` at each level; nothing where there is only one."""
    known = sorted(set(levels.tolist()))
    return {f"{name}/{k}": _mean(values[levels == k]) for k in known if len(known) > 1}


def _mean(values: np.ndarray) -> float:
    return float(np.mean(values)) if values.size else float("nan")
