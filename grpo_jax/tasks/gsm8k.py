"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): grade-school word problems with integer answers."""

import re

from grpo_jax.tasks import data
from grpo_jax.tasks.base import Task
from grpo_jax.tasks.problems import make_task, solvable
from grpo_jax.tasks.prompts import Problem, style_of

_MAIN = {"configuration": "main"}  # of the Hub's data set; the other is "socratic"


def gsm8k(
    path: str | None = None,
    name: str = "openai/gsm8k",
    limit: int | None = None,
    style: str = "xml",
    shots: int = 1,
    heldout: int = 128,
) -> Task:
    """The task, in the order of its files.

    Args:
        path: a local folder with a `train` and a `test` file (.jsonl, .json, .parquet or .arrow)
            whose rows have `question` and `answer`; no network is used. None: the Hub's data set
            `name`.
        name: data set on the Hugging Face Hub; its configuration "main" is read.
        limit: use the first so many training problems; None for all.
        style: of the prompts, see `grpo_jax.tasks.prompts`: "xml", a chat with a system prompt
            that asks for <reasoning> and <answer> tags, "raw", few-shot text for a base model,
            whose answers end at a blank line, and others. The reward must read what it asks for.
        shots: solved problems shown first, taken from the head of the training file and not
            trained on. Small instruct models may need one to find the XML format at all.
        heldout: number of held-out problems, from the head of the test file.

    `dropped` counts rows whose gold answer is no number, training rows whose question is also
    held out, and ones that came before. `level` is the number of lines in the reference solution.

    Raises FileNotFoundError if the folder lacks a split, ConnectionError if the Hub can't be read,
    ValueError if a split is left without problems or for an unknown style.
    """
    style_of(style, shots)  # before anything is read
    train, train_bad = solvable(map(problem, data.read(path, "train", name, **_MAIN)))
    test, test_bad = solvable(map(problem, data.read(path, "test", name, **_MAIN)))
    return make_task(
        "gsm8k",
        train,
        test[:heldout],
        style=style,
        shots=shots,
        limit=limit,
        own_shots=True,
        dropped={"train_gold_unparsable": train_bad, "test_gold_unparsable": test_bad},
    )


def problem(row: data.Row) -> Problem:
    """One row of GSM8K."""
    question, answer = data.field(row, "question"), data.field(row, "answer")
    worked = solution(answer)
    return Problem(question, gold(answer), worked, level=len(worked.splitlines()))


def gold(answer: str) -> str:
    """What follows the last `####` of a reference solution, without commas; "" if there is none.

    >>> gold("He earns 3*360 = $<<3*360=1080>>1080.\\n#### 1,080")
    '1080'
    """
    _, mark, last = answer.rpartition("####")
    return last.strip().replace(",", "") if mark else ""


def solution(answer: str) -> str:
    """The reference solution as prose: no calculator spans `<<...>>`, no `####` line."""
    return re.sub(r"<<.*?>>", "", answer.rpartition("####")[0]).strip()
