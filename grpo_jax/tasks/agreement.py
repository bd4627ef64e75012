"""Whether the reward of a run reads answers in the form that the prompts of its task ask for."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from grpo_jax.rewards.combine import RewardPart, score
from grpo_jax.tasks.base import Task

_WRONG = "-7654321"  # the answer to no problem


def mismatch(task: Task, parts: Sequence[RewardPart]) -> str | None:
    """What is wrong if the reward pays a right answer no more than a wrong one, else None.

    Both are made by `task.right` for the first held-out prompt: they stand where its style asks for
    the answer, with no reasons given. A prompt that asks for a box under a reward that reads tags
    shows here, before a run of zeros does. None too where the task has no `right`, or where a part
    cannot score the row: then nothing is known.
    """
    if task.right is None:
        return None
    prompt = task.heldout[0]
    right, wrong = task.right(prompt), task.right(replace(prompt, answer=_WRONG))
    columns = {name: [value, value] for name, value in prompt.columns.items()}
    columns["truncated"] = [False, False]
    try:
        table = score(parts, [right, wrong], [prompt.answer, prompt.answer], columns)
    except TypeError:  # a column that only a rollout has
        return None
    good, bad = table.total
    if np.isnan(good) or np.isnan(bad) or good > bad:
        return None
    paid = ", ".join(f"{name} {values[0]:g}" for name, values in table.parts.items())
    return (
        f"the reward pays a right answer in the form that task {task.name!r} asks for no more than "
        f"a wrong one ({paid}): {right!r}. Choose task.style and reward to match (see the table in "
        "grpo_jax/tasks/prompts.py)"
    )
