"""SIGTERM: the step at hand is finished and saved, and the same command goes on. (One run alone is
in test_trainer.py.)"""

import subprocess
import sys
import time

import pytest

from grpo_jax import checkpoint
from grpo_jax.logging import read_rows
from grpo_jax.preemption import Preempted
from grpo_jax.together import Layout, train_together
from tests.killed import LIMIT, ROOT
from tests.test_faults import RUN
from tests.test_trainer import SMALL, launch, make, programs, rows, told  # noqa: F401

SLOW = pytest.mark.slow  # pytest -m slow -n 0 tests/test_preemption.py


@SLOW
def test_a_run_without_checkpoints_says_that_nothing_is_saved(tmp_path, monkeypatch):
    told(monkeypatch, 1)
    with pytest.raises(Preempted, match=r"nothing is saved \(checkpoint.every=0\)"):
        launch(tmp_path / "run", *RUN, "checkpoint.every=0")


@SLOW
def test_seeds_side_by_side_are_preempted_together(tmp_path, monkeypatch):
    runs = [make(tmp_path / f"seed={n}", *RUN, f"seed={n}", "checkpoint.every=4") for n in (0, 1)]
    told(monkeypatch, 2)
    with pytest.raises(Preempted) as stopped:
        train_together(runs, Layout(1, False))
    assert len(str(stopped.value).splitlines()) == 2
    for run in runs:
        assert not list(run.folder.glob("*E*.json"))
        assert checkpoint.load_params(run.folder / "checkpoints")[0] in (1, 2, 3)
    train_together(runs, Layout(1, False))
    assert all((run.folder / "DONE.json").exists() for run in runs)


@SLOW
def test_the_command_ends_with_143_and_a_sweep_begins_no_other_job(tmp_path):
    small = [word for word in SMALL if not word.startswith(("train.steps", "checkpoint"))]
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), "-m", *small, "train.steps=60"]
    command += ["checkpoint.every=50", f"cache={tmp_path}/cache"]
    sweep = [*command, "seed=0,1", f"hydra.sweep.dir={tmp_path}/sweep"]
    process = subprocess.Popen(sweep, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    since = time.monotonic()
    try:
        while process.poll() is None and not any(
            len(read_rows(path)) > 1 for path in tmp_path.glob("sweep/*/metrics.jsonl")
        ):
            assert time.monotonic() - since < LIMIT
            time.sleep(0.05)
        process.terminate()
        _, text = process.communicate(timeout=LIMIT)
    finally:
        process.kill()
    assert process.returncode == 143, text
    assert "SIGTERM: stopped after step" in text and "1 not finished, 1 not begun" in text
    (job,) = (path.parent for path in tmp_path.glob("sweep/*/.hydra"))
    assert not list(job.glob("*E*.json"))
    done = subprocess.run(sweep, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    assert "goes on after step" in done.stdout
    assert len(list(tmp_path.glob("sweep/*/DONE.json"))) == 2
    assert [row["step"] for row in rows(job)] == list(range(61))
