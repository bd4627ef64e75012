"""Names and texts that somebody chose lead out of no folder and steer no terminal, no page and no
reader of JSON (docs/safety.md)."""

import json
import os
import re
from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
from omegaconf import OmegaConf, open_dict

from grpo_jax.benchmark_config import make_benchmark
from grpo_jax.check import ConfigError
from grpo_jax.config import check_choices, compose, make_run, make_runs
from grpo_jax.logging import RunLogger, read_rows
from grpo_jax.markdown import code, literal
from grpo_jax.names import LONGEST_FOLDER, folder_name
from grpo_jax.recording import step_folder
from grpo_jax.report import markdown
from grpo_jax.screen import named, say, visible
from scripts.compare import main as compare
from tests.composed import composed
from tests.fixtures import characters

RED, BACK, HALF, TITLE = "\x1b[31m", "\u202e", "\ud800", "\x1b]0;owned\x07"
HOSTILE = (
    "../../x",
    "/etc/x",
    "..",
    ".",
    "a/../../b",
    "a\0b",
    f"a{RED}b",
    "a\nb",
    "a\tb",
    BACK,
    HALF,
    "é" * 400,
    "x" * 5000,
    "~",
)


def configured(**changes):
    """The default configuration with some values, which no word of a command line has to spell."""
    config = deepcopy(composed())
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return config


@cache
def composed_evaluation():
    return compose("run=x", name="eval")


# ------------------------------------------------------------------------------------- folders


@pytest.mark.parametrize("name", HOSTILE, ids=ascii)
def test_a_jobs_folder_is_one_short_level_below_its_sweep(tmp_path, name):
    for overrides in (name, f"name={name}", f"seed=0,name={name},task.path={name}"):
        folder = folder_name(overrides)
        path = tmp_path / folder
        assert path.parent == tmp_path and os.path.normpath(path) == str(path)
        assert len(folder.encode()) <= LONGEST_FOLDER
        assert not re.search(r"[\x00-\x1f\x7f]", folder) and folder.isprintable()
        path.mkdir()
        assert [p.name for p in tmp_path.iterdir()] == [folder]
        path.rmdir()


def test_two_hostile_names_are_two_folders():
    names = {folder_name(f"name={name}") for name in HOSTILE}
    assert len(names) == len(HOSTILE)


@pytest.mark.parametrize("name", HOSTILE[:10], ids=ascii)
def test_a_name_of_the_run_is_no_path_and_no_control_character(tmp_path, name):
    folder = tmp_path / "runs" / "one"
    bad = visible(name) != name or "\n" in name or "\t" in name
    for where in ("name", "logger.group", "logger.tags"):
        value = [name] if where == "logger.tags" else name
        config = configured(**{where.replace(".", "__"): value})
        if bad:
            with pytest.raises(ConfigError, match=rf"{where}=.*no control characters"):
                make_run(config, folder)
        else:
            assert make_run(config, folder).folder == folder
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["../../x", "/etc", "a\\b", "a#b", "x" * 129, f"a{RED}"])
def test_a_project_is_one_that_wandb_takes(tmp_path, name):
    with pytest.raises(ConfigError, match=r"logger\.project="):
        make_run(configured(logger__project=name), tmp_path)


@pytest.mark.parametrize("name", ["../../x", "a/b", "a b", "", RED, "..", "a\nb", "x" * 200])
def test_a_part_of_the_reward_has_a_plain_name(tmp_path, name):
    config = configured()
    with open_dict(config.reward):
        config.reward[name] = config.reward.correct
    with pytest.raises(ConfigError, match="a part's name is made of letters") as told:
        make_run(config, tmp_path)
    assert RED not in str(told.value)


def test_a_log_file_is_in_the_run_folder():
    for name in ("../../x", "/etc/x", "..", "a\0", "'../x'"):
        with pytest.raises(ConfigError, match=r"hydra\.job\.name=.* a log file's name"):
            check_choices([f"hydra.job.name={name}"])
    check_choices(["hydra.job.name=a-b.c", "hydra.run.dir=../where/the/user/says"])


def test_seeds_of_a_job_and_steps_of_a_recording_are_numbers(tmp_path):
    runs = make_runs(configured(seed=3, seeds_per_job=2), tmp_path)
    assert [run.folder for run in runs] == [tmp_path / "seed=3", tmp_path / "seed=4"]
    with pytest.raises(ConfigError, match=r"seed='\.\./x' should be"):
        make_runs(configured(seed="../x", seeds_per_job=2), tmp_path)
    assert step_folder(tmp_path, 10) == tmp_path / "rollouts" / "step_000010"


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "gsm8k/../x", RED])
def test_a_set_of_an_evaluation_is_one_of_those_there_are(tmp_path, name):
    config = deepcopy(composed_evaluation())
    OmegaConf.update(config, "sets", [name])
    with pytest.raises(ConfigError, match="unknown set") as told:
        make_benchmark(config, tmp_path, [])
    assert RED not in str(told.value)


def test_wandb_writes_below_the_run_folder_only(tmp_path):
    folder = tmp_path / "runs" / "one"
    place = {"project": "p", "group": "../../g", "tags": ["../../t", "/x"]}
    log = RunLogger(folder, wandb_mode="offline", config={"../../c": "../../d"}, **place)
    log.log(0, {"../../metric": 1.0})
    log.completions(0, [{"text": "../../x", "../../column": "/x"}])
    log.close()
    assert [p.name for p in tmp_path.iterdir()] == ["runs"]
    assert [p.name for p in (tmp_path / "runs").iterdir()] == ["one"]
    assert {p.name for p in folder.iterdir()} == {"wandb", "metrics.jsonl", "completions.jsonl"}


