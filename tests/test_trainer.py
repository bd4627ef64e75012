"""trainer.py: whole runs of a few steps, composed as on the command line."""

import json
import os
import shutil
import signal
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from grpo_jax import checkpoint, preemption, trainer
from grpo_jax.config import compose, make_run
from grpo_jax.logging import RunLogger, read_rows
from grpo_jax.preemption import Preempted
from grpo_jax.rollout import Collector
from grpo_jax.types import TrainingError
from tests.fixtures import assert_trees_equal, snapshot

pytestmark = pytest.mark.core

# A random model of one layer, which a reward for digits can teach something in a few steps.
SMALL = (
    "task.k_max=4",
    "task.heldout=6",
    "warmstart.steps=0",
    "model.shape.hidden_size=16",
    "model.shape.num_layers=1",
    "model.shape.num_heads=2",
    "model.shape.num_kv_heads=1",
    "model.shape.head_dim=8",
    "model.shape.intermediate_size=16",
    "reward.correct.function._target_=tests.fixtures.digits",
    "rollout.prompts=4",
    "rollout.group_size=2",
    "rollout.max_completion_length=12",
    "train.steps=4",
    "train.epochs=2",
    "train.minibatches=2",
    "train.micro_batch_rows=4",
    "optim.lr=3e-3",
    "optim.schedule=linear",
    "optim.warmup_updates=2",
    "eval.every=1",
    "eval.prompts=4",
    "eval.samples=2",
    "checkpoint.every=2",
    "logger=files",
    "logger.progress=false",
)
FINITE = (
    "task._target_=tests.fixtures.finite_task",
    "+task.size=3",
    *(f"~task.{k}" for k in "k_min k_max guess slip dots guess_stop heldout".split()),
)
TIMES = ("time/", "step_time", "tokens_per_second")


