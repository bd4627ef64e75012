"""`scripts/eval.py`: what is refused, what a run brings along, and an evaluation from a checkpoint
to its files, killed and resumed."""

import json
import os
import runpy
import subprocess
import sys
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from omegaconf import OmegaConf

from grpo_jax import benchmark_run, checkpoint
from grpo_jax.benchmark.sampling import Bench
from grpo_jax.benchmark_config import make_benchmark
from grpo_jax.benchmark_run import evaluate
from grpo_jax.check import ConfigError
from grpo_jax.config import compose, resolved
from grpo_jax.models import llama
from grpo_jax.models.config import LlamaConfig
from grpo_jax.types import TrainingError, TrainState
from tests.composed import composed
from tests.fixtures import bigram, characters, table

pytestmark = pytest.mark.core

SCRIPT = Path(__file__).parent.parent / "scripts" / "eval.py"
SHAPE = {"vocab_size": 83, "hidden_size": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
SHAPE |= {"head_dim": 8, "intermediate_size": 16}


@cache
def defaults():
    return compose(name="eval")


def benchmark(folder, *overrides):
    """As on the command line, but for groups, without composing anew."""
    config = deepcopy(defaults())
    for word in overrides:
        key, _, value = word.partition("=")
        OmegaConf.update(config, key, OmegaConf.create(f"x: {value}").x)
    return make_benchmark(config, folder, overrides)


@cache
def run_config():
    """Of a run: a small model, the stub task, and digits as its reward."""
    values = deepcopy(resolved(composed()))
    values["model"] |= {"shape": values["model"]["shape"] | SHAPE, "path": None}
    values["task"] = {"_target_": "tests.fixtures.finite_task"}
    function = {"_target_": "tests.fixtures.digits", "_partial_": True}
    values["reward"] = {"correct": {"function": function, "weight": 1.0}}
    values["rollout"] |= {"max_completion_length": 5, "temperature": 0.9}
    values["warmstart"]["steps"] = 0
    values["logger"] |= {"progress": False}
    return values


@pytest.fixture
def run(tmp_path):
    """A run folder whose checkpoints are but names."""
    folder = tmp_path / "run"
    for name in ("2", "10", "12.orbax-checkpoint-tmp"):
        (folder / "checkpoints" / name).mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(run_config()))
    return folder


# ---------------------------------------------------------------------------------- what is asked


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["sets=[gsm9k]"], "unknown set 'gsm9k'; there are aime24"),
        (["sets=[]"], "at least one"),
        (["sets=[gsm8k,gsm8k]"], "none twice"),
        (["samples=4", "pass_k=[2,8]"], "pass_k=8: from 1 to samples=4"),
        (["samples=0", "greedy=false"], "nothing is asked"),
        (["samples=-1"], "samples=-1"),
        (["batch_rows=0", "limit=0"], "batch_rows=0: at least 1"),
        (["samples=many"], "samples='many' should be a whole number"),
        (["model.path=nowhere"], "model.path=nowhere: no such file or folder"),
        (["model.path=null"], "no policy to evaluate"),
        (["model.path=.", "seed=-1"], "seed=-1"),
        (["model.path=.", "rollout.temperature=-1"], "rollout.temperature=-1"),
        (["model.path=.", "style=raw", "shots=0"], "needs shots >= 1"),
        (["style=xlm"], "style='xlm': one of xml"),
        (["data=nowhere"], "data=nowhere: no such folder"),
        (["step=3"], "step=3 is a run's"),
        (["run=nowhere"], "run=nowhere: no such folder"),
        (["run=."], "no run folder"),
        (["run=RUN", "model.path=."], "model.path beside run="),
        (["run=RUN", "step=3"], "has no such checkpoint, but 2, 10"),
        (["optim.lr=3"], "optim.lr: an evaluation has no use for it"),
        (["rollout.group_size=3"], "an evaluation has samples= for it"),
    ],
)
def test_mistakes_are_refused_before_anything_loads(overrides, text, run, monkeypatch):
    monkeypatch.setattr(benchmark_run, "load_tokenizer", None)
    with pytest.raises(ConfigError) as error:
        benchmark(run.parent, *(word.replace("RUN", str(run)) for word in overrides))
    assert text in str(error.value)


