"""The tasks math, svamp and deepmath: real rows of MATH-500 and SVAMP, and made-up ones."""

import json
from pathlib import Path

import pytest

from grpo_jax.tasks.base import prompt_ids, within_limit
from grpo_jax.tasks.deepmath import deepmath
from grpo_jax.tasks.math import math
from grpo_jax.tasks.problems import is_heldout
from grpo_jax.tasks.svamp import svamp
from grpo_jax.tokenizer import char_tokenizer

DATA = Path(__file__).parents[1] / "data"
MATH500 = str(DATA / "math500")  # four test rows
SVAMP = str(DATA / "svamp")  # seven rows, two of which are held out

TRAIN = [
    {"problem": "What is 1+2?", "answer": "3", "level": 1},
    {"problem": "Name two roots.", "answer": "1,-2", "level": "Level 3"},
    {"problem": "Halve 1.", "solution": "It is $\\boxed{\\frac{1}{2}}.$", "level": 5},
    {"problem": "Broken?", "answer": "\\frac{1}{2", "level": 5},
    {"problem": "No level", "answer": "4", "level": "Level ?"},
    {"problem": "Simplify  $(-K + 4) + (-2 + 3k)$.", "answer": "2k+2", "level": 4},  # held out
    {"problem": "what is 1+2? ", "answer": "3", "level": 1},  # the first again
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def train(tmp_path):
    return write(tmp_path / "train.jsonl", TRAIN)


def trained(task):
    return {prompt.text: prompt.answer for prompt in task.train.prompts}


def on_math(train, **settings):
    return math(train, heldout_path=MATH500, validate=False, **settings)


def test_math(train):
    task = on_math(train)
    assert trained(task) == {
        "What is 1+2?": "3",
        "Name two roots.": "1,-2",
        "Halve 1.": "\\frac{1}{2}",  # from the solution's box
        "No level": "4",
    }
    assert [(p.answer, p.level) for p in task.heldout] == [
        ("-50", 1),
        ("2k+2", 2),
        ("6", 2),
        ("10080", 3),
    ]
    assert task.dropped == {
        "train_gold_unparsable": 1,
        "heldout_gold_unparsable": 0,
        "train_also_heldout": 1,
        "train_duplicate": 1,
    }


def test_levels_of_math(train):
    task = on_math(train, levels=[3, 4, 5])
    assert list(trained(task)) == ["Name two roots.", "Halve 1."]
    assert {prompt.level for prompt in task.heldout} == {1, 2, 3}  # all of them


def test_numeric_golds_of_math(train):
    task = on_math(train, kind="numeric")
    assert set(trained(task).values()) == {"3", "\\frac{1}{2}", "4"}
    assert [p.answer for p in task.heldout] == ["-50", "6", "10080"]
    assert task.dropped["heldout_gold_unparsable"] == 1


def test_math_in_one_folder_or_from_the_hub(tmp_path, train, monkeypatch):
    write(tmp_path / "test.jsonl", TRAIN[:1])
    folder = math(str(tmp_path), validate=False, heldout=1)
    assert len(folder.heldout) == 1 and folder.dropped["train_also_heldout"] == 2

    def hub(name, configuration, *, split):
        assert (name, configuration) == ("some/mirror", None)
        return TRAIN if split == "train" else TRAIN[:1]

    monkeypatch.setattr("datasets.load_dataset", hub)
    assert math(name="some/mirror", validate=False).heldout == folder.heldout


def test_what_to_hold_out_is_asked_for(train):
    with pytest.raises(ValueError, match=r"is the train file: .*task\.heldout_path"):
        math(train, validate=False)
    with pytest.raises(FileNotFoundError, match=r"no test\.jsonl.*task\.heldout_path=FOLDER"):
        math(str(Path(train).parent), validate=False)


@pytest.mark.parametrize("levels", [[6], 3, ["3"]])
def test_levels_out_of_range(train, levels):
    with pytest.raises(ValueError, match="levels"):
        on_math(train, levels=levels)


def test_svamp_holds_out_a_tenth_of_one_file():
    task = svamp(SVAMP)
    assert [(p.answer, p.level) for p in task.heldout] == [("1", "Subtraction")] * 2
    assert all(is_heldout(p.text) for p in task.heldout)
    assert {p.answer: p.level for p in task.train.prompts} == {
        "145": "Common-Division",
        "19": "Subtraction",
        "192": "Addition",
        "70": "Multiplication",
        "2": "Common-Division",  # misspelt in the file
    }
    assert set(task.dropped.values()) == {0}
    by_file = svamp(SVAMP + "/svamp.jsonl")
    assert (by_file.heldout, by_file.train) == (task.heldout, task.train)


def test_svamp_questions_are_sentences():
    text = svamp(SVAMP).train.prompts[0].text
    assert text.endswith("into 93 groups. How big is each group of bananas?")
    assert [m["role"] for m in svamp(SVAMP).heldout[0].messages] == [
        "system",
        "user",
        "assistant",
        "user",
    ]


def test_svamp_with_splits(tmp_path):
    text = (DATA / "svamp" / "svamp.jsonl").read_text()
    rows = [json.loads(line) for line in text.splitlines()]
    write(tmp_path / "train.jsonl", rows[:4])
    write(tmp_path / "test.jsonl", rows[3:5])
    task = svamp(str(tmp_path))
    assert (task.train_size, len(task.heldout)) == (3, 2)
    assert task.dropped["train_also_heldout"] == 1


def deep_rows(n, **more):
    return [
        {"question": f"Question {i}", "final_answer": str(i), "difficulty": 1 + i % 9} | more
        for i in range(n)
    ]


def test_deepmath(tmp_path):
    rows = deep_rows(60)
    path = write(tmp_path / "train.jsonl", [*rows, rows[1], {**rows[2], "final_answer": "{"}])
    task = deepmath(path, validate=False)
    held = [row["question"] for row in rows if is_heldout(row["question"])]
    assert [p.text for p in task.heldout] == held and 2 < len(held) < 15
    assert task.train_size == 60 - len(held)
    assert {p.level for p in task.train.prompts} == {str(i) for i in range(1, 10)}
    assert task.dropped["train_gold_unparsable"] == task.dropped["train_duplicate"] == 1


def test_a_range_of_difficulty_trains_on_nothing_that_is_held_out(tmp_path):
    rows = [
        {"prompt": r["question"], "ground_truth": r["final_answer"], "difficulty": "4.5"}
        for r in deep_rows(40)
    ]
    path = write(tmp_path / "train.jsonl", [*deep_rows(200), *rows])
    whole = deepmath(path, heldout=1000)
    part = deepmath(path, difficulty=[3, 4.5], heldout=1000)
    assert {p.level for p in part.train.prompts} == {"3", "4", "4.5"}
    assert {p.text for p in part.heldout} <= {p.text for p in whole.heldout}
    assert not {p.text for p in part.train.prompts} & {p.text for p in whole.heldout}
    few = deepmath(path, heldout=3)
    assert (few.heldout, few.train) == (whole.heldout[:3], whole.train)


@pytest.mark.parametrize("difficulty", [[5, 3], [1], 4])
def test_difficulty_out_of_order(difficulty):
    with pytest.raises(ValueError, match="lowest, highest"):
        deepmath("nowhere", difficulty=difficulty)


@pytest.mark.parametrize("task", [math, svamp, deepmath])
def test_a_bad_style_is_refused_before_anything_is_read(task):
    with pytest.raises(ValueError, match="unknown style"):
        task("nowhere", style="html")


def test_the_order_is_deterministic(train):
    first, second = on_math(train), on_math(train)
    assert [first.train(i, 1) for i in range(9)] == [second.train(i, 1) for i in range(9)]


def test_long_prompts_are_dropped_not_cut_in_every_task(tmp_path, train):  # T15
    words = char_tokenizer()
    deep = write(tmp_path / "deep.jsonl", deep_rows(40))
    for task in (on_math(train), svamp(SVAMP), deepmath(deep)):
        lengths = sorted(len(prompt_ids(p, words)) for p in task.train.prompts)
        shortest = min(len(prompt_ids(p, words)) for p in task.heldout)
        limit = max(shortest, lengths[0])
        short = within_limit(task, words, limit)
        assert short.dropped["train_too_long"] == sum(n > limit for n in lengths)
        assert short.train_size + short.dropped["train_too_long"] == task.train_size
        assert all(p in task.train.prompts for p in short.train.prompts)
