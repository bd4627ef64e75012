"""Sampling an evaluation set in batches of one shape, so that the machine is full and little is
compiled.

Problems are sorted by the length of their prompts and cut into batches of equal size; a batch is
padded to the next of a few widths. All samples of a problem in a batch share its prompt's forward
pass. Noise is that of (seed, set, problem, sample) alone, so neither the size of the batches nor
which of them a killed evaluation had finished changes what is sampled (but for the rounding of
matrix products of another shape).
"""

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from grpo_jax.answers import Answers, scored
from grpo_jax.benchmark.votes import final_answer
from grpo_jax.confidential import hidden
from grpo_jax.generate import JaxSampler
from grpo_jax.models.llama import Model
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.tasks.base import Task, prompt_ids
from grpo_jax.tokenizer import Tokenizer
from grpo_jax.types import Params, Rollout, SamplingParams

SAMPLED, GREEDY = "sampled", "greedy"
MOST_SAMPLES = 4096  # of a problem; a row's id is problem * MOST_SAMPLES + sample
MOST_PROBLEMS = 2**31 // MOST_SAMPLES
NARROWEST = 32  # tokens: the first width of prompts; each next one is twice as wide
LEAST_BATCHES = 4  # a width that fewer batches need isn't worth a program of its own


@dataclass(frozen=True)
class BenchmarkSettings:
    """What is sampled, and how it is counted; keys of conf/eval.yaml."""

    samples: int  # to each problem, at `temperature`; 0: greedy only
    greedy: bool  # one more answer to each, at temperature 0
    pass_k: tuple[int, ...]  # the k of pass@k and maj@k
    max_prompt_length: int | None  # tokens; longer prompts are left out, and counted
    max_completion_length: int  # tokens
    temperature: float
    top_p: float  # 1: off
    top_k: int  # 0: off
    batch_rows: int  # rows that are sampled at a time: memory and speed, never the result
    seed: int
    slots: int | None = None  # of them, decoded at a time (refill.py): the same; None: all

    @property
    def modes(self) -> dict[str, tuple[int, SamplingParams]]:
        """How many answers to each problem, and how they are drawn."""
        drawn = SamplingParams(self.max_completion_length, self.temperature, self.top_p, self.top_k)
        greedy = SamplingParams(self.max_completion_length, temperature=0.0)
        both = {GREEDY: (int(self.greedy), greedy), SAMPLED: (self.samples, drawn)}
        return {mode: pair for mode, pair in both.items() if pair[0]}


@dataclass(frozen=True)
class Batch:
    """Rows that are sampled at a time: `group` samples of each problem, from number `first` on."""

    problems: tuple[int, ...]  # of the set; at most `prompts`
    prompts: int  # of the program: the last batch is filled up
    width: int  # tokens that prompts are padded to
    group: int
    first: int


@dataclass
class Bench:
    """A policy, ready to be asked."""

    model: Model
    params: Params
    tokenizer: Tokenizer
    parts: list[RewardPart]
    settings: BenchmarkSettings
    _samplers: dict[tuple[int, tuple[int, ...]], JaxSampler] = field(default_factory=dict)

    def run(
        self, name: str, task: Task, done: Collection[tuple[str, int]] = ()
    ) -> Iterator[dict[str, Any]]:
        """Answer the held-out problems of `task`, a batch at a time, but for those that are `done`:
        (mode, problem).

        Yields what JSON can hold: `set`, `mode`, `rows` (one an answer), and for the whole batch
        `unscorable` and `failed` (rows by part of the reward) and `errors`.
        """
        key = jax.random.fold_in(
            jax.random.key(self.settings.seed), zlib.crc32(name.encode()) & 0x7FFFFFFF
        )
        ids = [prompt_ids(prompt, self.tokenizer) for prompt in task.heldout]
        ends = {*self.tokenizer.eos_ids, *self.tokenizer.stop_ids(task.stop_strings)}
        for mode, (each, params) in self.settings.modes.items():
            pending = [problem for problem in range(len(ids)) if (mode, problem) not in done]
            lengths = [len(prompt) for prompt in ids]
            # the next batch is under way while this one's answers are read and scored
            waiting: Callable[[], dict[str, Any]] | None = None
            for batch in batches(lengths, pending, each, self.settings.batch_rows):
                sampler = self._sampler(batch.width, tuple(sorted(ends)))
                filled = [*batch.problems, *[batch.problems[0]] * batch.prompts][: batch.prompts]
                rollout = sampler.sample(
                    [ids[problem] for problem in filled], row_ids(filled, batch, each), params, key
                )
                if waiting is not None:
                    yield waiting()
                waiting = _later(self, name, mode, task, batch, each, rollout)
            if waiting is not None:
                yield waiting()

    def _sampler(self, width: int, ends: tuple[int, ...]) -> JaxSampler:
        if (width, ends) not in self._samplers:
            sampler = JaxSampler(
                self.model, width, ends, self.tokenizer.pad_id, self.settings.slots
            )
            sampler.load(self.params, 0)
            self._samplers[width, ends] = sampler
        return self._samplers[width, ends]


