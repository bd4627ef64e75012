"""Reward functions of a user: named in the configuration, counted, and told off by name."""

import sys
from pathlib import Path

import numpy as np
import pytest

from grpo_jax.answers import check_columns
from grpo_jax.check import ConfigError
from grpo_jax.config import compose, make_run
from grpo_jax.metrics import outcome_metrics
from grpo_jax.rewards.combine import RewardPart, score
from grpo_jax.tasks.base import Prompt
from grpo_jax.types import TrainingError
from tests.fixtures import certain, make_task, table
from tests.test_evaluate import evaluator
from tests.test_rollout import collect, collector

MODULE = """
from dataclasses import dataclass

def near(completion: str, answer: str, *, level: int, scale: float = 1.0) -> float:
    return scale * level * (completion == answer)

def one(completion):
    return 1.0

@dataclass(frozen=True)
class Many:
    weight: float = 1.0

    def __call__(self, completion, answer):
        return self.batch([completion], [answer])[0]

    def batch(self, completions, answers):
        return [self.weight] * len(completions)
"""
TARGET = "reward.correct.function._target_=my_rewards"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """my_rewards.py in the current directory, which scripts/train.py puts on the path."""
    (tmp_path / "my_rewards.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("my_rewards", None)


def parts_of(*overrides):
    return make_run(compose("reward=plain", *overrides), Path("runs")).reward


def test_a_function_with_constants_columns_and_a_weight(module):
    (part,) = parts_of(
        f"{TARGET}.near", "+reward.correct.function.scale=2.0", "reward.correct.weight=0.5"
    )
    scores = score([part], ["a", "b"], ["a", "a"], {"level": [3, 3], "truncated": [False] * 2})
    assert scores.total.tolist() == [3.0, 0.0] and scores.parts["correct"].tolist() == [6.0, 0.0]


def test_one_more_part_and_a_class(module):
    added = "+reward.near={function: {_target_: my_rewards.near, _partial_: true}, weight: 0.5}"
    assert [(part.name, part.weight) for part in parts_of(added)] == [("correct", 1), ("near", 0.5)]
    many = "+reward.many={function: {_target_: my_rewards.Many, weight: 2.0}}"
    assert score(parts_of(many), ["1"], ["1"]).total.tolist() == [3.0]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("one", r"my_rewards.one can't be called with \(completion, answer\)"),
        ("gone", "my_rewards.gone: not there .*no attribute 'gone'"),
    ],
)
def test_one_that_does_not_fit_is_refused_at_the_start(module, name, text):
    with pytest.raises(ConfigError, match=text):
        parts_of(f"{TARGET}.{name}")


def test_a_column_that_the_data_has_not_is_named_before_training(module):
    (part,) = parts_of(f"{TARGET}.near")
    with pytest.raises(TrainingError, match=r"'correct' \(my_rewards.near\).*'level'"):
        check_columns([part], make_task())
    check_columns([part], make_task(heldout=(Prompt("a:", "1", {"level": 3}),)))
    cut = RewardPart("cut", lambda completion, answer, truncated: 1.0)
    check_columns([cut], make_task())


def broken(completion, answer):
    raise KeyError("broken")


def listy(completion, answer):
    return [1.0]


def test_a_function_that_always_fails_stops_the_run():
    with pytest.raises(TrainingError) as caught:
        collect(collector(["1", "2", "3", "4"], parts=[RewardPart("mine", broken)]), step=3)
    text = "'mine' failed on all 4 answers of step 3; the first: KeyError: 'broken' (row 0: "
    assert text + "completion '1', answer '1')" in str(caught.value)


def test_one_that_fails_now_and_then_is_shown_once(capsys):
    made = collector(["1", "*", "1", "2"], ["1", "*", "1", "2"])
    for step in (1, 2):
        metrics = collect(made, step=step).metrics
        assert metrics["rewards/correct/failed"] == 1
        assert metrics["rewards/correct/wrong"] == 1
        assert metrics["rewards/correct/unscorable"] == 0
    told = capsys.readouterr()
    text = told.out + told.err
    assert text.count("'correct' failed on") == 1
    assert "'correct' failed on 1 of 4 answers of step 1: ValueError: a bad day (row 1: " in text


def test_a_wrong_kind_of_score_stops_the_run_without_a_traceback():
    with pytest.raises(TrainingError, match=r"'mine' must return a number .*listy"):
        collect(collector(["1", "2", "3", "4"], parts=[RewardPart("mine", listy)]))


def test_an_evaluation_counts_its_own_rows_and_no_filling():
    metrics, _ = evaluator(greedy=False)(table(certain(colon="2")), 0)  # 5 prompts, 4 rows at once
    assert metrics["eval/rewards/correct/wrong"] == 10
    assert metrics["eval/rewards/correct/failed"] == 0


def test_three_counters():
    values = {"a": np.float32([1, 0, -1, np.nan, 0, np.nan]), "b": np.float32([2] * 6)}
    lost = {"a": np.array([0, 0, 0, 0, 1, 1], bool)}
    assert outcome_metrics(values, lost) == {
        "rewards/a/wrong": 2,
        "rewards/a/unscorable": 1,
        "rewards/a/failed": 2,
        "rewards/b/wrong": 0,
        "rewards/b/unscorable": 0,
        "rewards/b/failed": 0,
    }
