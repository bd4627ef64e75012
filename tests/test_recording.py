"""recording.py, the trainer's hook for it, and scripts/replay.py on what a run has left."""

import csv
import importlib.util
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from grpo_jax import recording
from grpo_jax.logging import RunLogger
from grpo_jax.models import llama
from grpo_jax.policy import PolicySettings
from grpo_jax.recording import RecordingError
from grpo_jax.replay import Objective, Passes, batch_for, replay
from grpo_jax.variants import recorded_run
from tests.fixtures import assert_trees_equal
from tests.test_trainer import Killed, launch, programs, rows  # noqa: F401

pytestmark = pytest.mark.core

SCRIPT = Path(__file__).parent.parent / "scripts" / "replay.py"
_spec = importlib.util.spec_from_file_location("replay_script", SCRIPT)
script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(script)
# with a KL in the loss, and four updates a step
RUN = ("algorithm=grpo", "train.steps=3", "eval.every=0", "checkpoint.every=1")
EVERY = "checkpoint.rollouts_every=1"


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """(folder, saved states) of a run without recordings."""
    folder = tmp_path_factory.mktemp("plain") / "run"
    return folder, launch(folder, *RUN)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """(folder, saved states) of the same with one a step; don't write there."""
    folder = tmp_path_factory.mktemp("recorded") / "run"
    return folder, launch(folder, *RUN, EVERY)


def recordings(folder):
    paths = sorted((folder / "rollouts").glob("step_*"))
    return [recording.load(path) for path in paths]


# ------------------------------------------------------------------------------------ the run


def test_recording_changes_nothing_of_the_run(plain, run):
    assert rows(run[0]) == rows(plain[0])
    assert_trees_equal(run[1][3], plain[1][3])
    assert not (plain[0] / "rollouts").exists()


def test_the_weights_are_those_around_each_update(run):
    folder, saved = run
    made = recordings(folder)
    assert [r.moment.step for r in made] == [1, 2, 3]
    assert [r.moment.updates for r in made] == [0, 4, 8]
    assert_trees_equal(made[0].params("before"), made[2].params("reference"))
    for before, after, step in zip([*made[1:], None], made, saved, strict=True):
        assert_trees_equal(after.params("after"), saved[step].trainable)
        if before is not None:
            assert_trees_equal(before.params("before"), after.params("after"))
    names = sorted(p.name for p in (folder / "rollouts").iterdir())
    assert names == ["reference.safetensors", "step_000001", "step_000002", "step_000003"]


def test_a_killed_run_records_the_same(run, tmp_path):
    log = RunLogger.log

    def logging(self, step, metrics):
        log(self, step, metrics)
        if step == 2:  # recorded, and not in a checkpoint yet
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLogger, "log", logging)
        with pytest.raises(Killed):
            launch(tmp_path / "run", *RUN, EVERY)
    launch(tmp_path / "run", *RUN, EVERY)
    for again, first in zip(recordings(tmp_path / "run"), recordings(run[0]), strict=True):
        for name in ("before", "after", "reference"):
            assert_trees_equal(again.params(name), first.params(name))
        assert_trees_equal(again.answers.rollout, first.answers.rollout)
        np.testing.assert_array_equal(again.advantage, first.advantage)


def test_its_own_objective_gives_its_own_batch(run):
    last = recordings(run[0])[-1]
    own = recorded_run(last.moment)
    settings = PolicySettings(own.rollout.temperature, own.train.micro_batch_rows, 64)
    model = llama.build(last.shape)
    batch = batch_for(Passes(last, model, settings), own.algorithm)
    np.testing.assert_array_equal(batch.advantage, last.advantage)
    np.testing.assert_array_equal(batch.keep, last.keep)
    assert np.abs(last.advantage).sum() > 1
    result = replay(last, [Objective("own", own.algorithm)], model, settings, at="before")
    assert result.outcomes[0].clip_low == result.outcomes[0].clip_high == 0
    assert result.outcomes[0].kept == 1 and result.outcomes[0].grad_norm > 1e-3
    logp = Passes(last, model, settings).stats("before").logp
    mask = last.answers.rollout.mask
    np.testing.assert_allclose(np.where(mask, logp, 0), np.where(mask, last.old_logp, 0), atol=1e-5)


def test_what_was_said_is_kept_as_text(run):
    first = recordings(run[0])[0]
    assert len(first.answers.texts) == 8 and len(first.answers.prompts) == 4
    assert first.answers.numbers == (0, 1, 2, 3) and first.answers.group_size == 2
    assert first.answers.prompts[0].text.endswith(":")
    wanted = [sum(c.isdigit() for c in text) / 8 for text in first.answers.texts]
    np.testing.assert_allclose(first.answers.rewards.parts["correct"], wanted)
    np.testing.assert_array_equal(first.answers.rewards.total, np.float32(wanted))
    assert first.moment.weights == {"correct": 1.0}
    assert recorded_run(first.moment).config == first.moment.config


# ----------------------------------------------------------------------------- on the disk


