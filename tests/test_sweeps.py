"""Sweeps from the command line: what a failed job does to the others, to the exit code, to W&B and
to the next attempt, under each launcher.

Those of the `sweep` extra skip where it isn't installed. The slow ones:
`pytest -n 0 -m slow tests/test_sweeps.py`.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from grpo_jax import report
from grpo_jax.config import CONF
from grpo_jax.sweep import DONE, FAILED, UNFINISHED, WAITING, Outcome, outcomes, summary
from tests.test_compare import compare as compare_script
from tests.test_logging import records
from tests.test_trainer import SMALL, launch, programs, rows  # noqa: F401

ROOT = Path(__file__).parent.parent
TINY = {
    **dict(word.split("=", 1) for word in SMALL),
    **{"train.steps": "2", "eval.every": "0", "eval.greedy": "false", "eval.prompts": "2"},
    **{"checkpoint.every": "1", "checkpoint.keep": "2", "logger": "wandb"},
}
del TINY["optim.lr"]
LAUNCHERS = {  # beside Hydra's own, which the tests below have
    "submitit_local": "hydra_plugins.hydra_submitit_launcher",
    "joblib": "hydra_plugins.hydra_joblib_launcher",
}


def has(plugin):
    return find_spec("hydra_plugins") is not None and find_spec(plugin) is not None


def deadly(completion, answer):
    """A reward that takes its process along, as the kernel does when memory runs out."""
    os.kill(os.getpid(), signal.SIGKILL)


def start(folder, *words, cache=None, **environment):
    """`scripts/train.py -m WORDS` in a process of its own, whose current directory is `folder`."""
    known = {"GRPO_JAX_CACHE": str(cache or folder / "cache"), "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, str(ROOT / "scripts" / "train.py"), "-m", *words],
        cwd=folder,
        env=os.environ | known | {"HYDRA_FULL_ERROR": "0"} | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # so that its jobs can be killed with it
    )


def ended(process, seconds=240):
    """(exit code, all that it said), killed with its jobs if it takes longer."""
    try:
        text, _ = process.communicate(timeout=seconds)
    finally:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    return process.returncode, text


def tiny(**changes):
    return [f"{key}={value}" for key, value in {**TINY, **changes}.items()]


def job_folders(sweep):
    """By the job's learning rate."""
    found = {}
    for path in sweep.glob("*/.hydra/overrides.yaml"):
        words = dict(word.split("=", 1) for word in yaml.safe_load(path.read_text()))
        found[words["optim.lr"]] = path.parent.parent
    return found


# ----------------------------------------------------------------------------- every launcher


@pytest.mark.core
def test_a_failed_job_stops_no_other_and_is_named_under_every_launcher(tmp_path):
    """Case C2: hydra#2284, #2551. Refused before anything loads, so that it takes seconds."""
    present = [name for name, plugin in LAUNCHERS.items() if has(plugin)]
    running = {}
    for name in present:
        (tmp_path / name).mkdir()
        chosen = [f"hydra/launcher={name}", "hydra.sweep.dir=sweep"]
        running[name] = start(tmp_path / name, "optim.lr=-1,-2", *chosen)
    for name, process in running.items():
        code, text = ended(process)
        assert code == 1, text
        told = text[text.index("sweep sweep: 2 failed") :]
        for lr, folder in job_folders(tmp_path / name / "sweep").items():
            error = json.loads((folder / "FAILED.json").read_text())["error"]
            assert f"optim.lr={lr}: above 0" in error
            assert f"  failed: optim.lr={lr}: {error}" in told
        assert told.count("failed: ") == 2
        script = str(ROOT / "scripts" / "train.py")
        again = f"python {script} -m optim.lr=-1,-2 hydra/launcher={name} hydra.sweep.dir=sweep"
        assert again in told
    missing = sorted(LAUNCHERS.keys() - set(present))
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (pip install -e '.[sweep]')")


