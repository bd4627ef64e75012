"""Answers: what was sampled for some prompts, as text, scored."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import jax
import numpy as np
from jaxtyping import Array, Float, Key

from grpo_jax import hosts
from grpo_jax.rewards.combine import RewardPart, RewardTable, score, wanted_columns
from grpo_jax.tasks.base import Prompt, Task, prompt_ids
from grpo_jax.tokenizer import Tokenizer
from grpo_jax.types import Rollout, Sampler, SamplingParams, TrainingError


@dataclass(frozen=True)
class RolloutSettings:
    """`rollout` in the config. Lengths in tokens."""

    prompts: int  # N, per step
    group_size: int  # G, answers per prompt
    max_prompt_length: int  # longer prompts are dropped at load
    max_completion_length: int  # T, the generation budget
    temperature: float
    top_p: float  # 1: off
    top_k: int  # 0: off
    slots: int | None = None  # rows that are decoded at a time (refill.py); None: all
    overlap: bool = True  # score rewards while the device computes log-probs that need none
    length_buckets: int = 1  # widths that a batch may have, in equal steps up to T; 1: T alone

    @property
    def sampling(self) -> SamplingParams:
        return SamplingParams(self.max_completion_length, self.temperature, self.top_p, self.top_k)

    @property
    def widths(self) -> tuple[int, ...]:
        """The tokens that a row of a batch may have room for, ascending: multiples of 8, but for
        the last, which is T."""
        T, count = self.max_completion_length, self.length_buckets
        steps = {min(-(-T * step // (8 * count)) * 8, T) for step in range(1, count + 1)}
        return tuple(sorted(steps))


@dataclass(frozen=True)
class Answers:
    """Sampled and scored, in host memory: B = len(prompts) * G rows, prompt-major."""

    prompts: tuple[Prompt, ...]
    rollout: Rollout  # numpy leaves
    texts: tuple[str, ...]  # without special tokens and without the stop string
    rewards: RewardTable
    numbers: tuple[int, ...] = ()  # of the prompts in the training data; () where nobody counts
    greedy: Float[np.ndarray, "N"] | None = None  # reward of one greedy answer each (ReMax)
    extra_tokens: int = 0  # sampled beside these answers, for `greedy`

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def group_size(self) -> int:
        return len(self.texts) // len(self.prompts)

    @property
    def lengths(self) -> np.ndarray:
        return self.rollout.mask.sum(-1)

    def grouped(self, values: np.ndarray) -> np.ndarray:
        """[B] -> [N, G]"""
        return np.asarray(values).reshape(len(self), -1)

    def take(self, groups: np.ndarray) -> "Answers":
        """Those groups, in that order."""
        rows = (groups[:, None] * self.group_size + np.arange(self.group_size)).reshape(-1)
        return Answers(
            prompts=tuple(self.prompts[group] for group in groups),
            rollout=jax.tree.map(lambda a: a[rows], self.rollout),
            texts=tuple(self.texts[row] for row in rows),
            rewards=self.rewards.take(rows),
            numbers=tuple(self.numbers[group] for group in groups) if self.numbers else (),
            greedy=None if self.greedy is None else self.greedy[groups],
        )

    def sample(self, count: int = 8) -> list[dict]:
        """Rows for completions.jsonl: the first answer to each of the first `count` prompts."""
        rows = []
        for index, prompt in enumerate(self.prompts[:count]):
            row = index * self.group_size
            rows.append(
                {
                    "prompt": prompt.text,
                    "completion": self.texts[row],
                    "answer": prompt.answer,
                    "reward": float(self.rewards.total[row]),
                    "length": int(self.lengths[row]),
                }
            )
        return rows

    @staticmethod
    def concatenate(many: "list[Answers]") -> "Answers":
        """One after the other."""
        return Answers(
            prompts=tuple(prompt for answers in many for prompt in answers.prompts),
            rollout=jax.tree.map(lambda *x: np.concatenate(x), *[a.rollout for a in many]),
            texts=tuple(text for answers in many for text in answers.texts),
            rewards=RewardTable.concatenate([answers.rewards for answers in many]),
            numbers=tuple(number for answers in many for number in answers.numbers),
            greedy=None
            if many[0].greedy is None
            else np.concatenate([a.greedy for a in many if a.greedy is not None]),
        )


def answer(
    prompts: list[Prompt],
    group_size: int,
    *,
    task: Task,
    tokenizer: Tokenizer,
    sampler: Sampler,
    parts: list[RewardPart],
    sampling: SamplingParams,
    key: Key[Array, ""],
) -> Answers:
    """Sample `group_size` answers to each prompt and score them."""
    rollout = draw(
        prompts, group_size, tokenizer=tokenizer, sampler=sampler, sampling=sampling, key=key
    )
    return scored(prompts, rollout, task=task, tokenizer=tokenizer, parts=parts)


def draw(
    prompts: list[Prompt],
    group_size: int,
    *,
    tokenizer: Tokenizer,
    sampler: Sampler,
    sampling: SamplingParams,
    key: Key[Array, ""],
) -> Rollout:
    """Sample `group_size` answers to each prompt, as the sampler returns them: the built-in one has
    arrays that the device may still be computing."""
    ids = [prompt_ids(prompt, tokenizer) for prompt in prompts]
    return sampler.sample(ids, np.arange(len(prompts) * group_size), sampling, key)


def scored(
    prompts: list[Prompt],
    rollout: Rollout,
    *,
    task: Task,
    tokenizer: Tokenizer,
    parts: list[RewardPart],
) -> Answers:
    """Text and rewards of a rollout: B/N answers to each of the N prompts."""
    return graded(prompts, *cut_at_stop(rollout, tokenizer, task.stop_strings), parts)


def graded(
    prompts: list[Prompt], rollout: Rollout, texts: list[str], parts: list[RewardPart]
) -> Answers:
    """Rewards of what `cut_at_stop` returns. Of several processes, each scores whole groups that
    are its own, and all have all of them."""
    group = len(texts) // len(prompts)
    own = hosts.share(len(prompts))
    rows = slice(own.start * group, own.stop * group)
    repeated = [prompt for prompt in prompts for _ in range(group)][rows]
    names = sorted({name for prompt in prompts for name in prompt.columns})
    columns = {name: [p.columns.get(name) for p in repeated] for name in names}
    columns["truncated"] = rollout.truncated[rows].tolist()
    try:
        rewards = score(parts, texts[rows], [p.answer for p in repeated], columns)
    except (TypeError, ValueError) as error:  # a function that can't be used, named
        raise TrainingError(str(error)) from error
    if hosts.count() > 1:
        tables = hosts.exchange("rewards", rewards.as_json())
        rewards = RewardTable.concatenate([RewardTable.from_json(table) for table in tables])
    return Answers(tuple(prompts), rollout, tuple(texts), rewards)


def check_columns(parts: Sequence[RewardPart], task: Task) -> None:
    """Raise TrainingError if a reward function needs a column that the task's data has not."""
    columns = {"truncated"}.union(*(prompt.columns for prompt in task.heldout))
    for part in parts:
        try:
            wanted_columns(part, columns)
        except TypeError as error:
            raise TrainingError(str(error)) from error


