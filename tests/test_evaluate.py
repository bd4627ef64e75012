"""evaluate.py: numbers that can be reckoned from a bigram model's table of logits."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import jax
import numpy as np
import pytest

from grpo_jax.answers import RolloutSettings
from grpo_jax.evaluate import EvalSettings, Evaluator
from grpo_jax.generate import JaxSampler
from grpo_jax.policy import PolicySettings, make_logprobs
from grpo_jax.types import TrainingError
from tests.fixtures import CORRECT, bigram, certain, characters, make_task, snapshot, table

PLAIN = {
    "every": 0,
    "prompts": 5,
    "samples": 2,
    "greedy": True,
    "exact": False,
    "forced_prefix": None,
    "forced_prompts": 3,
    "seed": 1234,
    "allow_chance": False,
}
T = 6
ROLLOUT = RolloutSettings(2, 2, 4, T, 1.0, 1.0, 0)  # four rows: five prompts leave a rest


@cache
def sampler(slots):
    words = characters()
    return JaxSampler(bigram(), slots, words.eos_ids, words.pad_id)


@cache
def logprobs(temperature=1.0):
    return make_logprobs(bigram(), PolicySettings(temperature, 2, 83))


def evaluator(task=None, **settings):
    settings = EvalSettings(**PLAIN | settings)
    words = characters()
    probe = None
    if settings.forced_prefix is not None:
        probe = sampler(4 + len(words.encode(settings.forced_prefix)))
    return Evaluator(
        settings=settings,
        rollout=ROLLOUT,
        task=task or make_task(),
        tokenizer=words,
        sampler=sampler(4),
        probe_sampler=probe,
        parts=[CORRECT],
        logprobs=logprobs(),
    )


def random_params(seed=0, right=0.0):
    """Random logits; `right` is added to those of the right answer and of the end after it."""
    words = characters()
    logits = np.random.default_rng(seed).normal(0, 1, (83, 83))
    (one,), (colon,) = words.encode("1"), words.encode(":")
    logits[colon, one] += right
    logits[one, words.eos_ids[0]] += right
    return table(logits)


def test_a_policy_that_knows_is_always_right():
    metrics, rows = evaluator()(table(certain(colon="1")), 3)
    assert metrics["eval/accuracy"] == metrics["eval/greedy_accuracy"] == 1
    assert metrics["eval/accuracy/ab"] == metrics["eval/accuracy/cde"] == 1
    assert metrics["eval/mixed_groups"] == 0
    assert metrics["eval/completions/mean_length"] == 2  # "1" and EOS
    assert metrics["eval/completions/clipped_ratio"] == 0
    assert metrics["eval/bias/length_right"] == 2 and "eval/bias/length_wrong" not in metrics
    assert [row["prompt"] for row in rows] == ["a:", "b:", "c:", "d:", "e:"]
    assert rows[0] == {
        "prompt": "a:",
        "completion": "1",
        "answer": "1",
        "reward": 1.0,
        "length": 2,
    }


def test_sampled_and_greedy_accuracy_are_two_things():
    # after ":" comes 1 or 2, the latter a little more often
    logits = certain(colon="1")
    words = characters()
    (colon,) = words.encode(":")
    logits[colon, words.encode("2")] = 0.5
    many = make_task(heldout=make_task().heldout * 40)
    metrics, _ = evaluator(many, prompts=200)(table(logits), 0)
    share = 1 / (1 + np.exp(0.5))  # .378
    assert metrics["eval/greedy_accuracy"] == 0
    assert abs(metrics["eval/accuracy"] - share) < 4 * np.sqrt(share * (1 - share) / 400)
    assert abs(metrics["eval/mixed_groups"] - 2 * share * (1 - share)) < 0.14


def test_only_the_first_prompts_and_what_is_asked_for():
    metrics, rows = evaluator(prompts=2, greedy=False)(random_params(), 0)
    assert [row["prompt"] for row in rows] == ["a:", "b:"]
    assert "eval/greedy_accuracy" not in metrics and "exact/probability" not in metrics
    assert "probe/forced_length" not in metrics
    assert not [name for name in metrics if name.startswith("eval/accuracy/")]  # one level only


def test_the_same_parameters_give_the_same_numbers_twice(compiles):
    """Case L12: GaTech-RL2/EgoVerse#644, NeMo-RL#3401."""
    evaluate = evaluator(forced_prefix="?")
    evaluate.sampler = replace(evaluate.sampler, _programs={})
    first = evaluate(random_params(), 1)
    # sampled and greedy, of as many rows for the last prompts as for the first; at most the probe's
    assert len([name for name in compiles if "generate" in name]) <= 3
    compiles.clear()
    evaluate(random_params(1), 2)
    second = evaluate(random_params(), 3)
    assert first == second
    assert [name for name in compiles if "generate" in name] == []
    other, _ = evaluator(seed=1, forced_prefix="?")(random_params(), 1)
    assert other != first[0]


def test_a_score_that_is_missing_is_not_right():
    metrics, _ = evaluator()(table(certain(colon="x")), 0)  # the scorer says None
    assert metrics["eval/accuracy"] == 0 and metrics["eval/greedy_accuracy"] == 0


def test_exact_probability_is_the_product_over_tokens():
    words = characters()
    texts = {"a": "1", "b": "12", "c": "7+7", "d": "1", "e": ""}
    task = make_task(exact_text=lambda prompt: texts[prompt.text[0]])
    params = random_params()
    metrics, _ = evaluator(task, exact=True, prompts=2)(params, 0)
    logits = np.asarray(params["head"]["embedding"]).T.astype(float)
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    exact = {}
    for question, text in texts.items():
        ids = words.encode(":" + text)
        exact[question] = np.exp(sum(logp[a, b] for a, b in pairwise(ids)))
    # over all that is held out, whatever eval.prompts is
    for name, those in (("", "abcde"), ("/ab", "ab"), ("/cde", "cde")):
        mean = np.mean([exact[question] for question in those])
        assert metrics[f"exact/probability{name}"] == pytest.approx(mean, rel=1e-5)


def test_exact_probability_needs_one_right_text():
    with pytest.raises(
        TrainingError, match=r"eval\.exact: task 'stub' has no one right completion"
    ):
        evaluator(exact=True)(random_params(), 0)


def test_length_of_answers_forced_to_begin_in_a_certain_way():
    def length(prefix, **follows):
        metrics, _ = evaluator(forced_prefix=prefix)(table(certain(**follows)), 0)
        return metrics["probe/forced_length"]

    assert length("?") == 2  # "?" and EOS
    assert length("?", mark="?") == T  # up to the budget, of which the prefix is a part
    assert length("7?", mark="a", a="b") == 5  # "7?ab" and EOS


def test_parameters_are_only_read():
    params = random_params()
    before = snapshot(params)
    evaluator(exact=True, task=make_task(exact_text=lambda prompt: "1"))(params, 0)
    jax.tree.map(np.testing.assert_array_equal, snapshot(params), before)
