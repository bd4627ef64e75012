"""What is looked at between a checked configuration and the first step."""

from types import SimpleNamespace

import pytest

from grpo_jax import tokenizer
from grpo_jax.assemble import load_task, load_tokenizer
from grpo_jax.rewards import article, numeric
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.tasks.addition import addition
from grpo_jax.trainer import _data_metrics
from grpo_jax.types import TrainingError
from tests.composed import run_of
from tests.fixtures import characters

TEMPLATE = "{{ messages[0]['content'] }}{% if loud %}{{ loud }}{% endif %}"


def needs_depth(completion: str, answer: str, *, depth: int) -> float:
    return float(depth)


@pytest.fixture
def folder(tmp_path):
    """A tokenizer whose chat template takes an argument."""
    backend = tokenizer.char_tokenizer().backend
    backend.chat_template = TEMPLATE
    backend.save_pretrained(tmp_path)
    return tmp_path


def pretrained(folder, *overrides):
    return run_of("model=pretrained", "warmstart=none", f"model.path={folder}", *overrides).model


def test_chat_arguments_reach_the_template(folder):
    messages = [{"role": "user", "content": "a"}]
    plain = load_tokenizer(pretrained(folder))
    loud = load_tokenizer(pretrained(folder, "+model.chat_arguments.loud=more"))
    assert plain.decode(plain.chat(messages)) == "a"
    assert loud.decode(loud.chat(messages)) == "amore"


def test_an_argument_that_the_template_does_not_know_is_refused(folder):
    settings = pretrained(folder, "+model.chat_arguments.quiet=1")
    with pytest.raises(TrainingError, match=r"the tokenizer of model\.path=.*quiet"):
        load_tokenizer(settings)


def test_a_column_that_the_data_has_not_is_told_before_the_model_loads():
    run = run_of("reward.correct.function._target_=tests.test_assemble.needs_depth")
    with pytest.raises(TrainingError, match="depth"):
        load_task(run, characters())


def test_a_reward_that_cannot_read_the_answers_of_the_task_is_told_at_the_start(capsys):
    def told(function):
        parts = [RewardPart("correct", function)]
        task = addition("xml", 1)
        settings = SimpleNamespace(prompts=1)
        _data_metrics(
            SimpleNamespace(task=task, collector=SimpleNamespace(parts=parts, settings=settings))
        )
        return capsys.readouterr().out

    assert "no more than a wrong one" in told(numeric.boxed)
    assert told(article.correctness) == ""