def batches(lengths: Sequence[int], pending: Sequence[int], each: int, rows: int) -> list[Batch]:
    """Cut `each` samples of the problems `pending` into batches of at most `rows` rows.

    `lengths`: tokens of every problem's prompt, those of `pending` and others, so that a resumed
    evaluation has the shapes of the one that was killed. Longest prompts come first: what doesn't
    fit into memory fails at once.
    """
    passes = -(-each // rows)  # a problem's samples may not fit into one batch
    group = -(-each // passes)
    prompts = min(max(rows // group, 1), len(lengths))
    order = sorted(pending, key=lambda problem: (-lengths[problem], problem))
    cut = [order[start : start + prompts] for start in range(0, len(order), prompts)]
    widest = -(-max(lengths) // 16) * 16
    widths = [_width(lengths[problems[0]], widest) for problems in cut]
    for i, width in enumerate(widths):  # descending: a rare width takes the one before it
        if i and widths.count(width) < LEAST_BATCHES:
            widths[i] = widths[i - 1]
    return [
        Batch(tuple(problems), prompts, width, group, first * group)
        for problems, width in zip(cut, widths, strict=True)
        for first in range(passes)
    ]


def _width(length: int, widest: int) -> int:
    width = NARROWEST
    while width < length:
        width *= 2
    return min(width, widest)


def row_ids(problems: Sequence[int], batch: Batch, each: int) -> np.ndarray:
    """int32 [prompts * group]: one id for each sample of each problem of a set. Rows that only fill
    a batch repeat others, so they end when those do."""
    sample = np.minimum(batch.first + np.arange(batch.group), each - 1)
    ids = np.asarray(problems)[:, None] * MOST_SAMPLES + sample
    return ids.reshape(-1).astype(np.int32)


def _later(
    bench: Bench, name: str, mode: str, task: Task, batch: Batch, each: int, rollout: Rollout
) -> Callable[[], dict[str, Any]]:
    """What waits for a rollout's numbers, reads and scores them."""

    def read() -> dict[str, Any]:
        group = min(batch.group, each - batch.first)
        rows = np.arange(len(batch.problems))[:, None] * batch.group + np.arange(group)
        kept = jax.tree.map(lambda leaf: np.asarray(leaf)[rows.reshape(-1)], rollout)
        answers = scored(
            [task.heldout[problem] for problem in batch.problems],
            kept,
            task=task,
            tokenizer=bench.tokenizer,
            parts=bench.parts,
        )
        return {
            "set": name,
            "mode": mode,
            "rows": _rows(answers, batch, bench.tokenizer.eos_ids),
            "unscorable": answers.rewards.unscorable,
            "failed": answers.rewards.failed,
            "errors": {part: hidden(text) for part, text in answers.rewards.errors.items()},
        }

    return read


def _rows(answers: Answers, batch: Batch, eos_ids: tuple[int, ...]) -> list[dict[str, Any]]:
    table, rollout, lengths = answers.rewards, answers.rollout, answers.lengths
    # as training's evaluation counts: the part named `correct`, else the total
    correct = np.nan_to_num(table.parts.get("correct", table.total)) > 0
    rows = []
    for row, text in enumerate(answers.texts):
        place, number = divmod(row, answers.group_size)
        prompt, sample = answers.prompts[place], batch.first + number
        last = rollout.completion[row, max(int(lengths[row]) - 1, 0)]
        rows.append(
            {
                "problem": batch.problems[place],
                "sample": sample,
                "level": prompt.level,
                "answer": prompt.answer,
                "completion": text,
                "final_answer": final_answer(text),
                "correct": int(correct[row]),
                "reward": _number(table.total[row]),
                "parts": {part: _number(values[row]) for part, values in table.parts.items()},
                "length": int(lengths[row]),
                "truncated": bool(rollout.truncated[row]),
                "eos": bool(lengths[row] and int(last) in eos_ids),
            }
            | ({"prompt": prompt.text} if sample == 0 else {})
        )
    return rows


def _number(value: np.floating) -> float | None:
    """JSON has no NaN: null is a row without a score."""
    return None if np.isnan(value) else float(value)
