"""A killed run is the run that was not killed: 6 steps are 3 steps, kill -9, and 3 steps."""

import json

import numpy as np
import pytest

from grpo_jax import recording
from grpo_jax.logging import read_rows
from tests.fixtures import assert_trees_equal
from tests.killed import killed
from tests.test_logging import records
from tests.test_trainer import launch, programs, rows  # noqa: F401

SIX = ("train.steps=6", "checkpoint.every=3", "eval.every=2", "checkpoint.rollouts_every=1")
# all that a step depends on beside the parameters, at once
EVERYTHING = (
    *SIX,
    "filter=mixed",
    "filter.surplus=keep",
    "filter.max_rounds=3",
    "lora=all_linear",
    "lora.rank=2",
    "kl=k3",
    "kl.refresh_every=2",
    "kl.refresh_mix=1",
    "entropy=adaptive",
    "entropy.adapt.target=9",
    "optim.schedule=cosine",
    "logger.completions_every=1",
)
OFFLINE = ("logger=wandb", "logger.completions_every=1")


def assert_same_run(folder, saved, whole, undisturbed):
    """Bit for bit: parameters, optimizer, reference and key of the last checkpoint; rows but for
    times; what was sampled, from which prompts, and its advantages, at each step."""
    last = max(undisturbed)
    assert_trees_equal(saved[last], undisturbed[last])
    assert rows(folder) == rows(whole)
    assert [row["step"] for row in rows(folder)] == list(range(last + 1))
    samples = [read_rows(f / "completions.jsonl") for f in (folder, whole)]
    assert samples[0] == samples[1]
    for step in range(1, last + 1):
        a, b = (recording.load(recording.step_folder(f, step)) for f in (folder, whole))
        assert a.answers.numbers == b.answers.numbers and a.answers.texts == b.answers.texts
        assert_trees_equal(a.answers.rollout, b.answers.rollout)
        np.testing.assert_array_equal(a.advantage, b.advantage)
    done = [json.loads((f / "DONE.json").read_text()) for f in (folder, whole)]
    assert done[0] == done[1]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder, saved states) of the undisturbed run with everything; don't write there."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, launch(folder, *EVERYTHING)


@pytest.mark.core
def test_the_undisturbed_run_has_all_that_a_resume_could_lose(whole):
    folder, saved = whole
    table = rows(folder)
    assert table[4]["filter/carried_groups"] > 0  # groups that wait across the checkpoint
    assert table[4]["position"] != 16  # dynamic sampling: prompts aren't steps
    assert len({row["learning_rate"] for row in table[1:]}) == 6
    assert len({row["entropy_coef"] for row in table[1:]}) == 6
    assert saved[3].reference is not None
    assert sorted(saved) == [3, 6] and int(saved[6].step) == 24  # 2 epochs x 2 minibatches


@pytest.mark.core
def test_a_run_killed_after_the_checkpoint_goes_on_as_if_nothing_had_been(whole, tmp_path):
    folder = tmp_path / "run"
    killed(folder, "logged:4", *EVERYTHING, *OFFLINE)
    assert [row["step"] for row in read_rows(folder / "metrics.jsonl")] == [0, 1, 2, 3, 4]
    first = (folder / "wandb" / "run_id").read_text()
    saved = launch(folder, *EVERYTHING, *OFFLINE)
    assert_same_run(folder, saved, *whole)
    # and in W&B: the same run, each step once and in order, from one folder
    assert (folder / "wandb" / "run_id").read_text() == first
    (sink,) = (folder / "wandb").glob("offline-run-*")
    found = [r["history"]["item"] for r in records(sink) if r["type"] == "history"]
    steps = [item["train/step"] for item in found if "loss" in item or "eval/accuracy" in item]
    assert steps == list(range(7))
    assert len(list((folder / "wandb" / "superseded").iterdir())) == 1


@pytest.mark.slow  # pytest -m slow -n 0 tests/test_resume.py
@pytest.mark.parametrize("moment", ["logged:2", "saving:3", "logged:6", "saving:6", "saved:6"])
def test_wherever_it_is_killed_around_a_checkpoint(whole, tmp_path, moment):
    folder = tmp_path / "run"
    killed(folder, moment, *EVERYTHING)
    saved = launch(folder, *EVERYTHING)
    if not saved:  # the last checkpoint was there, and nothing was left but to say so
        saved = whole[1]
    assert_same_run(folder, saved, *whole)


@pytest.mark.slow
def test_a_longer_run_is_told_of_its_schedule(tmp_path, capsys):
    """The learning rate falls towards `train.steps`: what is done was done for another one."""
    folder = tmp_path / "run"
    launch(folder, "train.steps=1")
    capsys.readouterr()
    launch(folder, "train.steps=2")
    text = capsys.readouterr().out
    assert "goes on after step 1 of 2" in text
    assert "fell for train.steps=1 until here, and falls for 2 from here on" in text
    assert json.loads((folder / "config.json").read_text())["train"]["steps"] == 2
    assert [row["step"] for row in rows(folder)] == [0, 1, 2]


# ------------------------------------------------------------------------------- each by itself

ALONE = {
    "plain": (),
    "dynamic sampling, surplus dropped": ("filter=mixed", "filter.max_rounds=3"),
    "surplus kept, full fine-tuning": ("filter=mixed", "filter.surplus=keep"),
    "moving reference": ("algorithm=grpo", "kl.refresh_every=2"),
    "lora": ("lora=all_linear", "lora.rank=2", "algorithm=grpo"),
    "noise in the loss": ("algorithm=clip_cov",),
    "sequence ratio, one update": ("algorithm=gspo", "train.epochs=1", "train.minibatches=1"),
    "overlong, truncation masked": ("algorithm=dapo", "filter.max_rounds=2"),
    "greedy baseline": ("baseline=greedy",),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ALONE)
def test_each_alone_at_two_moments(tmp_path, name):
    overrides = (*SIX, *ALONE[name])
    undisturbed = launch(tmp_path / "whole", *overrides)
    for moment in ("logged:2", "logged:5"):  # before there is a checkpoint, and after one
        folder = tmp_path / moment
        killed(folder, moment, *overrides)
        saved = launch(folder, *overrides)
        assert_same_run(folder, saved, tmp_path / "whole", undisturbed)
