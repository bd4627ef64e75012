"""A run folder and the configuration it belongs to."""

import json

import pytest

from grpo_jax.folder import claim, flat
from grpo_jax.types import TrainingError

CONFIG = {"seed": 0, "name": "a", "train": {"steps": 3, "epochs": 1}, "logger": {"tags": []}}


def changed(**values):
    return json.loads(json.dumps(CONFIG)) | values


def test_the_same_configuration_comes_back(tmp_path):
    claim(tmp_path / "run", CONFIG)
    claim(tmp_path / "run", CONFIG)
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == CONFIG


@pytest.mark.parametrize(
    "other",
    [
        changed(name="b"),
        changed(train={"steps": 9, "epochs": 1}),
        changed(logger={"tags": ["x"], "wandb": "disabled"}),
    ],
)
def test_where_it_writes_and_how_long_it_runs_may_change(tmp_path, other):
    claim(tmp_path, CONFIG)
    claim(tmp_path, other)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (changed(seed=1), "seed: 0 there, 1 now"),
        (changed(train={"steps": 3, "epochs": 2}), "train.epochs: 1 there, 2 now"),
        (changed(clip={"low": 0.2}), "clip.low: None there, 0.2 now"),
    ],
)
def test_what_differs_is_named(tmp_path, other, named):
    claim(tmp_path, CONFIG)
    with pytest.raises(TrainingError, match="another configuration") as error:
        claim(tmp_path, other)
    assert named in str(error.value)
    assert json.loads((tmp_path / "config.json").read_text()) == CONFIG  # and nothing is lost


def test_flat():
    assert flat({"a": {"b": 1, "c": [1, 2]}, "d": None}) == {"a.b": 1, "a.c": [1, 2], "d": None}
