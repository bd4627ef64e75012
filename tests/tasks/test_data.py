import json
import socket

import pyarrow
import pyarrow.parquet
import pytest

from grpo_jax.tasks import data

ROWS = [{"question": f"q{i}", "answer": i} for i in range(5)]


def write_lines(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_list(path, rows):
    path.write_text("\n " + json.dumps(rows, indent=1))


def write_parquet(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)


def write_arrow(path, rows):
    """The stream format, as `Dataset.save_to_disk` writes it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table)


WRITERS = {
    "train.jsonl": write_lines,
    "train.json": write_list,
    "train.parquet": write_parquet,
    "train.arrow": write_arrow,
}


@pytest.mark.parametrize(("name", "write"), WRITERS.items())
def test_every_format_gives_the_same_rows_in_order(tmp_path, name, write):
    write(tmp_path / name, ROWS)
    assert data.read(str(tmp_path), "train", "") == ROWS
    assert data.read(str(tmp_path / name), "whatever", "") == ROWS  # a file is read whole


def test_a_file_called_json_may_hold_lines(tmp_path):
    write_lines(tmp_path / "train.json", ROWS)
    assert data.read(str(tmp_path), "train", "") == ROWS


@pytest.mark.parametrize(
    "names",
    [
        ("train-00000-of-00002.parquet", "train-00001-of-00002.parquet"),
        ("data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"),
        ("train/data-00000-of-00002.arrow", "train/data-00001-of-00002.arrow"),
    ],
)
def test_shards_are_read_in_order(tmp_path, names):
    write = write_arrow if names[0].endswith("arrow") else write_parquet
    write(tmp_path / names[1], ROWS[3:])
    write(tmp_path / names[0], ROWS[:3])
    assert data.read(str(tmp_path), "train", "") == ROWS


def test_other_names_come_first_and_none_is_taken_for_another(tmp_path):
    write_lines(tmp_path / "test.jsonl", ROWS[:1])
    write_lines(tmp_path / "aime-2025.jsonl", ROWS[:2])
    assert data.read(str(tmp_path), "test", "", stems=("aime",)) == ROWS[:1]
    write_lines(tmp_path / "aime.jsonl", ROWS[:3])
    assert data.read(str(tmp_path), "test", "", stems=("aime",)) == ROWS[:3]


def test_lines_end_at_newlines_only(tmp_path):
    # U+2028 and form feed are line ends to str.splitlines, and may stand inside a JSON string
    (tmp_path / "train.jsonl").write_text('{"a": "x\u2028y\x85z"}\n\n{"a": "b"}', encoding="utf-8")
    assert data.read(str(tmp_path), "train", "") == [{"a": "x\u2028y\x85z"}, {"a": "b"}]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1}\n{"a": \n', r"line 2 of .*train\.jsonl is no JSON"),
        ("[1, 2]", "one object a line"),
        ("3\n", "one object a line"),
    ],
)
def test_what_are_no_rows(tmp_path, text, message):
    (tmp_path / "train.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        data.read(str(tmp_path), "train", "")


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no aime\.jsonl or test\.jsonl, .* in "):
        data.read(str(tmp_path), "test", "", stems=("aime",))
    with pytest.raises(FileNotFoundError, match="no such file or folder"):
        data.read(str(tmp_path / "nowhere"), "test", "")


def test_local_files_need_no_network(tmp_path, monkeypatch):
    def resolve(host, *rest, **more):
        raise AssertionError(f"asked for {host}")

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr("datasets.load_dataset", resolve)
    for name, write in WRITERS.items():
        write(tmp_path / name, ROWS)
        data.read(str(tmp_path / name), "train", "owner/name")
        with pytest.raises(FileNotFoundError):  # nor is the Hub asked for what is not there
            data.read(str(tmp_path), "test", "owner/name")


def test_the_hub(monkeypatch):
    asked = []

    def hub(name, configuration, *, split):
        asked.append((name, configuration, split))
        return iter(ROWS)

    monkeypatch.setattr("datasets.load_dataset", hub)
    assert data.read(None, "test", "owner/name", configuration="main") == ROWS
    assert asked == [("owner/name", "main", "test")]


def test_an_unreachable_hub_names_the_local_path(monkeypatch):
    def offline(*args, **options):
        raise OSError("no route")

    monkeypatch.setattr("datasets.load_dataset", offline)
    with pytest.raises(ConnectionError, match=r"'test' of 'a/b'.*no route.*task\.path=FOLDER"):
        data.read(None, "test", "a/b")


def test_field_names_what_is_missing():
    assert data.field({"b": None, "c": 2}, "a", "b") is None
    with pytest.raises(ValueError, match="no field a or b; it has c, d"):
        data.field({"c": 1, "d": 2}, "a", "b")
