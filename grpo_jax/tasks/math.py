"""MATH (Hendrycks et al. 2021, arXiv:2103.03874): competition problems with LaTeX answers."""

from pathlib import Path

from grpo_jax.rewards import numeric
from grpo_jax.tasks import data, golds
from grpo_jax.tasks.base import Task
from grpo_jax.tasks.problems import make_task, solvable
from grpo_jax.tasks.prompts import Problem, style_of


def math(
    path: str | None = None,
    name: str = "nlile/hendrycks-MATH-benchmark",
    heldout_path: str | None = None,
    levels: list[int] | None = None,
    kind: str = "latex",
    validate: bool = True,
    limit: int | None = None,
    style: str = "boxed",
    shots: int = 0,
    heldout: int = 500,
) -> Task:
    """Training problems of MATH; held out is MATH-500 (Lightman et al. 2023, arXiv:2305.20050).

    Args:
        path: a local folder with a `train` file (and a `test` file, unless `heldout_path` is
            given), or the train file itself. Rows have `problem` (or `question`), `level` (1 to 5,
            or "Level 1" to "Level 5") and `answer`; without one, it is what the last box of
            `solution` holds. None: the Hub's data set `name`.
        name: data set on the Hugging Face Hub, with the splits "train" and "test". The default is
            the split of PRM800K: the 500 problems of MATH-500 as test, the other 12,000 as train.
        heldout_path: a local folder with a `test` file, or that file: MATH-500. None: the `test`
            of the same source.
        levels: train on these levels only, such as [3, 4, 5]; None for all. Held-out problems have
            all levels, which are reported one by one.
        kind: of the golds that are kept: "latex", all that math-verify can read, or "numeric",
            single numbers, for which `reward=boxed` is enough.
        validate: ask math-verify, where it is installed, about each LaTeX gold.
        limit: use the first so many training problems; None for all.
        style: of the prompts, see `grpo_jax.tasks.prompts`.
        shots: worked examples shown first, of our own: `prompts.EXAMPLES`.
        heldout: number of held-out problems, from the head of the test file.

    `dropped` counts rows whose gold can't be read, training rows whose question is also held out,
    and ones that came before.

    Raises FileNotFoundError if a file is missing, ConnectionError if the Hub can't be read,
    ValueError if a split is left without problems or for an unknown style, kind or level.
    """
    style_of(style, shots)  # before anything is read
    if levels is not None and not (isinstance(levels, list) and set(levels) <= {1, 2, 3, 4, 5}):
        raise ValueError(f"levels is a list of levels of MATH, 1 to 5, got {levels}")
    train = [problem(row) for row in data.read(path, "train", name)]
    if levels is not None:
        train = [one for one in train if one.level in levels]
    train, train_bad = solvable(train, kind, validate)
    test, test_bad = solvable(map(problem, _heldout_rows(path, name, heldout_path)), kind, validate)
    return make_task(
        "math",
        train,
        test[:heldout],
        style=style,
        shots=shots,
        limit=limit,
        dropped={"train_gold_unparsable": train_bad, "heldout_gold_unparsable": test_bad},
    )


def _heldout_rows(path: str | None, name: str, heldout_path: str | None) -> list[data.Row]:
    if heldout_path is None and path is not None and Path(path).expanduser().is_file():
        raise ValueError(f"{path} is the train file: name what to hold out by task.heldout_path")
    try:
        return data.read(path if heldout_path is None else heldout_path, "test", name)
    except FileNotFoundError as error:
        raise FileNotFoundError(f"{error}; task.heldout_path=FOLDER names another place") from error


def problem(row: data.Row) -> Problem:
    """One row of MATH or MATH-500, as `math` takes them."""
    answer = (
        row["answer"] if "answer" in row else numeric.last_boxed(str(row.get("solution") or ""))
    )
    return Problem(
        str(data.field(row, "problem", "question")).strip(),
        golds.clean(answer),
        level=_level(row.get("level")),
    )


def _level(level: object) -> int | None:
    """3 of 3, "3" or "Level 3"; None where there is none ("Level ?" stands in two rows of MATH)."""
    digits = str(level).removeprefix("Level").strip()
    return int(digits) if digits in {"1", "2", "3", "4", "5"} else None
