"""Whole runs on a mesh, and a run that changes its mesh half way; mistakes in `mesh`."""

from pathlib import Path

import jax
import numpy as np
import pytest

from grpo_jax import trainer
from grpo_jax.check import ConfigError
from grpo_jax.config import compose, make_run, make_runs
from grpo_jax.logging import read_rows
from grpo_jax.types import TrainingError
from tests.test_trainer import make, rows

pytestmark = pytest.mark.skipif(len(jax.devices()) < 8, reason="XLA_FLAGS says fewer than 8")
# Dynamic sampling with groups that wait, adapters, a KL to a reference: all that lies somewhere.
MUCH = (
    *("algorithm=dapo", "filter.on=null", "filter.surplus=keep", "kl=k3", "kl.coef=0.1"),
    *("lora=all_linear", "lora.rank=2", "rollout.length_buckets=2", "rollout.slots=4"),
)


def same(got: list[dict], want: list[dict]) -> None:
    assert [row.keys() for row in got] == [row.keys() for row in want]
    for a, b in zip(got, want, strict=True):
        for name, value in b.items():
            np.testing.assert_allclose(a[name], value, rtol=1e-4, atol=1e-5, err_msg=name)


@pytest.mark.core
@pytest.mark.parametrize(
    ("overrides", "first", "then"),
    [
        ((), "mesh=fsdp mesh.data=2 mesh.fsdp=2", "mesh=one"),
        pytest.param(
            MUCH, "mesh=data mesh.data=2", "mesh=fsdp mesh.fsdp=4", marks=pytest.mark.slow
        ),
    ],
    ids=["plain", "much"],
)
def test_a_run_is_the_same_on_any_mesh_and_goes_on_under_another(tmp_path, overrides, first, then):
    overrides = "optim.schedule=constant", *overrides
    trainer.train(make(tmp_path / "one", *overrides))
    trainer.train(make(tmp_path / "cut", "train.steps=2", *overrides, *first.split()))
    trainer.train(make(tmp_path / "cut", *overrides, *then.split()))
    same(rows(tmp_path / "cut"), rows(tmp_path / "one"))
    texts = [read_rows(tmp_path / name / "completions.jsonl") for name in ("cut", "one")]
    assert texts[0] == texts[1] and len(texts[0]) > 8


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("mesh.data=0", "mesh.data=0: at least 1, or -1"),
        ("mesh.fsdp=-2", "mesh.fsdp=-2: at least 1, or -1"),
        ("mesh.data=-1 mesh.fsdp=-1", "only one of data, fsdp and tensor can be -1"),
        (
            "mesh.data=7",
            "7 devices along data x fsdp can't share out prompts x group / minibatches",
        ),
        ("mesh.tensor=3", "3 devices along tensor can't share out num_kv_heads"),
        ("mesh.tensor=2 model.attention=splash", "model.attention=splash can't have"),
        ("mesh=date", "mesh=date"),
        ("+mesh.devices=2", "unknown key mesh.devices"),
    ],
)
def test_mistakes_are_refused_before_anything_loads(overrides, message):
    with pytest.raises(ConfigError) as caught:
        make_run(compose(*overrides.split()), Path("runs/test"))
    assert message in str(caught.value)


def test_seeds_side_by_side_have_no_mesh():
    with pytest.raises(ConfigError, match="a mesh is for one run"):
        make_runs(compose("mesh=data", "seeds_per_job=2"), Path("runs/test"))


def test_more_devices_than_there_are(tmp_path):
    with pytest.raises(TrainingError, match="8 devices that there are"):
        trainer.train(make(tmp_path / "run", "mesh.data=16", "rollout.prompts=16"))
