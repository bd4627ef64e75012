"""logging.py: rows are valid, single and durable; W&B gets the same; no secret is written."""

import json
import math
import subprocess
import sys
import sysconfig
from pathlib import Path
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.logging import RunLogger, read_rows, write_done, write_failed


def make(folder, mode="disabled", start_step=0, **changes):
    settings = dict(project="p", group="g", tags=["t"], config={"seed": 1}) | changes
    return RunLogger(folder, wandb_mode=mode, start_step=start_step, **settings)


def strict(text):
    """Parse as JSON proper: Python's parser also takes NaN and Infinity, others don't."""

    def refuse(word):
        raise AssertionError(f"{word} isn't JSON")

    return json.loads(text, parse_constant=refuse)


def test_rows_are_json_numbers_and_nan_is_null(tmp_path):
    log = make(tmp_path)
    log.log(
        np.int64(3),
        {
            "python": 2,
            "numpy": np.float32(0.5),
            "jax": jnp.float32(0.25),
            "bfloat16": jnp.bfloat16(1.5),
            "flag": np.bool_(True),
            "none": None,
            "nan": math.nan,
            "inf": jnp.float32(jnp.inf),
        },
    )
    text = (tmp_path / "metrics.jsonl").read_text()  # before close: a kill loses nothing
    log.close()
    assert text.endswith("\n")
    assert strict(text) == {
        "step": 3,
        "python": 2.0,
        "numpy": 0.5,
        "jax": 0.25,
        "bfloat16": 1.5,
        "flag": 1.0,
        "none": None,
        "nan": None,
        "inf": None,
    }


@pytest.mark.parametrize("value", ["0.5", np.ones(3), jnp.ones(1), {"a": 1}])
def test_a_metric_must_be_a_scalar(tmp_path, value):
    log = make(tmp_path)
    with pytest.raises(TypeError, match="reward"):
        log.log(0, {"reward": value})
    log.close()
    assert (tmp_path / "metrics.jsonl").read_text() == ""


def test_one_row_a_step(tmp_path):
    """Case C5: wandb/wandb#5632, #4482, #5913 (a lower step is dropped without a word)."""
    log = make(tmp_path)
    log.log(1, {"reward": 0.0})
    for step in (1, 0):
        with pytest.raises(ValueError, match="one row a step"):
            log.log(step, {"reward": 1.0})
    with pytest.raises(ValueError, match="'step'"):
        log.log(2, {"step": 7})
    log.close()
    assert read_rows(tmp_path / "metrics.jsonl") == [{"step": 1, "reward": 0.0}]


def test_resume_drops_what_came_after_the_checkpoint(tmp_path):
    log = make(tmp_path)
    for step in range(5):
        log.log(step, {"reward": step / 10})
        log.completions(step, [{"text": f"a{step}"}, {"text": f"b{step}"}])
    log.close()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "rew')  # killed in the middle of a line

    log = make(tmp_path, start_step=3)
    log.log(3, {"reward": 0.9})
    log.close()
    rows = read_rows(tmp_path / "metrics.jsonl")
    assert [(row["step"], row["reward"]) for row in rows] == [
        (0, 0.0),
        (1, 0.1),
        (2, 0.2),
        (3, 0.9),
    ]
    assert [row["step"] for row in read_rows(tmp_path / "completions.jsonl")] == [0, 0, 1, 1, 2, 2]
    assert not list(tmp_path.glob("*.tmp"))

    make(tmp_path).close()  # from scratch: nothing of the earlier run is left
    assert read_rows(tmp_path / "metrics.jsonl") == []