@pytest.mark.core
def test_a_sweep_goes_on_where_it_was_left(tmp_path, monkeypatch):
    """Cases C2 and C4 (wandb#1314, #4591): three jobs in one process, of which the second breaks
    while it trains and the third is refused; then the same command again."""
    words = [*tiny(), "optim.lr=0.003,1e38,-1", "train.max_nonfinite=1", "hydra.sweep.dir=sweep"]
    code, text = ended(start(tmp_path, *words))
    assert code == 1, text
    sweep = tmp_path / "sweep"
    jobs = job_folders(sweep)
    good, broken, refused = jobs["0.003"], jobs["1e+38"], jobs["-1"]
    assert "sweep sweep: 1 done, 2 failed" in text, text[-3000:]
    assert "failed: optim.lr=1e+38: grpo_jax.types.TrainingError: 1 updates in a row" in text
    assert "failed: optim.lr=-1: grpo_jax.check.ConfigError: optim.lr=-1: above 0" in text
    _check_wandb(good, broken, refused)

    # a half-finished sweep is compared as it stands
    monkeypatch.setattr(report, "_draw", lambda *_: None)
    assert compare_script.main([str(sweep)]) == 0
    text = (sweep / "report.md").read_text()
    assert "1 run in 1 group" in text and "left out: failed: grpo_jax.types" in text

    whole = rows(good)
    shutil.rmtree(good / "checkpoints" / "2")  # as if killed after the first step
    (good / "DONE.json").unlink()
    (good / "REFUSED.json").write_text('{"error": "of somebody who did not get in"}')
    shutil.rmtree(broken)
    code, text = ended(start(tmp_path, *words, cache=tmp_path / "cache"))
    assert code == 1 and "sweep sweep: 1 done, 2 failed" in text, text
    assert f"goes on after step 1 of 2 ({good}" in text
    assert rows(good) == whole and (good / "DONE.json").exists()
    assert (broken / "FAILED.json").exists()


def _check_wandb(good, broken, refused):
    """One run a job, of one group, finished as the job ended; none where nothing was trained."""
    assert not (refused / "wandb").exists()
    ids = {}
    for folder, code in ((good, 0), (broken, 1)):
        (offline,) = (folder / "wandb").glob("offline-run-*")
        found = records(offline)
        run = next(record["run"] for record in found if record["type"] == "run")
        assert run["run_group"] == "sweep" and run["project"] == "grpo_jax"
        assert [r["exit"].get("exit_code", 0) for r in found if r["type"] == "exit"] == [code]
        ids[run["run_id"]] = folder
    assert len(ids) == 2


@pytest.mark.core
def test_two_sweeps_of_one_second_have_a_folder_each(tmp_path):
    """Also with clocks that agree to the microsecond, on two hosts whose processes have one id."""
    running = [start(tmp_path, "optim.lr=-1,-2") for _ in range(2)]
    for process in running:
        code, text = ended(process)
        assert code == 1 and ": 2 failed" in text, text
    sweeps = list((tmp_path / "runs").iterdir())
    assert len(sweeps) == 2 and all(len(job_folders(sweep)) == 2 for sweep in sweeps)

    now = OmegaConf.register_new_resolver
    names = set()
    for _ in range(2):
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("train", return_hydra_config=True)
        now("now", lambda pattern: "2031-01-01_00-00-00", replace=True, use_cache=True)
        names |= {config.hydra.run.dir, config.hydra.sweep.dir}
        assert config.hydra.sweep.dir == config.hydra.sweep.dir  # drawn once
    assert len(names) == 4


@pytest.mark.slow  # a minute
def test_a_killed_job_leaves_the_others_under_submitit(tmp_path):
    """And a seed is pinned: in a process of its own, and here, the same run."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install -e '.[sweep]'")
    rewards = "reward.correct.function._target_"
    words = [word for word in tiny() if not word.startswith(rewards)]
    words += [f"{rewards}=tests.test_sweeps.deadly,tests.fixtures.digits", "optim.lr=0.003,-1"]
    words += ["hydra/launcher=submitit_local", "hydra.sweep.dir=sweep"]
    code, text = ended(start(tmp_path, *words))
    assert code == 1, text
    assert "sweep sweep: 1 done, 2 failed, 1 not finished" in text
    killed = f"not finished (killed, or still at work): {rewards}=tests.test_sweeps.deadly"
    assert f"{killed} optim.lr=0.003" in text
    assert f"failed: {rewards}=tests.fixtures.digits optim.lr=-1: " in text
    (done,) = (tmp_path / "sweep").glob("*/DONE.json")
    launch(tmp_path / "alone", *tiny(logger="files"), "optim.lr=0.003")
    assert rows(tmp_path / "alone") == rows(done.parent)


@pytest.mark.slow  # seconds
def test_the_slurm_configuration_is_one_that_submitit_submits(tmp_path):
    """By an `sbatch` that keeps what it gets, and says that the queue is closed."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="pip install -e '.[sweep]'")
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "srun").write_text("#!/bin/sh\n")
    (tools / "sbatch").write_text(f'#!/bin/sh\ncp "$1" {tmp_path}/job.sh\nexit 1\n')
    for tool in tools.iterdir():
        tool.chmod(0o755)
    words = ["seed=0,1", "hydra/launcher=slurm", "hydra.launcher.partition=small"]
    code, text = ended(start(tmp_path, *words, PATH=f"{tools}:{os.environ['PATH']}"))
    assert code == 1, text
    lines = (tmp_path / "job.sh").read_text().splitlines()
    for flag in ("partition=small", "requeue", "signal=USR2@600", "time=720", "array=0-1%2"):
        assert f"#SBATCH --{flag}" in lines
    assert "sweep runs" not in text  # nothing has begun, so there is nothing to go on with


