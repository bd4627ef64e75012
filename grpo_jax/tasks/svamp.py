"""SVAMP (Patel et al. 2021, arXiv:2103.07191): one-step word problems, easier than GSM8K."""

from pathlib import Path

from grpo_jax.tasks import data, golds
from grpo_jax.tasks.base import Task
from grpo_jax.tasks.problems import is_heldout, make_task, solvable
from grpo_jax.tasks.prompts import Problem, style_of

_MISSPELT = {"Common-Divison": "Common-Division"}  # in one row


def svamp(
    path: str | None = None,
    name: str = "ChilleD/SVAMP",
    limit: int | None = None,
    style: str = "xml",
    shots: int = 1,
    heldout: int = 128,
) -> Task:
    """The task, in the order of its files.

    Args:
        path: a local folder with a `train` and a `test` file; or a file of all problems, or a
            folder with an `svamp` file, of which a tenth, chosen by a hash of the question, is held
            out. Rows have `Body`, `Question`, `Answer` and `Type`. None: the Hub's data set `name`.
        name: data set on the Hugging Face Hub, with the splits "train" and "test".
        limit: use the first so many training problems; None for all.
        style: of the prompts, see `grpo_jax.tasks.prompts`.
        shots: worked examples shown first, of our own: `prompts.EXAMPLES`.
        heldout: number of held-out problems at most, the first ones.

    `dropped` counts rows whose gold is no number, training rows whose question is also held out,
    and ones that came before. `level` is the operation: Addition, Subtraction, Multiplication or
    Common-Division.

    Raises FileNotFoundError if a file is missing, ConnectionError if the Hub can't be read,
    ValueError if a split is left without problems or for an unknown style.
    """
    style_of(style, shots)  # before anything is read
    train, test = _splits(path, name)
    train, train_bad = solvable(train)
    test, test_bad = solvable(test)
    return make_task(
        "svamp",
        train,
        test[:heldout],
        style=style,
        shots=shots,
        limit=limit,
        dropped={"train_gold_unparsable": train_bad, "heldout_gold_unparsable": test_bad},
    )


def problem(row: data.Row) -> Problem:
    """One row of SVAMP, in its own or in the Hub's fields."""
    body, question = str(row["Body"]).strip(), str(row["Question"]).strip()
    operation = str(row.get("Type"))
    if not body.endswith((".", "?", "!", ",")):
        body += "."  # the file leaves some sentences open
    level = _MISSPELT.get(operation, operation)
    return Problem(f"{body} {question}", golds.clean(row["Answer"]), level=level)


def _splits(path: str | None, name: str) -> tuple[list[Problem], list[Problem]]:
    if path is None or _has_splits(Path(path).expanduser()):
        train, test = (data.read(path, split, name) for split in ("train", "test"))
        return [problem(row) for row in train], [problem(row) for row in test]
    found = [problem(row) for row in data.read(path, "svamp", name)]
    train = [p for p in found if not is_heldout(p.question)]
    return train, [p for p in found if is_heldout(p.question)]


def _has_splits(source: Path) -> bool:
    try:
        return source.is_dir() and bool(data.find(source, ("train",)))
    except FileNotFoundError:
        return False