def test_finding_a_recording(run, tmp_path):
    folder = run[0]
    newest = folder / "rollouts" / "step_000003"
    for path in (folder, folder / "rollouts", newest):
        assert recording.find(path) == newest
    assert recording.find(folder, 1) == folder / "rollouts" / "step_000001"
    with pytest.raises(RecordingError, match=r"no recording of step 7; there are 1, 2, 3"):
        recording.find(folder, 7)
    with pytest.raises(RecordingError, match="one recording already"):
        recording.find(newest, 1)
    with pytest.raises(RecordingError, match=r"no recorded rollouts: train with checkpoint\.roll"):
        recording.find(tmp_path)
    with pytest.raises(RecordingError, match="no such folder"):
        recording.find(tmp_path / "nowhere")


@pytest.mark.parametrize("name", ["arrays.npz", "before.safetensors", "after.safetensors"])
def test_a_recording_that_lacks_something_says_what(run, tmp_path, name):
    copy = shutil.copytree(run[0] / "rollouts" / "step_000002", tmp_path / "step_000002")
    with pytest.raises(RecordingError, match=r"reference\.safetensors"):  # it was beside the step
        recording.load(copy).params("reference")
    (copy / name).unlink()
    with pytest.raises(RecordingError, match=name):
        recording.load(copy)


@pytest.mark.parametrize("text", ['{"step": 2', '{"step": 2}'])
def test_torn_meta_is_an_error_too(run, tmp_path, text):
    copy = shutil.copytree(run[0] / "rollouts" / "step_000002", tmp_path / "step_000002")
    (copy / "meta.json").write_text(text)
    with pytest.raises(RecordingError, match="no whole recording"):
        recording.load(copy)


def test_weights_come_back_bit_for_bit_and_torn_ones_are_an_error(tmp_path):
    tree = {"a": {"b": np.float32([[1e-30, -0.0]]), "c": np.arange(3.0, dtype=np.float32)}}
    recording.save_params(tmp_path / "x.safetensors", jax.tree.map(jax.numpy.asarray, tree))
    back = recording.load_params(tmp_path / "x.safetensors")
    assert_trees_equal(back, tree)
    assert np.signbit(back["a"]["b"][0, 1])
    (tmp_path / "y.safetensors").write_bytes((tmp_path / "x.safetensors").read_bytes()[:-4])
    with pytest.raises(RecordingError, match=r"y\.safetensors"):
        recording.load_params(tmp_path / "y.safetensors")


# ------------------------------------------------------------------------------- the script


def test_a_replay_by_hand(run, tmp_path, capsys):
    folder = shutil.copytree(run[0], tmp_path / "run")
    arguments = [str(folder), "--", "algorithm=grpo,dr_grpo,reinforce", "kl=none"]
    assert script.main(arguments) == 0
    printed = capsys.readouterr().out
    out = folder / "rollouts" / "step_000003" / "replay_after"
    assert printed.splitlines()[-1] == str(out)
    names = {p.name for p in out.iterdir()}
    assert names == {"replay.md", "replay.csv", "heatmap.png", "heatmap.svg"}
    report = (out / "replay.md").read_text()
    tables = printed.rsplit("\n\n", 1)[0]
    assert tables in report and "![heat map](heatmap.png)" in report
    with open(out / "replay.csv", newline="") as file:
        table = {row["name"]: row for row in csv.DictReader(file)}
    assert list(table) == ["(run)", "grpo", "dr_grpo", "reinforce"]
    assert float(table["grpo"]["cosine/grpo"]) == pytest.approx(1)
    assert table["grpo"]["cosine/dr_grpo"] == table["dr_grpo"]["cosine/grpo"]
    for row in table.values():
        shares = [float(v) for k, v in row.items() if k.startswith("share/outcome")]
        assert sum(shares) == pytest.approx(1)
    assert "| dr_grpo" in printed and "step 3" in printed.lower()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nowhere"], "replay: no such folder: nowhere"),
        (["RUN", "--step", "9"], "no recording of step 9; there are 1, 2, 3"),
        (
            ["RUN", "--", "algorithm=dapoo"],
            "replay: algorithm=dapoo: did you mean dapo? there are cispo",
        ),
        (["RUN", "--", "optim.lr=1"], "replay: optim.lr=1: only axes are replayed"),
        (["RUN", "--", "filter=mixed filter.on=style"], "filter.on='style' names no part"),
    ],
)
def test_mistakes_are_one_line_and_compile_nothing(run, capsys, compiles, arguments, text):
    assert script.main([a.replace("RUN", str(run[0])) for a in arguments]) == 2
    out, err = capsys.readouterr()
    assert text in err and len(err.splitlines()) == 1 and out == ""
    assert compiles == []
    assert not list((run[0] / "rollouts").glob("*/replay_*"))


def test_the_command(run, tmp_path):
    done = subprocess.run(
        [sys.executable, SCRIPT, run[0], "--at", "before", "--out", tmp_path / "out"],
        cwd=SCRIPT.parent.parent,  # the reward is a function of the tests
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "on-policy, every ratio is 1" in done.stdout and "(run)" in done.stdout
    assert (tmp_path / "out" / "heatmap.svg").is_file()
    assert done.stderr == ""