# ----------------------------------------------------------------------------- what is told


def job(folder, *words, **verdicts):
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(list(words)))
    for name, error in verdicts.items():
        (folder / f"{name}.json").write_text(json.dumps({"error": error}))
    return folder


def test_jobs_are_told_by_what_they_left(tmp_path):
    a = job(tmp_path / "a", "x=1", "seed=0", DONE="")
    b = job(tmp_path / "b", "x=1", "seed=1", FAILED="Error: no\nand more")
    c = job(tmp_path / "c", "x=1", "seed=2")
    d = job(tmp_path / "d", "x=1", "seed=3", DONE="", REFUSED="other settings")
    job(tmp_path / "e", "x=2", "seed=0", FAILED="of another command")
    planned = [["x=1", f"seed={n}"] for n in range(5)]
    assert outcomes(tmp_path, planned) == [
        Outcome("seed=0", DONE, "", a),
        Outcome("seed=1", FAILED, "Error: no", b),
        Outcome("seed=2", UNFINISHED, "", c),
        Outcome("seed=3", FAILED, "other settings", d),
        Outcome("seed=4", WAITING, "", None),
    ]
    assert {o.name for o in outcomes(tmp_path, None)} >= {"x=2 seed=0", "x=1 seed=2"}
    (b / "FAILED.json").write_text("{")
    assert outcomes(tmp_path, planned)[1].error.endswith("does not say why")


def test_each_seed_of_a_job_is_told(tmp_path):
    """`seeds_per_job`; test_together.py shows that a failing one leaves its siblings."""
    both = job(tmp_path / "a", "seed=0", "seeds_per_job=2", FAILED="1 of 2 seeds failed")
    job(both / "seed=0", "seed=0", DONE="")
    job(both / "seed=1", "seed=1", FAILED="ValueError: 7")
    refused = job(tmp_path / "b", "seed=8", "seeds_per_job=2", FAILED="bad settings")
    job(refused / "seed=8", "seed=8", DONE="")
    found = outcomes(tmp_path, [["seed=0", "seeds_per_job=2"], ["seed=8", "seeds_per_job=2"]])
    assert [(job.name, job.state, job.error) for job in found] == [
        ("seed=0 [seed=0]", DONE, ""),
        ("seed=0 [seed=1]", FAILED, "ValueError: 7"),
        ("seed=8", FAILED, "bad settings"),
    ]


def test_the_summary_counts_names_and_says_how_to_go_on(tmp_path):
    jobs = [
        Outcome("seed=0", DONE, "", tmp_path),
        Outcome("seed=1", FAILED, "Error: no", tmp_path),
        Outcome("seed=2", WAITING, "", None),
    ]
    command = ["python", "train.py", "-m", "seed=0,1,2", "task.levels=[3, 4]"]
    lines = summary(Path("runs/a b"), jobs, command).splitlines()
    assert lines == [
        "sweep runs/a b: 1 done, 1 failed, 1 not begun",
        "  failed: seed=1: Error: no",
        "  not begun: seed=2",
        "go on, finished jobs skipped: python train.py -m seed=0,1,2 'task.levels=[3, 4]' "
        "'hydra.sweep.dir=runs/a b'",
    ]
    named = [*command, "hydra.sweep.dir=elsewhere"]
    assert summary(Path("elsewhere"), jobs, named).splitlines()[-1].count("hydra.sweep.dir") == 1