def refuse_broken(answers: Answers, when: str) -> None:
    """Raise TrainingError if a reward function failed on every row: training would go on without
    it, or without anything."""
    table = answers.rewards
    for name, failed in table.failed.items():
        if failed == len(answers.texts):
            raise TrainingError(
                f"the reward {name!r} failed on all {failed} answers {when}; the first: "
                f"{table.errors.get(name)}"
            )


def cut_at_stop(
    rollout: Rollout, tokenizer: Tokenizer, stops: tuple[str, ...]
) -> tuple[Rollout, list[str]]:
    """Decode, and end each row at the token that completes a stop string (kept in the mask).

    The sampler itself stops at tokens that hold a whole stop string; one that is spread over
    several tokens is only seen in the text, and what was sampled after it is masked here.
    Returns numpy leaves: a rollout that the device is still computing is waited for.
    """
    rollout = jax.tree.map(np.asarray, rollout)
    mask, truncated = rollout.mask.copy(), rollout.truncated.copy()
    texts = []
    for row, completion in enumerate(rollout.completion):
        ids = completion[: int(mask[row].sum())].tolist()
        if ids and ids[-1] in tokenizer.eos_ids:
            ids = ids[:-1]  # any other special token stays visible: no reward may overlook it
        text = tokenizer.decode(ids, skip_special=False)
        if any(stop in text for stop in stops):
            end = _first_complete(tokenizer, ids, stops)
            text = tokenizer.decode(ids[:end], skip_special=False)
            text = text[: min(text.index(stop) for stop in stops if stop in text)]
            mask[row, end:] = False
            truncated[row] = False
        texts.append(text)
    logp = np.where(mask, rollout.sampler_logp, 0.0)
    return replace(rollout, mask=mask, truncated=truncated, sampler_logp=logp), texts


def _first_complete(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...]) -> int:
    """How many of the tokens it takes until one of the strings is complete; all of them do. By
    halves: decoding every beginning would take time with the square of the length."""

    def complete(end: int) -> bool:
        text = tokenizer.decode(ids[:end], skip_special=False)
        return any(stop in text for stop in stops)

    return bisect_left(range(len(ids)), True, key=complete)


def narrowed(rollout: Rollout, widths: Sequence[int]) -> Rollout:
    """With room for as many tokens as the smallest of `widths` (ascending) that holds every row;
    numpy leaves."""
    longest = int(np.flatnonzero(rollout.mask.any(0)).max(initial=0)) + 1
    width = next(width for width in widths if width >= longest)
    return replace(
        rollout,
        completion=rollout.completion[:, :width],
        mask=rollout.mask[:, :width],
        sampler_logp=rollout.sampler_logp[:, :width],
    )