# ------------------------------------------------------------------------------------ terminals


def test_what_is_said_steers_no_terminal(capsys):
    say(f"a{RED}b{TITLE}c{BACK}d{HALF}e\rf\x9bg\u2028h\ti\njé→")
    with named("seed=1"):
        say("x\ny\x07")
    assert capsys.readouterr().out == (
        "a\\x1b[31mb\\x1b]0;owned\\x07c\\u202ed\\ud800e\\rf\\x9bg\\u2028h\ti\njé→\n"
        "seed=1: x\nseed=1: y\\x07\n"
    )
    say(f"error: {RED}", error=True)
    assert capsys.readouterr().err == "error: \\x1b[31m\n"


def test_what_the_terminal_cannot_encode_breaks_nothing(monkeypatch, tmp_path):
    with (tmp_path / "out").open("w", encoding="ascii") as out:
        monkeypatch.setattr("sys.stdout", out)
        say("2 → é")
    assert (tmp_path / "out").read_bytes() == b"2 \\u2192 \\xe9\n"


HOSTILE_MODEL = (
    f"<script>alert(1)</script> | {RED}[x](javascript:alert(1)) `code` \\<b> ![i](u)\nnext"
)


def test_a_comparison_of_a_hostile_folder(tmp_path, capsys):
    for seed in (0, 1):
        for status, label in (("DONE", "plain"), ("FAILED", HOSTILE_MODEL)):
            folder = tmp_path / f"{status}{seed}{RED}<b>"
            (folder / ".hydra").mkdir(parents=True)
            overrides = [f"seed={seed}", f"name={label}", "clip=`<i>`"]
            (folder / ".hydra" / "overrides.yaml").write_text(json.dumps(overrides))
            verdict = {"error": HOSTILE_MODEL, "step": 1, "final": {}}
            (folder / f"{status}.json").write_text(json.dumps(verdict))
            (folder / "metrics.jsonl").write_text('{"step": 1, "eval/accuracy": 0.5}\n')
    assert compare([str(tmp_path), "--partial"]) == 0
    shown, text = capsys.readouterr().out, (tmp_path / "report.md").read_text()
    for written in (shown, text):
        assert visible(written) == written
        outside = re.sub(r"`[^`\n]*`", "", re.sub(r"\\.", "", written))  # of code, and of escapes
        assert "<" not in outside and "](javascript" not in outside and "`" not in outside
        assert all(line.count(" | ") <= 20 for line in written.split("\n"))
        tables = re.findall(r"(?m)^\|.*$", written)
        assert tables and all(line.endswith("|") for line in tables)
    assert {p.name for p in tmp_path.iterdir() if p.is_file()} >= {"report.md", "summary.csv"}


def test_a_cell_of_a_table_is_text():
    table = markdown([["a", "b"], [HOSTILE_MODEL, "x\ny | z"]])
    head, line, row = table.split("\n")
    assert len(head) == len(line) == len(row)
    assert re.sub(r"\\.", "", row).count("|") == 3 and "\\<script>" in row
    assert "\\\\\\<b>" in row and "]\\(javascript" in row and "\\`code\\`" in row
    assert code("a`b\nc") == "`a'b c`"
    assert literal("0.5 [0.4, 0.6]") == "0.5 [0.4, 0.6]"


# -------------------------------------------------------------------------------- rows and tables

ANSWER = f"{HALF}\0{RED}{TITLE}{BACK}\u2028\ufeff\x85\r\n<script>alert(1)</script>\udfff\U0001f600"


def test_completions_are_json_and_utf8_whatever_a_model_writes(tmp_path):
    log = RunLogger(
        tmp_path, wandb_mode="offline", project="p", group=None, tags=[], config={"note": ANSWER}
    )
    log.completions(0, [{"completion": ANSWER, "reward": 1.0}])
    log.log(0, {"reward": 1.0})
    log.close()
    clean = ANSWER.replace(HALF, "\ufffd").replace("\udfff", "\ufffd")
    raw = (tmp_path / "completions.jsonl").read_bytes()
    assert raw.count(b"\n") == 1 and raw.isascii()
    assert json.loads(raw.decode("utf-8", "strict"))["completion"] == clean
    assert not re.search(rb"\\ud[89ab]..(?!\\ud[c-f])", raw)  # no half a pair, which readers refuse
    assert read_rows(tmp_path / "completions.jsonl")[0]["completion"] == clean
    (path,) = Path(tmp_path).glob("wandb/offline-run-*/files/media/table/*.json")
    table = json.loads(path.read_bytes().decode("utf-8", "strict"))
    assert table["data"][0][1] == clean  # text, in a column of no type that a page would render
    assert not {p.suffix for p in path.parent.parent.rglob("*") if p.is_file()} - {".json"}


def test_a_prompt_with_half_a_code_point_is_a_prompt():
    words = characters()
    assert words.decode(words.encode(f"1{HALF}2"), skip_special=False) == "1<unk>2"
    ids = words.chat([{"role": "user", "content": f"1{HALF}2"}])
    assert words.decode(ids, skip_special=False).endswith("1<unk>2<|assistant|>")