@pytest.fixture(scope="module", autouse=True)
def programs(tmp_path_factory):
    """The runs of this file find one another's compiled programs, as the jobs of a sweep do."""
    settings = {
        "jax_compilation_cache_dir": str(tmp_path_factory.mktemp("xla")),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    compilation_cache.reset_cache()
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def make(folder: Path, *overrides: str):
    small = [o for o in SMALL if o.split("=")[0] not in {p.lstrip("~") for p in overrides}]
    return make_run(compose(*small, f"cache={folder.parent}/cache", *overrides), folder)


def launch(folder: Path, *overrides: str) -> dict:
    """Train; the states that were saved, by step."""
    saved, save = {}, checkpoint.save

    def saving(manager, step, state, *rest):
        saved[step] = snapshot(state)
        save(manager, step, state, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(checkpoint, "save", saving)
        trainer.train(make(folder, *overrides))
    return saved


def rows(folder: Path, *without: str) -> list[dict]:
    """metrics.jsonl without the times."""
    return [
        {name: v for name, v in row.items() if not name.startswith((*TIMES, *without))}
        for row in read_rows(folder / "metrics.jsonl")
    ]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """(folder, saved states) of an undisturbed run; don't write there."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    return folder, launch(folder)


# ------------------------------------------------------------------------------------ one run


def test_what_a_run_leaves_behind(whole):
    folder, saved = whole
    table = rows(folder)
    assert [row["step"] for row in table] == [0, 1, 2, 3, 4]
    assert table[0]["eval/accuracy"] > 0.1 and "loss" not in table[0]  # the base policy
    for row in table[1:]:
        assert row["position"] == 4 * row["step"]
        assert row["grad_norm"] > 0
        assert row["updates/nonfinite"] == row["updates/empty"] == 0
        assert row["sampling/sampling_logp_difference/max"] < 1e-5
        assert 0 < row["reward"] < 1 and "eval/accuracy" in row and "eval/greedy_accuracy" in row
    # four updates a rollout; after a warm-up over two, in a line to 0, which the 17th would have
    rates = [row["learning_rate"] for row in table[1:]]
    np.testing.assert_allclose(rates, 3e-3 * np.array([13, 9, 5, 1]) / 14, rtol=1e-5)
    assert sorted(saved) == [2, 4] and int(saved[4].step) == 16
    done = json.loads((folder / "DONE.json").read_text())
    assert done["step"] == 4
    assert done["final"] == {n: v for n, v in table[-1].items() if n in done["final"]}
    assert {"eval/accuracy", "eval/greedy_accuracy"} <= set(done["final"])
    samples = read_rows(folder / "completions.jsonl")
    assert {row["step"] for row in samples} == {0, 1, 2, 3, 4}
    assert {"prompt", "completion", "answer", "reward", "length"} <= set(samples[0])
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["4"]  # keep: 1
    assert not (folder / "wandb").exists()


def test_the_policy_moves_and_learns(whole):
    _, saved = whole
    first, last = saved[2].trainable, saved[4].trainable
    moved = jax.tree.map(lambda a, b: (a != b).any(), first, last)
    assert all(jax.tree.leaves(moved))


def test_the_same_seed_gives_the_same_run_and_another_seed_another(whole, tmp_path):
    folder, saved = whole
    again = launch(tmp_path / "again")
    assert rows(tmp_path / "again") == rows(folder)
    assert_trees_equal(again[4], saved[4])
    launch(tmp_path / "other", "seed=1", "train.steps=1")
    base, first = rows(tmp_path / "other")
    assert base != rows(folder)[0] and first["reward"] != rows(folder)[1]["reward"]


def test_algorithms_with_one_seed_are_paired(whole, tmp_path):
    launch(tmp_path / "run", "algorithm=reinforce", "train.steps=1")
    base, first = rows(tmp_path / "run")
    assert base == rows(whole[0])[0]
    other = rows(whole[0])[1]
    sampled = ("reward", "completions/mean_length", "entropy", "num_tokens_step")
    assert {n: first[n] for n in sampled} == {n: other[n] for n in sampled}
    assert first["loss"] != other["loss"]


def test_evaluation_does_not_disturb_training(whole, tmp_path):
    """Case L12: GaTech-RL2/EgoVerse#644, NeMo-RL#3401."""
    folder, saved = whole
    silent = launch(tmp_path / "run", "eval.every=0")
    table, other = rows(tmp_path / "run", "eval/"), rows(folder, "eval/")
    assert table == other
    assert_trees_equal(silent[4], saved[4])
    evaluated = ["eval/accuracy" in row for row in rows(tmp_path / "run")]
    assert evaluated == [True, False, False, False, True]  # first and last always
    assert rows(tmp_path / "run")[-1] == rows(folder)[-1]


# --------------------------------------------------------------------------------------- resume


class Killed(BaseException):
    """Nobody catches it."""


def test_a_killed_run_goes_on_bit_for_bit(whole, tmp_path):
    """Case L4: ms-swift#9935, PrimeIntellect-ai/prime-rl#3164, paiml/entrenar#294."""
    folder, saved = whole
    log = RunLogger.log

    def logging(self, step, metrics):
        log(self, step, metrics)
        if step == 3:  # after the checkpoint of step 2
            raise Killed

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RunLogger, "log", logging)
        with pytest.raises(Killed):
            launch(tmp_path / "run")
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1, 2, 3]
    assert not (tmp_path / "run" / "DONE.json").exists()
    rest = launch(tmp_path / "run")
    assert rows(tmp_path / "run") == rows(folder)
    samples = [read_rows(f / "completions.jsonl") for f in (tmp_path / "run", folder)]
    assert samples[0] == samples[1]
    assert sorted(rest) == [4]
    assert_trees_equal(rest[4], saved[4])
    assert json.loads((tmp_path / "run" / "DONE.json").read_text())["step"] == 4


def told(monkeypatch, step):
    """SIGTERM comes as the rollout of that step begins."""
    collect, left = Collector.collect, [1]

    def collecting(self, params, reference, now, *rest):
        if now == step and left:
            left.clear()
            os.kill(os.getpid(), signal.SIGTERM)
        return collect(self, params, reference, now, *rest)

    monkeypatch.setattr(Collector, "collect", collecting)


def test_a_preempted_run_saves_and_goes_on(whole, tmp_path, monkeypatch):
    folder, before = tmp_path / "run", signal.getsignal(signal.SIGTERM)
    told(monkeypatch, 3)  # checkpoints are of steps 2 and 4
    with pytest.raises(Preempted, match=r"SIGTERM: stopped after step 3 of 4; .*same command"):
        launch(folder)
    assert signal.getsignal(signal.SIGTERM) is before
    assert [row["step"] for row in rows(folder)] == [0, 1, 2, 3]
    assert not list(folder.glob("*E*.json"))  # neither DONE nor FAILED
    assert checkpoint.load_params(folder / "checkpoints")[0] == 3
    told(monkeypatch, 4)
    saved = launch(folder)  # told in its last step: it is complete
    assert preemption.asked()  # and scripts/train.py begins no other job of a sweep
    assert_trees_equal(saved[4], whole[1][4])
    assert rows(folder) == rows(whole[0]) and (folder / "DONE.json").exists()


def test_a_complete_run_is_left_alone(whole, monkeypatch):
    folder, _ = whole
    before = contents(folder)
    monkeypatch.setattr(trainer, "assemble", None)  # nothing is even loaded
    final = trainer.train(make(folder))
    assert final == json.loads((folder / "DONE.json").read_text())["final"]
    assert before == contents(folder)


