"""Evaluation sets by name. Rows of AIME, AMC, Minerva and Olympiad here are made up."""

import json
import shutil
from pathlib import Path

import pyarrow
import pytest

from grpo_jax.tasks.evaluation_sets import SETS, load
from grpo_jax.tasks.gsm8k import gsm8k

DATA = Path(__file__).parents[1] / "data"


def lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def arrow(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table)


@pytest.fixture
def folder(tmp_path):
    """All sets below one folder, some in folders of their own, some as the Dr. GRPO paper has."""
    aime = {"id": 60, "problem": "Find $x$.", "solution": "..", "answer": "025", "url": ""}
    lines(tmp_path / "aime24" / "test.jsonl", [aime])
    lines(tmp_path / "aime25" / "test.jsonl", [{"problem": "Find y.", "answer": 70, "id": "0"}])
    suite = tmp_path / "suite"
    arrow(suite / "aime.arrow", [{"problem": "Find $z$.", "answer": "9", "difficulty": 2.0}])
    arrow(suite / "amc.arrow", [{"problem": "Count.", "answer": 142.0, "difficulty": 2.0}])
    minerva = [
        {"problem": "How hot?", "answer": ["4.4e7\n", "4.4 \\times 10^7\n", "4.4e7"]},
        {"problem": "How far?", "answer": ["m\n"]},
    ]
    arrow(suite / "minerva.arrow", minerva)
    olympiad = [
        {"problem": "\nWhich? ", "answer": ["$69$,$84$"]},
        {"problem": "Both?", "answer": ["$221,$8$"]},  # a dollar sign too many
        {"problem": "None", "answer": []},
    ]
    arrow(suite / "olympiad_bench.arrow", olympiad)
    for name in ("gsm8k", "math500", "svamp"):
        shutil.copytree(DATA / name, tmp_path / name)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "golds", "dropped"),
    [
        ("aime24", ["25"], 0),
        ("aime25", ["70"], 0),
        ("amc", ["142"], 0),
        ("math500", ["-50", "2k+2", "6", "10080"], 0),
        ("minerva", ["4.4e7", "m"], 0),
        ("olympiad", ["69,84"], 2),
        ("gsm8k", ["18", "3"], 0),
        ("svamp", ["145", "19", "192", "1", "70", "1", "2"], 0),
    ],
)
def test_every_set_below_one_folder(folder, name, golds, dropped):
    task = load(name, path=str(folder), validate=False)
    assert [prompt.answer for prompt in task.heldout] == golds
    assert task.dropped == {"heldout_gold_unparsable": dropped}
    assert task.name == name and task.train_size == len(golds)
    assert {task.train(i, 0).answer for i in range(len(golds))} == set(golds)
    assert task.right(task.heldout[0]).count(golds[0]) == 1


def test_all_of_them_are_tested():
    (mark,) = test_every_set_below_one_folder.pytestmark
    assert [case[0] for case in mark.args[1]] == list(SETS)


def test_several_ways_to_write_a_gold(folder):
    hot, far = load("minerva", path=str(folder), validate=False).heldout
    assert hot.columns == {"alternatives": ("4.4e7", "4.4 \\times 10^7")}
    assert far.columns == {"alternatives": ("m",)}


def test_a_set_is_found_by_its_file_or_folder(folder):
    in_suite = load("aime24", path=str(folder / "suite"))
    assert [p.text for p in in_suite.heldout] == ["Find $z$."]
    by_file = load("aime24", path=str(folder / "suite" / "aime.arrow"))
    assert by_file.heldout == in_suite.heldout
    own = load("aime24", path=str(folder / "aime24"))
    assert own.heldout == load("aime24", path=str(folder)).heldout


def test_a_set_is_not_taken_for_another(folder):
    with pytest.raises(FileNotFoundError, match=r"aime25\.jsonl"):
        load("aime25", path=str(folder / "suite"))
    (folder / "gsm8k" / "test.jsonl").unlink()
    with pytest.raises(FileNotFoundError):  # the train file that is still there is no test
        load("gsm8k", path=str(folder))


def test_levels(folder):
    assert [p.level for p in load("math500", path=str(folder), validate=False).heldout] == [
        1,
        2,
        2,
        3,
    ]
    assert load("svamp", path=str(folder)).heldout[0].level == "Common-Division"


def test_gsm8k_prompts_are_those_of_the_training_task(folder):
    trained = gsm8k(str(DATA / "gsm8k"), style="xml", shots=1)
    task = load("gsm8k", path=str(folder), style="xml", shots=1)
    assert task.heldout == trained.heldout
    assert task.heldout == load("gsm8k", path=str(DATA / "gsm8k"), style="xml", shots=1).heldout


def test_shots_of_gsm8k_never_come_from_what_is_evaluated(folder, tmp_path):
    with pytest.raises(ValueError, match="head of its train file"):
        load("gsm8k", path=str(folder / "gsm8k" / "test.jsonl"), style="xml", shots=1)
    alone = tmp_path / "alone"
    alone.mkdir()
    shutil.copy(folder / "gsm8k" / "test.jsonl", alone / "gsm8k.jsonl")
    assert len(load("gsm8k", path=str(alone)).heldout) == 2
    with pytest.raises(FileNotFoundError, match="train"):
        load("gsm8k", path=str(alone), style="xml", shots=1)


def test_style_shots_and_limit(folder):
    task = load("svamp", path=str(folder), style="raw", shots=2, limit=3)
    assert len(task.heldout) == 3
    assert task.heldout[0].text.count("Question:") == 3
    assert task.stop_strings == ("\n\n", "Question:")


def test_the_hub(monkeypatch):
    asked = []

    def hub(name, configuration, *, split):
        asked.append((name, configuration, split))
        return [{"question": "q", "final_answer": ["$2$"]}]

    monkeypatch.setattr("datasets.load_dataset", hub)
    assert load("olympiad", validate=False).heldout[0].answer == "2"
    assert asked == [("Hothan/OlympiadBench", "OE_TO_maths_en_COMP", "train")]


def test_refusals(folder):
    with pytest.raises(ValueError, match="'aime'; there are aime24, aime25, amc"):
        load("aime")
    with pytest.raises(ValueError, match="unknown style"):
        load("aime24", path="nowhere", style="html")
    with pytest.raises(ValueError, match="no problems are left of 'amc'"):
        load("amc", path=str(folder), limit=0)
