"""What goes wrong on shared machines: nothing is lost, and what happened is said."""

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
from omegaconf import OmegaConf

from grpo_jax import checkpoint, trainer
from grpo_jax.assemble import assemble, restore_policy
from grpo_jax.folder import hold
from grpo_jax.logging import RunLogger, read_rows, write_failed
from grpo_jax.rewards.workers import Limits, Workers
from grpo_jax.rollout import Collector
from grpo_jax.sweep import Begun
from grpo_jax.types import RefusedError, TrainingError
from tests.fixtures import assert_trees_equal
from tests.killed import LIMIT, ROOT, end, start
from tests.rewards.in_workers import do
from tests.test_trainer import SMALL, contents, launch, make, programs, rows  # noqa: F401

RUN = ("train.steps=4", "checkpoint.every=1", "checkpoint.keep=9", "eval.every=2")
SCRIPT = ROOT / "scripts" / "train.py"


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder, saved states) of an undisturbed run; don't write there."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, launch(folder, *RUN)


@pytest.fixture
def half(whole, tmp_path):
    """The run, killed after the checkpoint of step 3."""
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    shutil.rmtree(folder / "checkpoints" / "4")
    (folder / "DONE.json").unlink()
    return folder


def assert_whole(folder, saved, whole):
    assert_trees_equal(saved[4], whole[1][4])
    assert rows(folder) == rows(whole[0])
    assert (folder / "DONE.json").exists() and not (folder / "FAILED.json").exists()


# -------------------------------------------------------------------- checkpoints that are damaged


def empty(step):
    shutil.rmtree(step)
    step.mkdir()


def truncate(step):
    for path in (step / "params").rglob("*"):
        if path.is_file() and path.stat().st_size > 200:
            os.truncate(path, path.stat().st_size // 2)


def forget(step):
    shutil.rmtree(step / "meta")


def cut_text(step):
    for path in (step / "meta").rglob("*"):
        if path.is_file():
            os.truncate(path, 5)


pytestmark = pytest.mark.core
SLOW = pytest.mark.slow  # pytest -m slow -n 0 tests/test_faults.py


@pytest.mark.parametrize(
    "damage", [empty, truncate, *(pytest.param(f, marks=SLOW) for f in (forget, cut_text))]
)
def test_a_damaged_checkpoint_is_stepped_over_with_a_warning(half, whole, capsys, damage):
    damage(half / "checkpoints" / "3")
    (half / "checkpoints" / "7.orbax-checkpoint-tmp").mkdir()
    saved = launch(half, *RUN)
    text = capsys.readouterr().out
    assert "WARNING: skipped checkpoint 3 in" in text and "can't be read" in text
    assert "7.orbax-checkpoint-tmp: a save that was cut short; skipped and removed" in text
    assert "goes on after step 2 of 4" in text
    assert_whole(half, saved, whole)
    names = sorted(path.name for path in (half / "checkpoints").iterdir())
    assert names == ["1", "2", "3", "4", "unreadable-3"]


def test_without_any_that_can_be_read_it_does_not_begin_anew(half):
    for step in (half / "checkpoints").iterdir():
        empty(step)
    (half / "config.json").unlink()  # says where the cache is
    before = contents(half)
    with pytest.raises(TrainingError, match=r"no checkpoint in .* can be read \(tried 3, 2, 1\)"):
        launch(half, *RUN)
    after = contents(half)
    assert {path for path in after if after[path] != before.get(path)} == {
        half / "config.json",
        half / "run.lock",
    }


def test_an_explicitly_asked_damaged_step_is_an_error_and_the_newest_falls_back(half, capsys):
    empty(half / "checkpoints" / "3")
    run = make(half, *RUN)
    with pytest.raises(TrainingError, match=r"checkpoint 3 in .* can't be read .*; there are 1, 2"):
        restore_policy(run, 3)
    with pytest.raises(TrainingError, match="no checkpoint of step 9; there are 1, 2, 3"):
        restore_policy(run, 9)
    step, _, _ = restore_policy(run)
    assert step == 2 and "WARNING: skipped checkpoint 3" in capsys.readouterr().out


# ------------------------------------------------------------------------------ a disk that is full


@SLOW
def test_a_full_disk_at_a_checkpoint_is_a_clear_error(half, whole):
    """As the system says it: no file of this process may grow beyond some bytes."""
    code = (
        "import resource, runpy, sys; from grpo_jax import checkpoint; save = checkpoint.save\n"
        "def full(manager, step, *rest):\n"
        "    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))\n"
        "    save(manager, step, *rest)\n"
        "checkpoint.save = full; sys.argv[0] = 'killed'\n"
        "runpy.run_module('tests.killed', run_name='__main__')"
    )
    command = [sys.executable, "-c", code, str(half), "never", *RUN]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("error: ")]
    assert "a checkpoint can't be written in" in line and "those before are whole" in line
    assert not (half / "DONE.json").exists()
    assert_whole(half, launch(half, *RUN), whole)


