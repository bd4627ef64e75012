"""DeepMath-103K (He et al. 2025, arXiv:2504.11456): hard problems with a difficulty label."""

from grpo_jax.tasks import data, golds
from grpo_jax.tasks.base import Task
from grpo_jax.tasks.problems import is_heldout, make_task, solvable
from grpo_jax.tasks.prompts import Problem, style_of


def deepmath(
    path: str | None = None,
    name: str = "zwhe99/DeepMath-103K",
    difficulty: list[float] | None = None,
    kind: str = "latex",
    validate: bool = True,
    limit: int | None = None,
    style: str = "boxed",
    shots: int = 0,
    heldout: int = 128,
) -> Task:
    """The task, in the order of its files, for experiments on difficulty with real problems.

    Args:
        path: a local folder with a `train` file, or that file. Rows have `question`,
            `final_answer` and `difficulty`, or `prompt`, `ground_truth` and `difficulty` as the
            part that ROLL ships. None: the Hub's data set `name`.
        name: data set on the Hugging Face Hub, with the split "train".
        difficulty: [lowest, highest], both included; None for all. The labels go from 1 to 9.5 in
            halves.
        kind: of the golds that are kept: "latex", all that math-verify can read, or "numeric",
            single numbers, for which `reward=boxed` is enough. About half are; the rest hold
            many that can be guessed ("Yes", "B").
        validate: ask math-verify, where it is installed, about each LaTeX gold.
        limit: use the first so many training problems; None for all.
        style: of the prompts, see `grpo_jax.tasks.prompts`.
        shots: worked examples shown first, of our own: `prompts.EXAMPLES`.
        heldout: number of held-out problems at most. They are the first of a tenth of the data
            that is chosen by a hash of the question: whatever range of difficulty a run trains on,
            it trains on none that another run holds out.

    `dropped` counts rows whose gold can't be read, and training rows that came before. `level` is
    the difficulty as text ("4.5").

    Raises FileNotFoundError if the file is missing, ConnectionError if the Hub can't be read,
    ValueError if a side is left without problems or for a range, style or kind out of place.
    """
    style_of(style, shots)  # before anything is read
    low, high = _range(difficulty)
    rows = data.read(path, "train", name)
    rows = [row for row in rows if low <= float(data.field(row, "difficulty")) <= high]
    found = [_problem(row) for row in rows]
    train, train_bad = solvable((p for p in found if not is_heldout(p.question)), kind, validate)
    test, test_bad = solvable((p for p in found if is_heldout(p.question)), kind, validate)
    return make_task(
        "deepmath",
        train,
        test[:heldout],
        style=style,
        shots=shots,
        limit=limit,
        dropped={"train_gold_unparsable": train_bad, "heldout_gold_unparsable": test_bad},
    )


def _range(difficulty: list[float] | None) -> tuple[float, float]:
    if difficulty is None:
        return float("-inf"), float("inf")
    ordered = isinstance(difficulty, list) and sorted(difficulty) == difficulty
    if not ordered or len(difficulty) != 2:
        raise ValueError(f"difficulty is [lowest, highest], got {difficulty}")
    return float(difficulty[0]), float(difficulty[1])


def _problem(row: data.Row) -> Problem:
    return Problem(
        str(data.field(row, "question", "prompt")).strip(),
        golds.clean(data.field(row, "final_answer", "ground_truth")),
        level=f"{float(row['difficulty']):g}",
    )
