"""From rows to a task: what is left out and counted, what is held out, what is shown."""

import hashlib
from collections.abc import Iterable, Sequence
from functools import partial

from grpo_jax.tasks import golds
from grpo_jax.tasks.base import Prompt, Shuffled, Task
from grpo_jax.tasks.prompts import Problem, Style, examples, make_prompt, right_completion, style_of

_HELDOUT_SHARE = 10  # one problem in so many, where a data set comes without a test split


def solvable(
    problems: Iterable[Problem], kind: str = "numeric", validate: bool = False
) -> tuple[list[Problem], int]:
    """The problems whose gold a reward can read (`golds.readable`), and how many have no such."""
    problems = list(problems)
    good = golds.readable([problem.answer for problem in problems], kind, validate)
    kept = [problem for problem, right in zip(problems, good, strict=True) if right]
    return kept, len(problems) - len(kept)


def normal(question: str) -> str:
    """A question without what makes no difference between two: case and white space."""
    return " ".join(question.casefold().split())


def separate(
    train: Sequence[Problem], heldout: Sequence[Problem]
) -> tuple[list[Problem], dict[str, int]]:
    """`train` without problems that are held out too, or that came before; and how many those are.

    Questions are compared in their `normal` form; of several that are the same the first stays.
    """
    held = {normal(problem.question) for problem in heldout}
    outside = [problem for problem in train if normal(problem.question) not in held]
    fresh = list({normal(problem.question): problem for problem in reversed(outside)}.values())
    fresh.reverse()
    return fresh, {
        "train_also_heldout": len(train) - len(outside),
        "train_duplicate": len(outside) - len(fresh),
    }


def is_heldout(question: str) -> bool:
    """Whether a problem belongs to the held-out tenth of a data set that has no test split.

    By a hash of its `normal` form: the same in every run, whatever else is left out or chosen.
    """
    mixed = hashlib.blake2b(normal(question).encode(), digest_size=8).digest()
    return int.from_bytes(mixed, "big") % _HELDOUT_SHARE == 0


def make_task(
    name: str,
    train: Sequence[Problem],
    heldout: Sequence[Problem],
    *,
    style: str,
    shots: int,
    limit: int | None,
    dropped: dict[str, int],
    own_shots: bool = False,
) -> Task:
    """A task of `train` and `heldout`, in their order, with what they share left out of `train`.

    Args:
        name: of the task.
        train: problems to train on; the first `limit` of them are used.
        heldout: problems to evaluate on.
        style: of the prompts, see `prompts`.
        shots: solved problems that each prompt shows first.
        limit: None for all.
        dropped: what was left out before.
        own_shots: show the head of `train`, which is not trained on then; else `EXAMPLES`.

    Raises ValueError if nothing is left on either side, or for a style or shots out of range.
    """
    template = style_of(style, shots)
    fresh, counts = separate(train, heldout)
    shown = fresh[:shots] if own_shots else examples(shots)
    rest = fresh[len(shown) if own_shots else 0 :][:limit]
    if not rest or not heldout:
        raise ValueError("no problems are left to train on or to hold out")
    prompts = tuple(make_prompt(problem, template, shown) for problem in rest)
    return Task(
        name=name,
        train=Shuffled(prompts),
        train_size=len(prompts),
        heldout=tuple(make_prompt(problem, template, shown) for problem in heldout),
        stop_strings=template.stops,
        right=partial(_right, style=template),
        dropped=dropped | counts,
    )


def make_evaluation(
    name: str, problems: Sequence[Problem], shown: Sequence[Problem], *, style: str, dropped: int
) -> Task:
    """A task whose held-out prompts are all of `problems`; `train` gives the same ones.

    Raises ValueError if there are none.
    """
    if not problems:
        raise ValueError(f"no problems are left of {name!r}")
    template = style_of(style, len(shown))
    prompts = tuple(make_prompt(problem, template, shown) for problem in problems)
    return Task(
        name=name,
        train=Shuffled(prompts),
        train_size=len(prompts),
        heldout=prompts,
        stop_strings=template.stops,
        right=partial(_right, style=template),
        dropped={"heldout_gold_unparsable": dropped},
    )


def _right(prompt: Prompt, style: Style) -> str:
    return right_completion(prompt.answer, style)
