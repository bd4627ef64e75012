"""Evaluation sets by name: where each is, what its rows look like, and its problems as a task."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from grpo_jax.tasks import data, golds, gsm8k, math, svamp
from grpo_jax.tasks.base import Task
from grpo_jax.tasks.problems import make_evaluation, solvable
from grpo_jax.tasks.prompts import Problem, examples, style_of


@dataclass(frozen=True)
class Source:
    """Where a set is, and how a row of it becomes a problem."""

    hub: str  # data set on the Hugging Face Hub
    split: str
    kind: str  # of its golds, see `golds`
    problem: Callable[[data.Row], Problem]
    stems: tuple[str, ...]  # what its files or folders are called, beside the set's own name
    configuration: str | None = None


def _general(row: data.Row) -> Problem:
    """A row with a question and its gold: one answer, or a list of ways to write it.

    The first way is the gold. All of them are the column `alternatives`, of which a reward that
    takes it accepts any.
    """
    question = str(data.field(row, "problem", "question")).strip()
    gold = data.field(row, "final_answer", "answer")
    if not isinstance(gold, list):
        return Problem(question, golds.clean(gold))
    ways = tuple(dict.fromkeys(way for way in map(golds.clean, gold) if way))
    return Problem(question, ways[0] if ways else "", columns={"alternatives": ways})


SETS = {
    "aime24": Source("HuggingFaceH4/aime_2024", "train", "numeric", _general, ("aime",)),
    "aime25": Source("math-ai/aime25", "test", "numeric", _general, ("aime2025",)),
    "amc": Source("AI-MO/aimo-validation-amc", "train", "numeric", _general, ("amc23",)),
    "math500": Source("HuggingFaceH4/MATH-500", "test", "latex", math.problem, ("math",)),
    "minerva": Source("math-ai/minervamath", "test", "latex", _general, ("minerva_math",)),
    "olympiad": Source(
        "Hothan/OlympiadBench",
        "train",
        "latex",
        _general,
        ("olympiad_bench", "olympiadbench"),
        "OE_TO_maths_en_COMP",
    ),
    "gsm8k": Source("openai/gsm8k", "test", "numeric", gsm8k.problem, (), "main"),
    "svamp": Source("ChilleD/SVAMP", "test", "numeric", svamp.problem, ()),
}


def load(
    name: str,
    *,
    path: str | None = None,
    style: str = "boxed",
    shots: int = 0,
    limit: int | None = None,
    validate: bool = True,
) -> Task:
    """The set `name` as a task: all its problems are held out, and `train` gives the same ones.

    Args:
        name: one of `SETS`: aime24, aime25, amc, math500, minerva, olympiad, gsm8k, svamp.
        path: a local file; or a folder, in which these are looked for: `NAME/test`, a file called
            NAME or as in the Dr. GRPO paper's suite (aime.arrow, math.arrow, olympiad_bench.arrow),
            the same one folder below, then the set's split or `test` (.jsonl, .json, .parquet or
            .arrow). So one folder with all sets in it serves them all. None: the Hub.
        style: of the prompts, see `grpo_jax.tasks.prompts`; the reward must read what it asks for.
        shots: solved problems shown first: for gsm8k the head of its train file, as the training
            task shows them, else worked examples of our own (`prompts.EXAMPLES`).
        limit: take the first so many rows only; None for all.
        validate: ask math-verify, where it is installed, about each LaTeX gold.

    Rows whose gold can't be read are left out, and counted in `dropped`: accuracy is over the
    others. No row is left out for being there twice. Prompts of minerva and olympiad have a column
    `alternatives`, all the ways to write the gold.

    Raises ValueError for an unknown set, style or number of shots, FileNotFoundError if the folder
    has no such file, ConnectionError if the Hub can't be read.
    """
    if name not in SETS:
        raise ValueError(f"unknown evaluation set {name!r}; there are {', '.join(SETS)}")
    style_of(style, shots)  # before anything is read
    found = _read(name, path, SETS[name].split)[:limit]
    problems, dropped = solvable(map(SETS[name].problem, found), SETS[name].kind, validate)
    return make_evaluation(name, problems, _shown(name, path, shots), style=style, dropped=dropped)


def _read(name: str, path: str | None, split: str) -> list[data.Row]:
    source = SETS[name]
    called = (name, *source.stems)
    below = tuple(f"*/{stem}" for stem in called)
    folder = (f"{name}/{split}", f"{name}/test")
    if split == source.split:
        stems = (*folder, *called, *below, split, "test")
    else:
        stems = (folder[0], split)  # another split is never called as the set is
    return data.read(path, split, source.hub, configuration=source.configuration, stems=stems)


def _shown(name: str, path: str | None, shots: int) -> list[Problem]:
    if name != "gsm8k" or shots == 0:
        return list(examples(shots))
    if path is not None and Path(path).expanduser().is_file():
        raise ValueError(f"the shots of gsm8k are the head of its train file: not in {path}")
    return solvable(map(gsm8k.problem, _read(name, path, "train")))[0][:shots]
