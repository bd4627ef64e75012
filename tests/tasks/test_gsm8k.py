import json
import socket
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from grpo_jax.tasks.base import prompt_ids, within_limit
from grpo_jax.tasks.gsm8k import gold, gsm8k, solution
from grpo_jax.tokenizer import char_tokenizer

FOLDER = Path(__file__).parents[1] / "data" / "gsm8k"  # 4 training rows, 2 test rows


def rows(split):
    return [json.loads(line) for line in (FOLDER / f"{split}.jsonl").read_text().splitlines()]


def write(folder, **splits):
    for split, content in splits.items():
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in content))
    return str(folder)


def row(question, answer="So 1+1 = <<1+1=2>>2.\n#### 2"):
    return {"question": question, "answer": answer}


def train_prompts(task):
    return [task.train(i, 0) for i in range(task.train_size)]


def test_gold():
    assert gold("He has 2.\n#### 2") == "2"
    assert gold("x\n####  109,200,000 ") == "109200000"
    assert gold("#### 1\n#### -2") == "-2"
    assert gold("He has 2.") == ""


def test_solution_is_prose():
    assert solution("She has $<<3*4=12>>12 now.\nDone.\n#### 12") == "She has $12 now.\nDone."


def test_xml_prompt_with_a_demonstration():
    task = gsm8k(str(FOLDER))
    prompt = task.heldout[0]
    assert [m["role"] for m in prompt.messages] == ["system", "user", "assistant", "user"]
    system, question, shown, last = (m["content"] for m in prompt.messages)
    expected = "Respond in the following format:\n<reasoning>\n...\n</reasoning>\n<answer>\n...\n"
    assert system == expected + "</answer>\n"
    assert question == rows("train")[0]["question"]
    assert shown == (
        "<reasoning>\nNatalia sold 48/2 = 24 clips in May.\n"
        "Natalia sold 48+24 = 72 clips altogether in April and May.\n</reasoning>\n"
        "<answer>\n72\n</answer>\n"
    )
    assert last == prompt.text == rows("test")[0]["question"]
    assert (prompt.answer, prompt.level, task.stop_strings) == ("18", 2, ())


def test_raw_prompt():
    task = gsm8k(str(FOLDER), style="raw")
    prompt = task.heldout[1]
    assert prompt.messages is None
    assert prompt.text == (
        f"Question: {rows('train')[0]['question']}\n"
        "Answer: Natalia sold 48/2 = 24 clips in May.\n"
        "Natalia sold 48+24 = 72 clips altogether in April and May.\n#### 72\n\n"
        f"Question: {rows('test')[1]['question']}\nAnswer:"
    )
    assert task.stop_strings == ("\n\n", "Question:")


@pytest.mark.parametrize("shots", [0, 1, 2])
def test_shots_are_not_trained_on(shots):
    task = gsm8k(str(FOLDER), shots=shots)
    assert task.train_size == 4 - shots
    questions = {p.text for p in train_prompts(task)}
    assert questions == {r["question"] for r in rows("train")[shots:]}
    assert len(task.heldout[0].messages) == 2 + 2 * shots


def test_limit_and_heldout_take_the_head():
    task = gsm8k(str(FOLDER), shots=0, limit=2, heldout=1)
    assert {p.text for p in train_prompts(task)} == {r["question"] for r in rows("train")[:2]}
    assert [p.text for p in task.heldout] == [rows("test")[0]["question"]]


def test_golds_are_clean():
    task = gsm8k(str(FOLDER), shots=0)
    assert {p.answer for p in train_prompts(task)} == {"72", "10", "5", "109200000"}


def test_the_order_is_deterministic():
    first, second = (gsm8k(str(FOLDER), shots=0) for _ in range(2))
    assert [first.train(i, 1) for i in range(9)] == [second.train(i, 1) for i in range(9)]
    assert first.heldout == second.heldout


