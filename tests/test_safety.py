"""No credential is written down: real runs with marked ones, every file searched (docs/safety.md).

What a model, a hub folder or a name could do is in test_safety_files.py and test_safety_names.py.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import wandb
from omegaconf import OmegaConf

from grpo_jax import confidential
from grpo_jax.benchmark_config import make_benchmark
from grpo_jax.check import ConfigError
from grpo_jax.config import check_choices, compose, make_run
from grpo_jax.logging import RunLogger, write_failed
from grpo_jax.screen import say
from scripts.compare import main as compare
from scripts.export_hf import main as export

TRAIN = Path(__file__).parent.parent / "scripts" / "train.py"
MARK = "LEAKED"
SECRETS = {
    "WANDB_API_KEY": f"{MARK}wandb".ljust(40, "0"),
    "HF_TOKEN": f"hf_{MARK}huggingface",
    "HUGGING_FACE_HUB_TOKEN": f"hf_{MARK}hub",
    "AWS_SECRET_ACCESS_KEY": f"{MARK}cloud",
    "SLURM_JWT": f"{MARK}cluster",  # W&B writes all variables of Slurm down
    "HTTPS_PROXY": f"http://me:{MARK}proxy@127.0.0.1:1",
}
SMALL = """train.steps=1 rollout.prompts=2 rollout.group_size=2 train.minibatches=1 train.epochs=1
    eval.prompts=2 eval.samples=2 eval.greedy=false warmstart.steps=0 eval.allow_chance=true
    checkpoint.rollouts_every=1 rollout.max_completion_length=8 rollout.slots=null
    model.shape.num_layers=1 logger.progress=false logger.group=VISIBLE""".split()
BROKEN_TASK = """
import os
def load(error, **rest):
    text = f"GET https://me:{os.environ['HF_TOKEN']}@host/{os.environ['WANDB_API_KEY']}"
    raise {"OSError": OSError, "KeyError": KeyError}[error](text)
