"""`scripts/train.py` as a user meets it when something is wrong: one screen, and nothing begun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

SCRIPT = Path(__file__).parent.parent / "scripts" / "train.py"
SWEEP = "-m optim.lr=007,-1 model.path=a/b"
SCREEN = 13  # lines, Hydra's own and the summary of a sweep included
# command -> what its text must name; the first six are those that the project promises
COMMANDS = {
    "clip.hihg=.3": ("clip.hihg", "not in struct"),
    "+clip.hihg=.3": ("unknown key clip.hihg; did you mean high?",),
    "algorithm=dapoo": ("algorithm=dapoo: did you mean dapo? there are", "dapo_paper, "),
    "-m algorithm=grpo,dapoo": ("algorithm=dapoo: did you mean dapo? there are",),
    "clip.low=abc": ("clip.low='abc' should be a number",),
    "rollout.group_size=1": ("rollout.group_size=1", "at least 2"),
    "optim.lr=007": ("optim.lr='007'", "can't begin with a 0"),
    "task.k_min=1": ("task: need 2 <= k_min",),
    "warmstart=none model=pretrained model.path=nowhere": ("model.path=nowhere: no such file",),
    "clip=none clip._target_=mine.rules.rule": ("clip.delta is missing: mine.rules.rule needs it",),
    "clip=none clip._target_=mine.rules.rule +clip.delta=.5 seed=-1": ("seed=-1",),
    SWEEP: ("optim.lr='007'", "optim.lr=-1: above 0"),
}
RULE = """
def rule(log_ratio, advantage, logp, mask, *, delta: float):
    raise NotImplementedError
"""


def start(command, folder):
    """The command in a process of its own, which sees nothing of this machine's caches."""
    return subprocess.Popen(
        [
            sys.executable,
            str(SCRIPT),
            *command.split(),
            f"hydra.run.dir={folder}/run",
            f"hydra.sweep.dir={folder}/sweep",
        ],
        cwd=folder,
        env=os.environ | {"GRPO_JAX_CACHE": str(folder / "cache"), "HYDRA_FULL_ERROR": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_mistakes_end_on_one_screen_before_anything_is_compiled_or_loaded(tmp_path):
    running = {}
    for number, command in enumerate(COMMANDS):
        folder = tmp_path / str(number)
        (folder / "mine").mkdir(parents=True)
        (folder / "mine" / "rules.py").write_text(RULE)
        running[command] = folder, start(command, folder)
    try:
        for command, (folder, process) in running.items():
            text, _ = process.communicate(timeout=300)
            assert process.returncode != 0, command
            assert "Traceback" not in text, text
            assert len(text.splitlines()) <= SCREEN, text
            assert [part for part in COMMANDS[command] if part not in text] == [], text
            assert list(folder.glob("cache/*/*")) == [], command
    finally:
        for _, process in running.values():
            process.kill()
    _check_records(running["clip.low=abc"][0] / "run", running[SWEEP][0] / "sweep")


def _check_records(run, sweep):
    """A failed job has its own error in its own folder, and did not stop the next one."""
    assert "clip.low='abc'" in json.loads((run / "FAILED.json").read_text())["error"]
    jobs = sorted(folder for folder in sweep.iterdir() if folder.is_dir())
    assert [job.name.rpartition("-")[0] for job in jobs] == [
        "model.path=a_b,optim.lr=-1",
        "model.path=a_b,optim.lr=007",
    ]
    errors = [json.loads((job / "FAILED.json").read_text())["error"] for job in jobs]
    assert "above 0" in errors[0] and "'007'" in errors[1]