def test_rows_without_a_readable_gold_are_dropped_and_counted(tmp_path):
    bad = [row("no mark", "It is 2."), row("no number", "It is.\n#### many"), row("c", "x\n#### ")]
    path = write(tmp_path, train=[row("a"), *bad], test=[bad[0], row("b")])
    task = gsm8k(path, shots=0)
    assert [p.text for p in train_prompts(task)] == ["a"]
    assert [p.text for p in task.heldout] == ["b"]
    assert task.dropped == {
        "train_gold_unparsable": 3,
        "test_gold_unparsable": 1,
        "train_also_heldout": 0,
        "train_duplicate": 0,
    }


def test_heldout_never_in_train(tmp_path):
    path = write(tmp_path, train=[row("a"), row("b"), row("c"), row("b")], test=[row("b")])
    task = gsm8k(path, shots=1)
    assert [p.text for p in train_prompts(task)] == ["c"]
    assert task.heldout[0].messages[1]["content"] == "a"
    assert task.dropped["train_also_heldout"] == 2


def test_duplicates_in_train_are_dropped_and_the_first_stays(tmp_path):
    again = row("  What  is A?\n", "So 3.\n#### 3")  # differs in case and white space only
    path = write(tmp_path, train=[row("What is a?"), row("c"), again], test=[row("b")])
    task = gsm8k(path, shots=0)
    assert sorted((p.text, p.answer) for p in train_prompts(task)) == [
        ("What is a?", "2"),
        ("c", "2"),
    ]
    assert task.dropped["train_duplicate"] == 1


def test_parquet(tmp_path):
    for split in ("train", "test"):
        table = pyarrow.Table.from_pylist(rows(split))
        pyarrow.parquet.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    assert gsm8k(str(tmp_path)).heldout == gsm8k(str(FOLDER)).heldout


def test_other_files_in_the_folder_are_left_alone(tmp_path):
    path = write(tmp_path, train=[row("a")], test=[row("b")], train_socratic=[row("other")])
    assert gsm8k(path, shots=0).train_size == 1


def test_a_local_folder_needs_no_network(monkeypatch):
    asked = []

    def resolve(host, *rest, **more):
        asked.append(host)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    gsm8k(str(FOLDER))
    assert asked == []


def test_a_missing_split_is_named(tmp_path):
    path = write(tmp_path, train=[row("a")])
    with pytest.raises(FileNotFoundError, match=r"no test\.jsonl"):
        gsm8k(path)


def test_nothing_left_to_train_on(tmp_path):
    path = write(tmp_path, train=[row("a")], test=[row("b")])
    with pytest.raises(ValueError, match="no problems are left"):
        gsm8k(path, shots=1)


def test_unknown_style_and_raw_without_shots():
    with pytest.raises(ValueError, match="'html'; there are xml, raw"):
        gsm8k(str(FOLDER), style="html")
    with pytest.raises(ValueError, match="shots >= 1"):
        gsm8k(str(FOLDER), style="raw", shots=0)


def test_an_unreachable_hub_names_the_local_path(monkeypatch):
    def offline(*args, **options):
        raise OSError("no route")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(ConnectionError, match=r"openai/gsm8k.*no route.*task\.path=FOLDER"):
        gsm8k()


def test_the_hubs_rows_are_read_like_local_ones(monkeypatch):
    local = gsm8k(str(FOLDER)).heldout

    def hub(name, configuration, *, split):
        assert (name, configuration) == ("some/mirror", "main")
        return rows(split)

    monkeypatch.setattr("datasets.load_dataset", hub)
    assert gsm8k(name="some/mirror").heldout == local


def test_long_prompts_are_dropped_not_cut():
    tokenizer = char_tokenizer()
    task = gsm8k(str(FOLDER), shots=0)
    lengths = [len(prompt_ids(p, tokenizer)) for p in train_prompts(task)]
    short = within_limit(task, tokenizer, sorted(lengths)[-2])
    assert short.train_size == 3
    assert short.dropped["train_too_long"] == 1
    questions = {r["question"] for r in rows("train")}
    assert all(p.text in questions for p in train_prompts(short))