def test_a_damaged_file_is_an_error_and_stays_as_it_is(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\ngarbage\n{"step": 1}\n')
    with pytest.raises(ValueError, match="line 2"):
        make(tmp_path, start_step=1)
    assert path.read_text().count("\n") == 3


def test_completions_keep_any_text(tmp_path):
    log = make(tmp_path)
    odd = 'line\nbreak "quote" \u2028 \ud800 ÷'
    log.completions(0, [{"text": odd, "reward": math.nan, "parts": {"a": np.float32(1)}, "n": [1]}])
    log.completions(0, [{"tokens": jnp.arange(2), "path": Path("x")}])
    log.close()
    lines = (tmp_path / "completions.jsonl").read_text().splitlines()
    assert [strict(line) for line in lines] == [
        {
            "step": 0,
            "text": odd.replace("\ud800", "\ufffd"),
            "reward": None,
            "parts": {"a": 1.0},
            "n": [1],
        },
        {"step": 0, "tokens": [0, 1], "path": "x"},
    ]


def test_a_folder_shows_one_verdict(tmp_path):
    def verdicts():
        return sorted(path.name for path in tmp_path.glob("*.json*"))

    write_failed(tmp_path, RuntimeError("boom"))
    failed = strict((tmp_path / "FAILED.json").read_text())
    assert failed["error"] == "RuntimeError: boom" and "boom" in failed["traceback"]
    write_done(tmp_path, np.int32(7), {"eval/accuracy": jnp.float32(0.5), "kl": math.nan})
    done = strict((tmp_path / "DONE.json").read_text())
    assert done == {"step": 7, "final": {"eval/accuracy": 0.5, "kl": None}}
    assert verdicts() == ["DONE.json"]
    write_failed(tmp_path, RuntimeError("refused before it began"))
    assert verdicts() == ["DONE.json", "REFUSED.json"]
    assert strict((tmp_path / "REFUSED.json").read_text())["error"].endswith("before it began")
    make(tmp_path).close()  # a new attempt that did begin has no verdict yet
    assert verdicts() == ["completions.jsonl", "metrics.jsonl"]
    write_failed(tmp_path, RuntimeError("boom"))
    make(tmp_path).close()
    assert verdicts() == ["completions.jsonl", "metrics.jsonl"]


def test_no_secret_is_written(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("SHORT_TOKEN", "the")
    try:
        raise OSError("GET https://me:hunter2@host/x with 0123456789abcdef, the end")
    except OSError as error:
        write_failed(tmp_path, error)
    text = (tmp_path / "FAILED.json").read_text()
    assert "0123456789abcdef" not in text and "hunter2" not in text
    assert strict(text)["error"] == "OSError: GET https://[hidden]@host/x with [hidden], the end"


def test_disabled_does_not_import_wandb(tmp_path):
    code = (
        "import sys; from grpo_jax.logging import RunLogger;"
        f"RunLogger({str(tmp_path)!r}, wandb_mode='disabled', project='p', group=None, tags=[],"
        "config={}).close(); assert 'wandb' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    with pytest.raises(ValueError, match="'on'"):
        make(tmp_path, mode="on")


def records(run_folder):
    """What `wandb` itself reads from an offline run, one dict a record."""
    wandb = Path(sysconfig.get_path("scripts")) / "wandb"
    command = [str(wandb), "leet", "inspect", "--json", str(run_folder)]
    output = subprocess.run(command, check=True, capture_output=True, timeout=60, text=True).stdout
    return [json.loads(line) for line in output.splitlines()]


def test_wandb_offline_run_is_complete_and_resumes_under_its_id(tmp_path, monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "0123456789abcdef")
    config = {"algorithm": {"clip": 0.2}, "note": "0123456789abcdef", "path": Path("x")}
    log = make(tmp_path, mode="offline", config=config, tags=["t" * 80])
    log.log(10, {"reward": 0.5, "kl": math.nan})
    log.completions(10, [{"text": "4 \ud800", "reward": 1.0}, {"text": "5", "extra": "x"}])
    log.close(exit_code=3)
    log.close()
    resumed = make(tmp_path, mode="offline", start_step=11)
    resumed.log(11, {"reward": 0.75})
    resumed.close()

    # the second one has all rows, whatever a kill has kept from the first
    (second,) = (tmp_path / "wandb").glob("offline-run-*")
    (first,) = (tmp_path / "wandb" / "superseded").iterdir()
    sent = [r["history"]["item"] for r in records(second) if r["type"] == "history"]
    assert [item["train/step"] for item in sent if "reward" in item] == [10, 11]
    found = records(first)
    text = json.dumps(found)
    assert "0123456789abcdef" not in text and "[hidden]" in text
    run = next(record["run"] for record in found if record["type"] == "run")
    assert (run["project"], run["run_group"], run["tags"]) == ("p", "g", ["t" * 64])
    assert run["config"]["update"]["algorithm"] == {"clip": 0.2}
    history = [record["history"]["item"] for record in found if record["type"] == "history"]
    assert history[0]["train/step"] == 10 and history[0]["reward"] == 0.5
    assert "kl" not in history[0]
    assert found[-1]["exit"]["exit_code"] == 3
    (table,) = (first / "files" / "media" / "table").glob("completions*.json")
    content = json.loads(table.read_text())
    assert content["columns"] == ["step", "text", "reward", "extra"]
    assert content["data"][1] == [10, "5", None, "x"]
    again = next(record["run"] for record in records(second) if record["type"] == "run")
    assert again["run_id"] == run["run_id"]
    (second / "run-x.wandb.synced").write_text("")  # its rows are known to the server
    make(tmp_path, mode="offline", start_step=12).close()
    (third,) = set((tmp_path / "wandb").glob("offline-run-*")) - {second}
    assert [r for r in records(third) if r["type"] == "history" and "reward" in str(r)] == []


def test_online_a_row_that_the_server_has_is_not_sent_again(tmp_path, monkeypatch):
    """W&B hands a resumed run what it knows of it; no server here, so a stand-in does."""
    sent = []
    server = SimpleNamespace(
        id="a",
        summary={"train/step": 4},
        define_metric=lambda *_, **__: None,
        log=sent.append,
        finish=lambda exit_code: None,
    )
    monkeypatch.setattr("wandb.init", lambda **_: server)
    log = make(tmp_path, mode="online", start_step=3)
    for step in (3, 4, 5):
        log.log(step, {"reward": 0.5})
    log.close()
    assert [item["train/step"] for item in sent] == [5]
    assert [row["step"] for row in read_rows(tmp_path / "metrics.jsonl")] == [3, 4, 5]


def test_two_jobs_in_one_process_are_two_wandb_runs(tmp_path):
    for name in ("a", "b"):
        make(tmp_path / name, mode="offline").close()
    ids = [(tmp_path / name / "wandb" / "run_id").read_text() for name in ("a", "b")]
    assert ids[0] != ids[1]