"""


def run(folder, *words, **changes):
    """`scripts/train.py` with the marked environment -> (exit code, what it said)."""
    quick = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"
    environment = os.environ | SECRETS | {"GRPO_JAX_CACHE": str(folder / "cache")} | changes
    done = subprocess.run(
        [sys.executable, str(TRAIN), f"hydra.run.dir={folder}/run", *words],
        cwd=folder,
        env=environment | {"XLA_FLAGS": quick},
        capture_output=True,
        timeout=300,
        check=False,
    )
    return done.returncode, (done.stdout + done.stderr).decode()


def files_with(folder, text):
    """Names of the files below `folder`, of any kind, in whose bytes or name `text` is."""
    found = [p for p in folder.rglob("*") if p.is_file()]
    return {p.name for p in found if text in str(p) or text.encode() in p.read_bytes()}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("safety")
    return folder, *run(folder, *SMALL)


@pytest.mark.core
def test_a_run_writes_no_secret_of_its_environment(trained, capsys):
    folder, code, said = trained
    assert code == 0, said
    assert MARK not in said
    assert compare([str(folder / "run")]) == 0
    assert export([str(folder / "run"), str(folder / "exported")]) == 0
    assert MARK not in capsys.readouterr().out
    assert files_with(folder, MARK) == set()
    # the search does see what a run keeps, and where
    seen = files_with(folder, "VISIBLE")
    assert {"config.json", "config.yaml", "overrides.yaml", "hydra.yaml"} <= seen
    assert {"meta.json", "metadata", "debug.log", "report.md"} <= seen
    assert any(name.endswith(".wandb") for name in seen)


@pytest.mark.core
@pytest.mark.parametrize(("error", "exit_code"), [("OSError", 2), ("KeyError", 1)])
def test_a_run_that_fails_writes_none_either(tmp_path, error, exit_code):
    (tmp_path / "broken.py").write_text(BROKEN_TASK)
    words = [*SMALL, "task._target_=broken.load", f"+task.error={error}"]
    code, said = run(tmp_path, *words, HYDRA_FULL_ERROR="1")
    assert code == exit_code, said
    assert ("Traceback" in said) == (exit_code == 1)  # a defect: Hydra prints where it was
    assert MARK not in said and "https://[hidden]@host/[hidden]" in said
    failed = json.loads((tmp_path / "run" / "FAILED.json").read_text())
    assert "https://[hidden]@host/[hidden]" in failed["error"]
    assert files_with(tmp_path, MARK) == set()


def test_wandb_starts_without_slurms_login(tmp_path, secrets, monkeypatch):
    """It writes the variables of Slurm down (in most runs: it gathers them beside the run)."""
    seen, start = {}, wandb.init

    def init(**settings):
        seen.update(os.environ)
        return start(**settings | {"mode": "disabled"})

    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setattr(wandb, "init", init)
    place = {"project": "p", "group": None, "tags": [], "config": {}}
    RunLogger(tmp_path, wandb_mode="offline", **place).close()
    assert "SLURM_JWT" not in seen and seen["SLURM_JOB_ID"] == "77"
    assert os.environ["SLURM_JWT"] == SECRETS["SLURM_JWT"]


# ------------------------------------------------------------------- what a configuration says


@pytest.fixture
def secrets(monkeypatch):
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)


WORDS = {
    "logger.group=${oc.env:WANDB_API_KEY}": "logger.group holds the value of the environment's WAN",
    "logger.project='k-${oc.env:HF_TOKEN}'": "logger.project holds the value of",
    "logger.tags=['${oc.env:AWS_SECRET_ACCESS_KEY}']": "logger.tags holds the value of",
    "name=${oc.env:HTTPS_PROXY}": "name holds a URL with a login",
}


@pytest.mark.parametrize("word", WORDS)
def test_a_configuration_that_holds_one_is_refused(secrets, tmp_path, word):
    config = compose(word)  # nothing is resolved yet, and what Hydra writes isn't either
    assert MARK not in OmegaConf.to_yaml(config)
    with pytest.raises(ConfigError) as told:
        make_run(config, tmp_path)
    assert WORDS[word] in str(told.value) and MARK not in str(told.value)


@pytest.mark.parametrize(
    "word",
    [
        f"logger.group={SECRETS['WANDB_API_KEY']}",
        f"task.path=https://me:{MARK}@host/data",
        f"model.path=git+https://{MARK}@host/model",
        f"hydra.job.env_set.MY_TOKEN={MARK}",
        f"+reward.judge.function.api_key={MARK}",
        f"++task.hf_token={MARK}",
    ],
)
def test_a_word_that_holds_one_is_refused_before_hydra_writes_it(secrets, word):
    with pytest.raises(ConfigError) as told:
        check_choices(["seed=1", word])
    assert MARK not in str(told.value) and "read the environment" in str(told.value)


def test_words_that_hold_none_pass(secrets):
    words = ["task.path=https://host/a@b", "++task.pad_token=<pad>", "++task.sort_key=length"]
    words += ["+reward.judge.function.api_key=${oc.env:HF_TOKEN}", "++task.api_key=null"]
    check_choices([*words, "hydra.job.env_set.OMP_NUM_THREADS=1"])


def test_a_key_in_a_file_is_refused_by_its_name(tmp_path):
    config = compose()
    OmegaConf.update(config, "reward.correct.function.api_key", "sk-1", force_add=True)
    with pytest.raises(ConfigError, match=r"reward\.correct\.function\.api_key holds a credential"):
        make_run(config, tmp_path)


def test_an_evaluation_refuses_them_too(secrets, tmp_path):
    config = compose("data=${oc.env:HF_TOKEN}", name="eval")
    with pytest.raises(ConfigError, match="data holds the value of the environment's HF_TOKEN"):
        make_benchmark(config, tmp_path, [])


def test_what_hydra_wrote_from_a_file_is_blanked_out_when_the_run_is_refused(tmp_path):
    written = tmp_path / ".hydra" / "config.yaml"
    written.parent.mkdir()
    written.write_text(f"name: train\ndata: https://me:{MARK}@host/x\n")
    write_failed(tmp_path, ConfigError("data holds a URL with a login"))
    assert written.read_text() == "name: train\ndata: https://[hidden]@host/x\n"


def test_what_a_run_says_holds_none(secrets, capsys):
    say(f"error: GET https://me:{MARK}@host with {SECRETS['HF_TOKEN']}")
    assert capsys.readouterr().out == "error: GET https://[hidden]@host with [hidden]\n"


def test_ordinary_words_are_no_secrets(monkeypatch):
    monkeypatch.setenv("SHORT_KEY", "grpo")
    assert confidential.hidden("grpo https://host/a@b") == "grpo https://host/a@b"
    assert not confidential.is_secret("PATH") and not confidential.is_secret("KEYBOARD")
