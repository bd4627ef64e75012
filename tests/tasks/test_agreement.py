import json
from pathlib import Path

import pytest

from grpo_jax.rewards import numeric
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.tasks.addition import addition
from grpo_jax.tasks.agreement import mismatch
from grpo_jax.tasks.problems import make_task
from grpo_jax.tasks.prompts import Problem
from tests.composed import run_of

DATA = Path(__file__).parents[1] / "data"
MATH = f"task.heldout_path={DATA}/math500"

CORRECT = (RewardPart("correct", numeric.correct), RewardPart("tags", numeric.tag_count, 0.5))


def task(style, columns=None):
    one = [Problem("a", "1"), Problem("b", "2", columns=columns or {})]
    return make_task("t", one[:1], one[1:], style=style, shots=0, limit=None, dropped={})


@pytest.mark.parametrize("style", ["xml", "r1"])
def test_a_reward_that_reads_the_style(style):
    assert mismatch(task(style), CORRECT) is None


@pytest.mark.parametrize("style", ["boxed", "none"])
def test_a_reward_that_reads_another_form_is_named(style):
    told = mismatch(task(style), CORRECT)
    assert "task 't'" in told and "(correct 0, tags 0)" in told and "\\boxed{2}" in told


def test_points_for_form_alone_dont_hide_it():
    parts = (RewardPart("plain", numeric.plain), RewardPart("tags", numeric.tag_count, 0.5))
    assert "plain 0, tags 0.5" in mismatch(task("xml"), parts)


def test_columns_are_passed_on():
    def reward(completion, answer, extra, truncated):
        return 1.0 if extra == 3 and not truncated and "\n2\n" in completion else 0.0

    parts = (RewardPart("own", reward),)
    assert mismatch(task("xml", {"extra": 3}), parts) is None
    assert mismatch(task("xml", {"extra": 4}), parts) is not None
    assert mismatch(task("xml"), parts) is None  # a column that isn't there: nothing is known


def test_nothing_is_known_where_nothing_can_be_tried():
    assert mismatch(addition(), CORRECT) is None
    assert mismatch(task("xml"), (RewardPart("none", lambda completion, answer: None),)) is None


@pytest.mark.parametrize(
    ("words", "agree"),
    [
        (("task=gsm8k", f"task.path={DATA}/gsm8k"), True),
        (("task=gsm8k", f"task.path={DATA}/gsm8k", "task.style=raw"), False),
        (("task=gsm8k", f"task.path={DATA}/gsm8k", "task.style=raw", "reward=last_number"), True),
        (("task=gsm8k_boxed", f"task.path={DATA}/gsm8k"), True),
        (("task=svamp", f"task.path={DATA}/svamp"), True),
        # the first gold of MATH-500 here is a number, so no worker process is started
        (("task=math", MATH, "task.validate=false"), True),
        (("task=math", MATH, "task.validate=false", "task.style=r1"), False),
        (("task=math", MATH, "task.kind=numeric", "reward=boxed"), True),
        (("task=deepmath",), True),
    ],
    ids=lambda value: (
        "_".join(w for w in value if "/" not in w) if isinstance(value, tuple) else ""
    ),
)
def test_the_files_of_conf_task_pair_style_and_reward(tmp_path, words, agree):
    if words[0] in ("task=math", "task=deepmath"):
        rows = [{"question": f"q{i}", "answer": i, "difficulty": 3} for i in range(30)]
        path = tmp_path / "train.jsonl"
        path.write_text(
            "".join(json.dumps(row | {"final_answer": i}) + "\n" for i, row in enumerate(rows))
        )
        words = (*words, f"task.path={path}")
    run = run_of(*words)
    assert (mismatch(run.task(), run.reward) is None) == agree