@SLOW
def test_a_full_disk_at_a_row_is_a_clear_error(half, whole, monkeypatch):
    full = OSError(28, "No space left on device")
    dump = RunLogger.log

    def failing(self, step, metrics):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self, "_metrics", Full(self._metrics, full))
            dump(self, step, metrics)

    monkeypatch.setattr(RunLogger, "log", failing)
    with pytest.raises(TrainingError, match=r"metrics\.jsonl can't be written \(No space left"):
        launch(half, *RUN)
    monkeypatch.undo()
    assert_whole(half, launch(half, *RUN), whole)


class Full:
    """A file on a full disk: half a line gets there."""

    def __init__(self, file, error):
        self.file, self.error, self.name = file, error, file.name

    def write(self, text):
        self.file.write(text[: len(text) // 2])
        self.file.flush()
        raise self.error


def test_an_error_that_can_not_be_written_down_hides_no_other(tmp_path):
    write_failed(tmp_path / "file" / "nowhere", RuntimeError("the real one"))  # and nothing raised


def test_a_folder_that_can_not_be_written_is_said_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(trainer, "assemble", None)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingError, match=r"can't write in .*file/run: Not a directory"):
        launch(tmp_path / "file" / "run")
    config = OmegaConf.create(f"hydra: {{run: {{dir: {tmp_path}/file/run}}}}")
    with pytest.raises(SystemExit, match=r"error: can't write in .*file/run: Not a directory"):
        Begun().on_run_start(config)  # of the command, before Hydra itself fails there


# ---------------------------------------------------------------------- numbers that are not finite


def test_a_state_that_is_not_finite_is_never_saved(half, whole, monkeypatch):
    update = trainer._update

    def broken(run, work, state, *rest):
        state, metrics = update(run, work, state, *rest)
        state.trainable["head" if "head" in state.trainable else "embed"]["embedding"] *= jnp.nan
        return state, metrics

    monkeypatch.setattr(trainer, "_update", broken)
    with pytest.raises(TrainingError, match=r"state after step 4: not finite: trainable/embed"):
        launch(half, *RUN)
    names = sorted(path.name for path in (half / "checkpoints").iterdir())
    assert names == ["1", "2", "3"] and not (half / "DONE.json").exists()
    monkeypatch.undo()
    assert_whole(half, launch(half, *RUN), whole)


@pytest.mark.parametrize("overrides", [(), ("lora=all_linear", "lora.rank=2")])
def test_parameters_that_are_not_finite_are_refused_before_the_first_step(
    tmp_path, monkeypatch, overrides
):
    def loading(run, jit):
        work = assemble(run, jit)
        params = work.state.trainable if work.base is None else work.base
        params["embed"]["embedding"] = params["embed"]["embedding"].at[3, 1].set(jnp.inf)
        return work

    monkeypatch.setattr(trainer, "assemble", loading)
    with pytest.raises(TrainingError, match=r"parameters \(model.path or warm start\): not finite"):
        launch(tmp_path / "run", *overrides)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


@SLOW
def test_updates_that_are_not_finite_leave_the_state_and_are_counted(tmp_path, monkeypatch):
    """An advantage of NaN in one rollout: its updates change nothing, and the run goes on."""
    collect = Collector.collect

    def collecting(self, params, reference, step, *rest):
        data = collect(self, params, reference, step, *rest)
        if step == 2:
            data.batch.__dict__["advantage"] = data.batch.advantage * jnp.nan
        return data

    monkeypatch.setattr(Collector, "collect", collecting)
    saved = launch(tmp_path / "run", *RUN, "train.steps=3")
    assert_trees_equal(saved[1].trainable, saved[2].trainable)
    assert_trees_equal(saved[1].opt_state, saved[2].opt_state)
    assert [row["updates/nonfinite"] for row in rows(tmp_path / "run")[1:]] == [0, 4, 0]
    with pytest.raises(TrainingError, match="3 updates in a row had a loss or gradient"):
        launch(tmp_path / "strict", *RUN, "train.max_nonfinite=3")
    assert checkpoint.load_params(tmp_path / "strict" / "checkpoints")[0] == 1


# ----------------------------------------------------------------------------------- reward workers


class Fragile:
    """A reward of digits from workers, of which some die and some hang."""

    def __init__(self):
        self.workers = Workers(Limits(workers=1, seconds=1.0))

    def batch(self, completions, answers):
        items = [f"echo {sum(c.isdigit() for c in text) / 8}" for text in completions]
        items[0], items[-1] = "kill", "loop"
        results = self.workers.map(do, items)
        return [float(r) if isinstance(r, str) else r for r in results]

    def __call__(self, completion, answer):
        raise NotImplementedError


@SLOW
def test_workers_that_die_and_hang_cost_their_rows_and_not_the_run(tmp_path, capsys):
    fragile = ("reward.correct.function._target_=tests.test_faults.Fragile",)
    fragile += ("reward.correct.function._partial_=false", "train.steps=1")
    launch(tmp_path / "run", *fragile, "eval.prompts=1", "eval.greedy=false")
    row = rows(tmp_path / "run")[1]
    assert row["rewards/correct/failed"] == 2 and 0 < row["reward"] < 1
    assert "the reward 'correct' failed on 2 of 8 answers of step 1" in capsys.readouterr().out


def test_a_worker_that_is_told_to_end_costs_nothing(tmp_path):
    """As when a cluster tells every process of a job, and the step at hand is finished."""
    workers = Workers(Limits(workers=1))
    try:
        items = ["echo a", f"term {tmp_path / 'told'}", "echo b"]
        assert workers.map(do, items) == ["a", "term", "b"]
    finally:
        workers.close()
    assert (tmp_path / "told").exists()


# --------------------------------------------------------------------- whose folder it is

HOLDER = """
import sys, time
from pathlib import Path
from grpo_jax.folder import hold
with hold(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


def test_a_second_process_is_refused_until_the_first_is_gone(half, whole):
    command = [sys.executable, "-c", HOLDER, str(half)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert first.stdout is not None and first.stdout.readline() == "held\n"
        before = contents(half)
        with pytest.raises(RefusedError, match=rf"in use: process {first.pid} on .*, since 20"):
            launch(half, *RUN)
        assert contents(half) == before
    finally:
        first.kill()
        first.communicate(timeout=60)
    assert_whole(half, launch(half, *RUN), whole)
    with hold(half), pytest.raises(RefusedError, match=f"process {os.getpid()} on"), hold(half):
        pass  # another thread of this process


def test_a_refused_command_leaves_the_other_runs_folder_as_it_was(half):
    (half / ".hydra").mkdir()
    (half / ".hydra" / "config.yaml").write_text("as: it was\n")
    (half / "train.log").write_text("as it was\n")
    before = contents(half)
    words = {
        "holds a run of another configuration": "train.epochs=3",
        "rollout.group_size=1": "rollout.group_size=1",
    }
    for text, word in words.items():
        small = [o for o in SMALL if o.split("=")[0] != word.split("=")[0]]
        command = [sys.executable, str(SCRIPT), *small, word, f"hydra.run.dir={half}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=ROOT)
        assert done.returncode == 2 and text in done.stderr, done.stderr
        assert contents(half) == before


@pytest.mark.parametrize(
    ("override", "named"),
    [
        ("model.shape.num_layers=2", "model.shape.num_layers: 1 there, 2 now"),
        ("lora=all_linear", r"lora.rank: 0 there, 32 now"),
        ("optim.b1=0.5", "optim.b1: 0.9 there, 0.5 now"),
        ("clip=none", "clip._target_: 'grpo_jax.kernels.clip.bounded' there, "),
    ],
)
def test_another_configuration_is_told_what_differs(half, override, named):
    with pytest.raises(RefusedError, match="another configuration") as refused:
        launch(half, *RUN, override)
    assert named in str(refused.value)


@SLOW
def test_a_checkpoint_that_was_put_there_by_hand_is_told_what_differs(half, tmp_path):
    """`config.json` says one thing, the checkpoint another."""
    folder = tmp_path / "other"
    shutil.copytree(half / "checkpoints", folder / "checkpoints")
    with pytest.raises(TrainingError, match=r"checkpoint 3 .* another configuration:\n  optim.b1"):
        launch(folder, *RUN, "optim.b1=0.5")
    shutil.rmtree(folder)
    shutil.copytree(half / "checkpoints", folder / "checkpoints")
    with pytest.raises(TrainingError, match=r"checkpoint 3, params: .*float32\[.*this run has"):
        launch(folder, *RUN, "model.shape.intermediate_size=32")


# ------------------------------------------------------------------------ twenty random moments


@SLOW
def test_killed_at_twenty_random_moments(tmp_path):
    """Every fourth time from the start of the process on, else while it trains and saves."""
    long = ("train.steps=200", "checkpoint.every=1", "eval.every=50", "filter=mixed")
    long += ("filter.surplus=keep", "lora=all_linear", "lora.rank=2", "eval.greedy=false")
    undisturbed = launch(tmp_path / "whole", *long)
    folder, chance, left = tmp_path / "run", random.Random(0), []
    for number in range(20):
        process, since = start(folder, "never", *long), time.monotonic()
        if number % 4 == 3:
            time.sleep(chance.uniform(0, 8))
        else:
            before = reached(folder)
            while time.monotonic() - since < LIMIT and reached(folder) <= before + 1:
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.3))
        process.kill()
        code, text = end(process)
        assert code == -signal.SIGKILL, text
        names = sorted(path.name for path in (folder / "checkpoints").glob("*"))
        left.append((reached(folder), names))
    saved = launch(folder, *long)
    assert_trees_equal(saved[200], undisturbed[200])
    assert rows(folder) == rows(tmp_path / "whole")
    samples = [read_rows(f / "completions.jsonl") for f in (folder, tmp_path / "whole")]
    assert samples[0] == samples[1]
    cut = {name for _, names in left for name in names if "tmp" in name}
    print(f"{len(left)} kills, {len(cut)} within a save; (last row, checkpoints): {left}")
    assert cut


def reached(folder: Path) -> int:
    """The last step that has a row; -1 before the first."""
    path = folder / "metrics.jsonl"
    table = read_rows(path) if path.exists() else []
    return table[-1]["step"] if table else -1
