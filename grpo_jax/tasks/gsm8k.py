"""GSM8K (Cobbe et al. 2021, arXiv:2110.14168): grade-school word problems with integer answers."""

import re
from collections.abc import Iterable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any

from grpo_jax.rewards import numeric
from grpo_jax.tasks.base import Prompt, Shuffled, Task

_SYSTEM = (
    "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n</answer>\n"
)
_STOPS = {"xml": (), "raw": ("\n\n", "Question:")}
_SPLITS = ("train", "test")
_EXTENSIONS = ("jsonl", "json", "parquet")


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
        path: a local folder with a `train` and a `test` file (.jsonl, .json or .parquet) whose rows
            have `question` and `answer`; no network is used. None: the Hub's data set `name`.
        name: data set on the Hugging Face Hub; its configuration "main" is read.
        limit: use the first so many training problems; None for all.
        style: "xml", a chat with a system prompt that asks for <reasoning> and <answer> tags, or
            "raw", few-shot text for a base model, whose answers end at a blank line.
        shots: solved problems shown first, taken from the head of the training file and not
            trained on. Small instruct models may need one to find the XML format at all.
        heldout: number of held-out problems, from the head of the test file.

    `dropped` counts rows whose gold answer is no number, and training rows whose question is also
    held out. `level` is the number of lines in the reference solution.

    Raises FileNotFoundError if the folder lacks a split, ConnectionError if the Hub can't be read,
    ValueError if a split is left without problems or for an unknown style.
    """
    if style not in _STOPS:
        raise ValueError(f"unknown style {style!r}; there are {', '.join(_STOPS)}")
    if style == "raw" and shots < 1:
        raise ValueError("style 'raw' needs shots >= 1: only they show the format")
    splits = _from_hub(name) if path is None else _from_folder(Path(path))
    train, train_bad = _solvable(splits["train"])
    test, test_bad = _solvable(splits["test"])
    test = test[:heldout]
    held = {row["question"] for row in test}
    fresh = [row for row in train if row["question"] not in held]
    shown, rest = fresh[:shots], fresh[shots:]
    if not rest[:limit] or not test:
        raise ValueError("no problems are left to train on or to hold out")
    make = {"xml": _chat_prompt, "raw": _raw_prompt}[style]
    prompts = tuple(make(row, shown) for row in rest[:limit])
    return Task(
        name="gsm8k",
        train=Shuffled(prompts),
        train_size=len(prompts),
        heldout=tuple(make(row, shown) for row in test),
        stop_strings=_STOPS[style],
        dropped={
            "train_gold_unparsable": train_bad,
            "test_gold_unparsable": test_bad,
            "train_also_heldout": len(train) - len(fresh),
        },
    )


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


def _solvable(rows: Iterable[dict[str, Any]]) -> tuple[list[dict[str, Any]], int]:
    """Rows with a gold answer that the reward can read, and how many have none."""
    rows = list(rows)
    kept = [row for row in rows if numeric.parse(gold(row["answer"])) is not None]
    return kept, len(rows) - len(kept)


def _chat_prompt(row: dict[str, Any], shown: Sequence[dict[str, Any]]) -> Prompt:
    messages = [{"role": "system", "content": _SYSTEM}]
    for example in shown:
        messages.append({"role": "user", "content": example["question"]})
        messages.append({"role": "assistant", "content": _xml(example["answer"])})
    messages.append({"role": "user", "content": row["question"]})
    return _prompt(row, row["question"], messages)


def _raw_prompt(row: dict[str, Any], shown: Sequence[dict[str, Any]]) -> Prompt:
    examples = "".join(
        f"Question: {example['question']}\n"
        f"Answer: {solution(example['answer'])}\n#### {gold(example['answer'])}\n\n"
        for example in shown
    )
    # no space after the last colon: it would split the token of a word that follows
    return _prompt(row, f"{examples}Question: {row['question']}\nAnswer:", None)


def _prompt(row: dict[str, Any], text: str, messages: list[dict[str, str]] | None) -> Prompt:
    level = len(solution(row["answer"]).splitlines())
    return Prompt(text, gold(row["answer"]), level=level, messages=messages)


def _xml(answer: str) -> str:
    return f"<reasoning>\n{solution(answer)}\n</reasoning>\n<answer>\n{gold(answer)}\n</answer>\n"


def _from_folder(folder: Path) -> dict[str, Iterable[dict[str, Any]]]:
    # `load_dataset` would report the load to the Hub (seconds of waiting without a network) and
    # copy the rows into a cache in the home folder
    from datasets import IterableDataset

    splits = {}
    for split in _SPLITS:
        files = _split_files(folder, split)
        parquet = str(files[0]).endswith(".parquet")
        read = IterableDataset.from_parquet if parquet else IterableDataset.from_json
        splits[split] = read(files)
    return splits


def _split_files(folder: Path, split: str) -> list[str | bytes | PathLike]:
    for extension in _EXTENSIONS:
        whole, shards = f"{split}.{extension}", f"{split}-*.{extension}"
        files = sorted([*folder.glob(whole), *folder.glob(shards)])
        if files:
            return [str(file) for file in files]
    raise FileNotFoundError(f"no {split}.jsonl, .json or .parquet in {folder}")


def _from_hub(name: str) -> dict[str, Iterable[dict[str, Any]]]:
    from datasets import load_dataset

    try:
        return {split: load_dataset(name, "main", split=split) for split in _SPLITS}
    except Exception as error:  # the Hub's client raises its own, and its HTTP library's, classes
        raise ConnectionError(
            f"could not load {name!r} from the Hugging Face Hub ({error}). With the data on disk, "
            "give its folder, which holds train.jsonl and test.jsonl: task.path=FOLDER"
        ) from error