def test_a_pretrained_model_and_named_sets(tmp_path):
    made = benchmark(tmp_path, "model.path=.", "sets=[gsm8k,svamp]", "style=xml", "samples=6")
    assert list(made.sets) == ["gsm8k", "svamp"] and made.step is None
    assert made.settings.pass_k == (1, 2, 4, 6)
    # the reward that reads what the style asks for, where nobody chose another
    assert [part.name for part in made.reward] == ["correct", "tag_count"]
    other = benchmark(tmp_path, "model.path=.", "style=raw")
    assert [part.function.func.__name__ for part in other.reward] == ["last_number"]
    assert other.config["shots"] == 1
    kept = benchmark(tmp_path, "model.path=.", "style=raw", "reward.correct.weight=2")
    assert kept.reward[0].weight == 2


def test_a_task_brings_its_model_its_reward_and_its_lengths(tmp_path):
    words = ["task=chain", "sets=[task]"]
    made = make_benchmark(compose(*words, name="eval"), tmp_path, words)
    assert made.policy.warmstart.steps > 0 and made.policy.model.path is None
    assert made.settings.max_completion_length == 48
    assert made.reward[0].function.func.__module__ == "grpo_jax.rewards.chain"
    words = [*words, "model=pretrained", "model.path=."]  # which has no warm start
    made = make_benchmark(compose(*words, name="eval"), tmp_path, words)
    assert made.policy.warmstart.steps == 0 and made.policy.model.path == "."
    with pytest.raises(ConfigError, match="experiment: an evaluation has no use for it"):
        make_benchmark(defaults(), tmp_path, ["experiment=smollm2_addition"])


def test_a_run_brings_what_nobody_said(run, tmp_path):
    own = benchmark(tmp_path, f"run={run}", "sets=[task]")
    assert own.step == 10 and own.policy.folder == run
    assert own.reward[0].function.func.__name__ == "digits"
    assert own.sets["task"]().name == "stub"
    assert (own.settings.max_completion_length, own.settings.temperature) == (5, 0.9)
    said = benchmark(tmp_path, f"run={run}", "step=2", "rollout.temperature=0.5", "seed=3")
    assert said.step == 2 and said.settings.seed == 3
    assert (said.settings.max_completion_length, said.settings.temperature) == (5, 0.5)
    assert said.policy.rollout.temperature == 0.9  # the policy stays what it was
    styled = run_config() | {"task": run_config()["task"] | {"style": "raw", "shots": 2}}
    (run / "config.json").write_text(json.dumps(styled))
    with pytest.raises(ConfigError, match=r"task\.s"):  # the stub has neither
        benchmark(tmp_path, f"run={run}")


def test_the_script_ends_on_one_screen(tmp_path, monkeypatch, capsys):
    quiet = ["hydra/job_logging=none", "hydra/hydra_logging=none", f"hydra.run.dir={tmp_path}/out"]
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "sets=[gsm9k]", "batch_rows=0", *quiet])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(SCRIPT), run_name="__main__")
    text = capsys.readouterr().err
    assert end.value.code == 2 and len(text.splitlines()) == 2
    assert "unknown set 'gsm9k'" in text and "batch_rows=0" in text
    assert "gsm9k" in json.loads((tmp_path / "out" / "FAILED.json").read_text())["error"]
    assert "sets=[gsm9k]" in (tmp_path / "out" / ".hydra" / "overrides.yaml").read_text()


# ------------------------------------------------------------------------------ what is answered


def test_from_a_checkpoint_to_the_files(tmp_path, capsys):
    config = LlamaConfig(**SHAPE, tie_embeddings=True)
    shapes = jax.eval_shape(llama.build(config).init, jax.random.key(0))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(0, 0.3, leaf.shape), "f4"), shapes)
    state = TrainState(params, {"count": jnp.int32(0)}, jnp.int32(3), jax.random.key(0))
    folder = tmp_path / "run"
    with checkpoint.open(folder / "checkpoints", keep=1) as manager:
        checkpoint.save(manager, 3, state, {}, checkpoint.describe(config, None))
    (folder / "config.json").write_text(json.dumps(run_config()))

    words = [f"run={folder}", "sets=[task]", "samples=4", "greedy=false", "batch_rows=64"]
    made = benchmark(tmp_path / "out", *words)
    result = evaluate(made)
    told = capsys.readouterr().out
    assert sorted(path.name for path in made.folder.iterdir()) == [
        *("answers.jsonl", "config.json", "eval.json", "report.md")
    ]
    assert result == json.loads((made.folder / "eval.json").read_text())
    assert result["policy"]["step"] == 3 and "jax" in result["versions"]
    one = result["sets"]["task"]
    assert (one["problems"], one["answers"]) == (5, 20) and list(one["levels"]) == ["ab", "cde"]
    rows = [json.loads(line) for line in (made.folder / "answers.jsonl").read_text().splitlines()]
    assert len(rows) == 20 and one["tokens"] == sum(row["length"] for row in rows)
    share = sum(row["correct"] for row in rows) / 20
    assert one["metrics"]["mean@4"]["value"] == pytest.approx(share) and 0 < share < 1
    assert one["metrics"]["pass@4"]["value"] > share
    assert f"| {one['metrics']['mean@4']['value']:.3f} [" in told
    assert repr(rows[0]["completion"]) in told

    # complete: nothing is loaded again, whatever the batches' size; other answers go elsewhere
    again = benchmark(made.folder, *words[:-1], "batch_rows=2")
    assert evaluate(replace(again, policy=None)) == result
    assert "complete already" in capsys.readouterr().out
    with pytest.raises(TrainingError, match="seed: 0 there, 7 now"):
        evaluate(benchmark(made.folder, *words, "seed=7"))


