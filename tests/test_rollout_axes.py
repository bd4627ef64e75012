"""rollout.py: the axes that need more than one round's rewards, with scripted answers."""

import json
from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest

from grpo_jax.kernels import baseline, combine, filter, kl, scale, truncation
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.types import Filter, Kl
from tests.cases import make_algorithm
from tests.test_rollout import KEY, MIXED, NOW, REFERENCE, RIGHT, collect, collector, texts_of

KEEP = Filter(filter.mixed, "correct", 5, "partial", "keep")


def step(made, number, position):
    made.sampler.load(NOW, number)
    return made.collect(NOW, REFERENCE, number, position, jax.random.fold_in(KEY, number))


# ---------------------------------------------------------------------------------- surplus

# one mixed group, then two: one of the second round's is over
ROUNDS = [[*MIXED, *RIGHT], [*MIXED, "2", "1"], [*RIGHT, "3", "1"]]


def test_surplus_is_dropped_unless_it_is_to_be_kept():
    made = collector(*ROUNDS, filter=replace(KEEP, surplus="drop"))
    data = step(made, 1, 0)
    assert made.waiting() is None
    assert "filter/carried_groups" not in data.metrics
    second = step(made, 2, data.position)
    assert [p.text for p in second.answers.prompts] == ["5:", "7:"]  # 3, which was mixed, is gone


def test_a_kept_surplus_comes_first_at_the_next_step():
    made = collector(*ROUNDS, filter=KEEP)
    first = step(made, 1, 0)
    assert [p.text for p in first.answers.prompts] == ["0:", "2:"]
    assert first.metrics["filter/kept_groups"] == 3
    second = step(made, 2, first.position)
    assert [p.text for p in second.answers.prompts] == ["3:", "5:"]
    assert second.metrics["filter/carried_groups"] == 1
    assert second.metrics["filter/kept_groups"] == 1  # of those sampled in this step
    assert second.metrics["num_tokens_step"] == 8  # tokens of groups that waited cost nothing again
    assert list(second.batch.rollout.version) == [1, 1, 2, 2]


def test_a_group_that_waited_keeps_the_log_probs_of_its_own_policy():
    made = collector(*ROUNDS, filter=KEEP)
    made.sampler.logp = -1.75  # what the sampler said; the trainer's pass says -1
    first = step(made, 1, 0)
    old = step(made, 2, first.position).batch.old_logp
    mask = np.asarray(step(collector(*ROUNDS, filter=KEEP), 1, 0).batch.rollout.mask)
    assert (np.asarray(old)[:2][mask[:2]] == -1.75).all()
    assert (np.asarray(old)[2:] == -1).all()


def test_a_surplus_survives_a_checkpoint():
    made = collector(*ROUNDS, filter=KEEP)
    first = step(made, 1, 0)
    saved = json.loads(json.dumps(made.waiting()))
    expected = step(made, 2, first.position)

    again = collector(ROUNDS[2], filter=KEEP)
    again.restore(saved)
    second = step(again, 2, first.position)
    assert texts_of(second) == texts_of(expected)
    jax.tree.map(np.testing.assert_array_equal, second.batch, expected.batch)
    assert second.answers.numbers == expected.answers.numbers == (3, 5)


def test_a_skipped_step_loses_no_group_where_the_surplus_is_kept():
    rule = Filter(filter.mixed, "correct", 1, "skip", "keep")
    made = collector(*ROUNDS, filter=rule)
    first = step(made, 1, 0)  # one mixed group of two: too few
    assert not first.batch.keep.any()
    second = step(made, 2, first.position)
    assert [p.text for p in second.answers.prompts] == ["0:", "2:"]
    assert second.batch.keep.all()


# ----------------------------------------------------------------------------------- greedy


def test_the_greedy_baseline_has_one_greedy_answer_to_each_prompt():
    made = collector(
        [*MIXED, *RIGHT], ["1", "2"], baseline=baseline.greedy, scale=scale.none, filter=KEEP
    )
    made.algorithm = make_algorithm(baseline=baseline.greedy, scale=scale.none)
    data = collect(made)
    assert made.sampler.temperatures == [1.0, 0.0]
    assert made.sampler.row_ids == [[0, 1, 2, 3], [0, 1]]
    np.testing.assert_array_equal(data.answers.greedy, [1, 0])
    np.testing.assert_array_equal(data.batch.advantage, [0, -1, 1, 1])
    assert data.metrics["num_tokens_step"] == 8 + 4  # greedy answers are sampled too


def test_other_baselines_sample_no_greedy_answers():
    made = collector(MIXED + MIXED)
    assert collect(made).answers.greedy is None
    assert made.sampler.temperatures == [1.0]


# ------------------------------------------------------------------------------- truncation


def test_truncated_answers_stay_in_the_statistics_of_their_group_and_leave_the_loss():
    texts = ["1", "2~", "1~", "2"]
    whole = collect(collector(texts, truncation=truncation.keep))
    masked = collect(collector(texts, truncation=truncation.mask))
    assert whole.batch.keep.tolist() == [True, True, True, True]
    assert masked.batch.keep.tolist() == [True, False, False, True]
    np.testing.assert_array_equal(whole.batch.advantage, masked.batch.advantage)


# ---------------------------------------------------------------------------------- combine

LENGTH = RewardPart("length", lambda completion, answer: -float(len(completion)), weight=10.0)


def test_parts_can_be_normalised_one_by_one():
    texts = ["1", "2222", "1111", "2"]  # the long reward drowns the other
    part = RewardPart("correct", lambda completion, answer: float(completion[0] == "1"))
    whiten = partial(scale.whiten, ddof=0, eps=0.0, hold_tied=True)
    rule = partial(combine.normalize_then_sum, whiten=whiten)
    together = collect(collector(texts, parts=[part, LENGTH]))
    apart = collect(collector(texts, parts=[part, LENGTH], combine=rule))
    np.testing.assert_allclose(together.batch.advantage, [1, -1, -1, 1], atol=1e-6)
    # each part gives +-1 and weighs 1 and 10; whitening divides by their root mean square
    raw = np.array([1 + 10, -1 - 10, 1 - 10, -1 + 10])
    np.testing.assert_allclose(apart.batch.advantage, raw / raw.std(), rtol=1e-5)


def test_shaping_and_a_kl_in_the_reward_are_parts_of_their_own():
    penalty = Kl(kl.k1, 0.1, "reward")  # 0.05 for each token
    made = collector(["1", "1111", "2", "2222"], kl=penalty, scale=scale.none)
    part = RewardPart("correct", lambda completion, answer: float(completion[0] == "1"))
    made.parts = [part]
    reward = np.array([[1 - 0.1, 1 - 0.25], [-0.1, -0.25]])
    expected = (reward - reward.mean(1, keepdims=True)).ravel()
    np.testing.assert_allclose(collect(made).batch.advantage, expected, atol=1e-6)


def test_an_exact_kl_in_the_reward_has_the_whole_distributions():
    made = collector(["1", "2", "1", "1"], kl=Kl(kl.exact, 0.2, "reward"), scale=scale.none)
    data = collect(made)
    assert data.metrics["kl"] == pytest.approx(NOW["logp"] - REFERENCE["logp"])
    np.testing.assert_allclose(data.batch.advantage, [0.5, -0.5, 0, 0], atol=1e-6)