def test_a_complete_run_can_be_made_longer(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    launch(folder, "train.steps=5")
    assert [row["step"] for row in rows(folder)] == [0, 1, 2, 3, 4, 5]
    assert rows(folder)[:5] == rows(whole[0])
    assert rows(folder)[5]["position"] == 20
    assert json.loads((folder / "DONE.json").read_text())["step"] == 5


def test_a_used_folder_is_not_overwritten(whole, tmp_path):
    folder = tmp_path / "run"
    shutil.copytree(whole[0], folder)
    with pytest.raises(TrainingError, match="holds checkpoints of an earlier run, up to step 4"):
        launch(folder, "checkpoint.resume=never")
    assert rows(folder) == rows(whole[0])
    assert (folder / "DONE.json").exists() and (folder / "checkpoints" / "4").is_dir()


# ------------------------------------------------------------------------------------- refusals


def test_a_base_policy_at_chance_is_refused(tmp_path):
    strict = "reward.correct.function._target_=grpo_jax.rewards.chain.correct"
    with pytest.raises(TrainingError, match=r"answers 0\.000 of .* chance is 0\.100.*warm-start"):
        launch(tmp_path / "run", strict)
    assert [row["step"] for row in rows(tmp_path / "run")] == [0]  # what was measured stays
    assert not (tmp_path / "run" / "DONE.json").exists()
    launch(tmp_path / "forced", strict, "eval.allow_chance=true", "train.steps=1")
    assert rows(tmp_path / "forced")[1]["frac_reward_zero_std"] == 1


def test_a_run_whose_numbers_break_stops_with_a_message(tmp_path):
    """Case L9: facebookresearch/habitat-lab#2226, google-deepmind/optax#1746."""
    with pytest.raises(
        TrainingError, match="5 updates in a row had a loss or gradient that is not"
    ):
        launch(
            tmp_path / "run",
            "optim.lr=1e38",
            "optim.schedule=constant",
            "train.max_nonfinite=5",
            "checkpoint.every=1",
        )
    table = rows(tmp_path / "run")
    # the first update is fine, its parameters are not; the fifth bad one comes in step 2
    assert table[-1]["updates/nonfinite"] == 3 and len(table) == 2
    assert not (tmp_path / "run" / "DONE.json").exists()


# ------------------------------------------------------------------------------ data, compilation


def test_twenty_steps_on_three_prompts_compile_nothing_after_the_first(
    tmp_path, compiles, monkeypatch, capsys
):
    """Case L3, too: huggingface/trl#4271, RasmussenLab/vamb#425 (fewer problems than a step takes:
    the incomplete batch went, and the run ended well without a step)."""
    made, log = {}, RunLogger.log

    def logging(self, step, metrics):
        log(self, step, metrics)
        made[step] = len(compiles)

    monkeypatch.setattr(RunLogger, "log", logging)
    launch(
        tmp_path / "run",
        *FINITE,
        "train.steps=20",
        "eval.every=5",
        "checkpoint.every=7",
        "algorithm=dapo_paper",
        "filter.max_rounds=3",
    )
    assert compiles[made[1] :] == []
    table = rows(tmp_path / "run")[1:]
    assert len(table) == 20
    said = "3 training prompts are fewer than a step takes (4): some come twice in one batch"
    assert said in capsys.readouterr().out
    assert len({row["completions/mean_length"] for row in table}) > 10
    assert len({row["filter/rounds"] for row in table}) > 1
    assert table[-1]["position"] == sum(4 * row["filter/rounds"] for row in table)


def test_another_job_of_a_sweep_compiles_nothing(whole, tmp_path):
    """With the first one's programs on disk; what a process has in memory goes with it."""
    missed = []

    def listen(event, **details):
        if event.endswith("/cache_misses"):
            missed.append(event)

    jax.clear_caches()
    jax.monitoring.register_event_listener(listen)
    numbers = ("seed=3", "kl.coef=0.001", "clip.low=0.1", "clip.high=0.5", "scale.eps=1e-3")
    optim = ("optim.lr=1e-3", "optim.warmup_updates=1", "optim.clip_norm=0.3")
    launch(tmp_path / "run", *numbers, *optim, "train.steps=2", "eval.every=0")
    jax.monitoring.unregister_event_listener(listen)
    assert missed == []
    assert rows(tmp_path / "run")[1]["loss"] != rows(whole[0])[1]["loss"]


def test_a_run_for_wandb_leaves_an_offline_folder(tmp_path):
    launch(tmp_path / "run", "logger=wandb", "logger.wandb=offline", "train.steps=1")
    assert len(list((tmp_path / "run" / "wandb").glob("offline-run-*"))) == 1
    assert [row["step"] for row in rows(tmp_path / "run")] == [0, 1]