def test_a_killed_evaluation_goes_on(run, tmp_path, monkeypatch):
    samplers = {}

    def policy(benchmark, words):
        return None, bigram(), table(jax.random.normal(jax.random.key(0), (83, 83)))

    monkeypatch.setattr(benchmark_run, "_policy", policy)
    monkeypatch.setattr(
        benchmark_run, "Bench", lambda *fields: replace(Bench(*fields), _samplers=samplers)
    )
    words = [f"run={run}", "sets=[task]", "samples=2", "greedy=false", "batch_rows=2"]
    whole = evaluate(benchmark(tmp_path / "whole", *words))

    timed = benchmark_run._timed

    def killed(batches, bar):
        for number, batch in enumerate(timed(batches, bar)):
            if number == 2:
                raise KeyboardInterrupt
            yield batch

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(benchmark_run, "_timed", killed)
        evaluate(benchmark(tmp_path / "killed", *words))
    file = tmp_path / "killed" / "batches.jsonl"
    lines = file.read_text().splitlines()
    assert len(lines) == 2
    # of a third problem, one of two samples is there; and a line was cut short
    half = json.loads(lines[1])
    half["rows"] = [half["rows"][0] | {"problem": 4}]
    file.write_text("\n".join([*lines, json.dumps(half), lines[0][:40]]))

    asked = []
    monkeypatch.setattr(
        benchmark_run, "_timed", lambda batches, bar: map(_noted(asked), timed(batches, bar))
    )
    resumed = evaluate(benchmark(tmp_path / "killed", *words))
    assert len(asked) == 3
    for result in (whole, resumed):
        del result["sets"]["task"]["seconds"]
    assert resumed == whole
    answers = [(tmp_path / name / "answers.jsonl").read_text() for name in ("whole", "killed")]
    assert answers[0] == answers[1]


def _noted(seen):
    def note(batch):
        seen.append(batch)
        return batch

    return note


def test_problems_that_are_too_long_are_counted(run, tmp_path):
    made = benchmark(tmp_path, f"run={run}", "sets=[task]", "max_prompt_length=2")
    with pytest.raises(TrainingError, match="0 problems are left"):
        benchmark_run._held(made, "task", characters())
    made = benchmark(tmp_path, f"run={run}", "sets=[task]", "max_prompt_length=3", "limit=2")
    task = benchmark_run._held(made, "task", characters())
    assert len(task.heldout) == 2 and task.dropped["heldout_too_long"] == 0


@pytest.mark.slow
def test_the_script_evaluates_a_run(tmp_path):
    """Train adapters of the tiny model for a step, and evaluate them beside their base."""
    common = {"cwd": tmp_path, "env": os.environ | {"GRPO_JAX_CACHE": str(tmp_path / "cache")}}
    train = SCRIPT.with_name("train.py")
    small = [
        "train.steps=1",
        "lora=all_linear",
        "warmstart=none",
        "eval.allow_chance=true",
        "eval.prompts=8",
    ]
    small += ["logger.wandb=disabled", f"hydra.run.dir={tmp_path}/run"]
    subprocess.run([sys.executable, str(train), *small], check=True, **common)
    command = [sys.executable, str(SCRIPT), f"run={tmp_path}/run", "sets=[task]", "limit=9"]
    command += ["samples=4", "batch_rows=16", f"hydra.run.dir={tmp_path}/out"]
    for told in ("| task ", "complete already"):
        text = subprocess.run(command, check=True, capture_output=True, text=True, **common).stdout
        assert told in text
    result = json.loads((tmp_path / "out" / "eval.json").read_text())
    assert result["sets"]["task"]["problems"] == 9 and result["policy"]["step"] == 1
