"""rollout.py: from what a sampler says to the batch that is learned from, with scripted answers."""

from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.answers import RolloutSettings
from grpo_jax.kernels import filter, kl, scale, shaping
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.rollout import Collector
from grpo_jax.types import Filter, Kl
from tests.cases import make_algorithm
from tests.fixtures import (
    CORRECT,
    Scripted,
    characters,
    constant_exact_kl,
    constant_logprobs,
    flat,
    make_task,
)

KEY = jax.random.key(4)
NOW, REFERENCE = {"logp": -1.0}, {"logp": -1.5}
# two groups of two: the first one of a pair of rounds is mixed or not
MIXED, RIGHT, WRONG = ["1", "2"], ["1", "1"], ["2", "3"]


def mixed(max_rounds=5, on_exhausted="partial", on="correct"):
    return Filter(filter.mixed, on, max_rounds, on_exhausted)


def collector(*calls, prompts=2, group_size=2, parts=(CORRECT,), **axes):
    return Collector(
        algorithm=make_algorithm(**axes),
        task=make_task(style=lambda text: "one" if text == "1" else "other"),
        tokenizer=characters(),
        sampler=Scripted(*calls),
        parts=list(parts),
        settings=RolloutSettings(prompts, group_size, 8, 8, 1.0, 1.0, 0),
        logprobs=constant_logprobs,
        exact_kl=constant_exact_kl,
        seed=0,
    )


def collect(made, position=0, step=1):
    made.sampler.load(NOW, step)
    return made.collect(NOW, REFERENCE, step, position, KEY)


def texts_of(data):
    words = characters()
    rollout = data.batch.rollout
    return [words.decode(ids[m]) for ids, m in zip(rollout.completion, rollout.mask, strict=True)]


# -------------------------------------------------------------------------------- one round


def test_one_round_without_a_filter():
    made = collector(MIXED + RIGHT)
    data = collect(made, position=10)
    assert made.sampler.prompts == [["10:", "11:"]]
    assert made.sampler.row_ids == [[0, 1, 2, 3]]
    assert data.position == 12
    batch = data.batch
    np.testing.assert_allclose(batch.advantage, [1, -1, 0, 0], atol=1e-6)
    assert (batch.advantage[2:] == 0).all()  # exactly
    assert batch.group.tolist() == [0, 0, 1, 1] and batch.keep.all()
    np.testing.assert_array_equal(batch.old_logp, np.full((4, 8), -1))
    assert batch.ref_logp is None  # no KL, no reference
    assert texts_of(data) == ["1", "2", "1", "1"] == list(data.answers.texts)
    assert [p.text for p in data.answers.prompts] == ["10:", "11:"]
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batch))


def test_the_next_step_goes_on_where_this_one_ended_with_other_noise():
    made = collector(MIXED + RIGHT)
    first = collect(made)
    made.sampler.load(NOW, 2)
    made.collect(NOW, None, 2, first.position, jax.random.fold_in(KEY, 2))
    assert made.sampler.prompts == [["0:", "1:"], ["2:", "3:"]]
    words = [jax.random.key_data(key).tolist() for key in made.sampler.keys]
    assert words[0] != words[1]


def test_an_answer_without_a_score_leaves_statistics_and_loss():
    data = collect(collector(["1", "x", "2", "1"], prompts=1, group_size=4))
    want = [0.70710678, 0, -1.41421356, 0.70710678]
    np.testing.assert_allclose(data.batch.advantage, want, rtol=1e-5)
    assert data.batch.keep.tolist() == [True, False, True, True]
    assert data.metrics["reward"] == pytest.approx(2 / 3)
    assert data.metrics["rewards/unscorable"] == 1
    assert data.metrics["rewards/correct/unscorable"] == 1
    assert data.metrics["rewards/correct/failed"] == 0


def test_a_group_without_any_score():
    data = collect(collector(["x", "x", "1", "2"]))
    np.testing.assert_allclose(data.batch.advantage, [0, 0, 1, -1], atol=1e-6)
    assert data.batch.keep.tolist() == [False, False, True, True]


def test_a_reward_that_raises_is_counted_by_name():
    data = collect(collector(["1", "*", "1", "2"]))
    assert data.metrics["rewards/correct/failed"] == 1
    assert data.metrics["rewards/correct/unscorable"] == 0
    assert data.batch.keep.tolist() == [True, False, True, True]


def test_parts_are_weighted_and_logged_apart():
    length = RewardPart("length", lambda completion, answer: len(completion), 0.5)
    watched = RewardPart("watched", lambda completion, answer: 7.0, 0.0)
    made = collector(["1", "222", "1", "1"], parts=[CORRECT, length, watched])
    data = collect(made)
    np.testing.assert_array_equal(data.answers.rewards.total, [1.5, 1.5, 1.5, 1.5])
    assert data.metrics["rewards/correct/mean"] == 0.75
    assert data.metrics["rewards/length/mean"] == 1.5
    assert data.metrics["rewards/watched/mean"] == 7


def test_metrics_of_a_step_by_hand():
    metrics = collect(collector(["1", "22", "1", "333~"])).metrics
    want = {
        "reward": 0.5,
        "reward_std": 0.5,
        "reward_group_std": 0.5,
        "frac_reward_zero_std": 0.0,
        "completions/mean_length": 2.5,  # 2, 3, 2 with EOS, and 3 that were cut off
        "completions/clipped_ratio": 0.25,
        "completions/mean_terminated_length": 7 / 3,
        "bias/length_right": 2.0,
        "bias/length_wrong": 3.0,
        "bias/length_right/one": 2.0,
        "style/one": 0.5,
        "num_tokens_step": 10.0,
        "entropy": 2.0,
        "sampling/sampling_logp_difference/max": 0.0,
        "advantage/abs_mean": 1.0,
        "bias/advantage_medium": 1.0,
        "filter/rounds": 1.0,
        "filter/kept_groups": 2.0,
        "filter/kept_fraction": 1.0,
    }
    assert {name: metrics.get(name) for name in want} == pytest.approx(want, abs=1e-6)
    assert "kl" not in metrics  # there is no reference


def test_shaping_comes_after_the_filter_and_before_the_baseline():
    overlong = partial(shaping.overlong, limit=8, buffer_share=0.5, penalty=1.0)
    # 8 tokens cost 1, 6 cost 1/2; the filter sees that all are right, or that they are not
    data = collect(collector(["1", "2222222~", "1", "22222"], shaping=overlong))
    assert data.answers.rewards.total.tolist() == [1, 0, 1, 0]
    spread = [1 + 0.75, 1 + 0.5]
    np.testing.assert_allclose(data.batch.advantage, [1, -1, 1, -1], atol=1e-6)
    raw = collect(
        collector(["1", "2222222~", "1", "22222"], shaping=overlong, scale=scale.none)
    ).batch.advantage
    np.testing.assert_allclose(raw, [s * h for s in spread for h in (0.5, -0.5)], rtol=1e-6)


# ----------------------------------------------------------------------------- dynamic sampling


def test_rounds_go_on_until_there_are_enough_groups_and_the_surplus_goes():
    made = collector(RIGHT + MIXED, WRONG + WRONG, ["1", "3", "4", "1"], filter=mixed())
    data = collect(made, position=6)
    assert made.sampler.prompts == [["6:", "7:"], ["8:", "9:"], ["10:", "11:"]]
    assert data.position == 12  # every prompt that was sampled is consumed
    assert [p.text for p in data.answers.prompts] == ["7:", "10:"]  # "11:" was one too many
    assert texts_of(data) == ["1", "2", "1", "3"]
    assert data.batch.keep.all() and data.batch.group.tolist() == [0, 0, 1, 1]
    np.testing.assert_allclose(data.batch.advantage, [1, -1, 1, -1], atol=1e-6)
    assert len({tuple(jax.random.key_data(key).tolist()) for key in made.sampler.keys}) == 3
    # metrics speak of all that was sampled
    assert data.metrics["reward"] == pytest.approx(5 / 12)
    assert data.metrics["filter/rounds"] == 3
    assert data.metrics["filter/kept_groups"] == 3
    assert data.metrics["filter/kept_fraction"] == 0.5
    assert data.metrics["frac_reward_zero_std"] == 0.5
    assert data.metrics["num_tokens_step"] == 24


def test_counters_add_up_over_rounds():
    made = collector(["x", "x", "*", "1"], ["x", "1", "2", "2"], MIXED + MIXED, filter=mixed())
    metrics = collect(made).metrics
    assert metrics["rewards/correct/unscorable"] == 3
    assert metrics["rewards/correct/failed"] == 1


@pytest.mark.parametrize("max_rounds", [1, 3])
@pytest.mark.parametrize("on_exhausted", ["partial", "skip"])
def test_a_constant_reward_ends_after_exactly_max_rounds(max_rounds, on_exhausted):
    """Case L1: BytedTsinghua-SIA/DAPO#22, #28, verl#953, verl-recipe#82. (0 or less is refused:
    test_refusals.py.)"""
    made = collector(
        MIXED + MIXED,
        parts=[RewardPart("correct", flat)],
        filter=mixed(max_rounds, on_exhausted),
    )
    data = collect(made)
    assert len(made.sampler.prompts) == max_rounds and data.position == 2 * max_rounds
    assert not data.batch.keep.any() and (data.batch.advantage == 0).all()
    assert data.batch.rollout.completion.shape == (4, 8)  # as at any other step
    assert data.metrics["filter/rounds"] == max_rounds
    assert data.metrics["filter/kept_groups"] == 0


def test_exhaustion_may_be_an_error():
    made = collector(RIGHT + MIXED, RIGHT + RIGHT, filter=mixed(3, "error"))
    with pytest.raises(RuntimeError, match="found 1 of 2 groups in 3 rounds at step 9"):
        collect(made, step=9)
    assert len(made.sampler.prompts) == 3


def test_too_few_groups_are_trained_on_or_skipped():
    calls = (RIGHT + WRONG, RIGHT + MIXED)
    data = collect(collector(*calls, filter=mixed(2, "partial")))
    assert [p.text for p in data.answers.prompts] == ["3:", "0:"]  # filled up with a dropped one
    assert data.batch.keep.tolist() == [True, True, False, False]
    np.testing.assert_allclose(data.batch.advantage, [1, -1, 0, 0], atol=1e-6)
    skipped = collect(collector(*calls, filter=mixed(2, "skip")))
    assert not skipped.batch.keep.any() and (skipped.batch.advantage == 0).all()
    assert skipped.metrics["filter/kept_groups"] == 1


def test_groups_that_fill_up_leave_the_statistics_of_the_batch():
    batch_std = partial(scale.batch_std, ddof=0, eps=0.0)
    data = collect(collector(MIXED + WRONG, filter=mixed(1), scale=batch_std))
    np.testing.assert_allclose(data.batch.advantage, [1, -1, 0, 0], atol=1e-6)  # std 1/2, of two


def test_the_filter_sees_the_part_that_it_names():
    bonus = RewardPart("bonus", lambda completion, answer: float(completion == "3"))
    for on, kept in (("correct", ["1:"]), ("bonus", ["0:"]), (None, ["0:", "1:"])):
        data = collect(collector(WRONG + MIXED, parts=[CORRECT, bonus], filter=mixed(1, on=on)))
        keep = data.batch.keep.reshape(2, 2).all(1)
        assert [p.text for p, k in zip(data.answers.prompts, keep, strict=True) if k] == kept
    with pytest.raises(ValueError, match=r"filter\.on='style' names no part.*correct"):
        collect(collector(MIXED + MIXED, filter=mixed(1, on="style")))


# ---------------------------------------------------------------------------------- reference


def test_a_kl_in_the_loss_brings_the_reference_to_the_learner():
    data = collect(collector(MIXED + MIXED, kl=Kl(kl.k3, 0.1, "loss")))
    np.testing.assert_array_equal(data.batch.ref_logp, np.full((4, 8), -1.5))
    np.testing.assert_allclose(data.batch.advantage, [1, -1, 1, -1], atol=1e-6)


def test_a_kl_in_the_reward_moves_advantages():
    penalty = Kl(kl.k1, 0.1, "reward")  # 0.1 * 0.5 for each token, EOS included
    made = collector(["1", "1", "111", "1111~"], kl=penalty, scale=scale.none)
    data = collect(made)
    assert data.batch.ref_logp is None  # the loss has none
    reward = np.array([[1 - 0.1, 1 - 0.1], [-0.2, -0.2]])
    np.testing.assert_allclose(
        data.batch.advantage, (reward - reward.mean(1, keepdims=True)).ravel(), atol=1e-6
    )
    longer = collect(collector(["1", "11", "1", "1"], kl=penalty, scale=scale.none))
    # rewards 1 - 0.1 and 0 - 0.15
    np.testing.assert_allclose(longer.batch.advantage, [0.525, -0.525, 0, 0], atol=1e-6)
    assert longer.metrics["kl"] == pytest.approx(0.5)  # nats a token
    assert longer.metrics["reward"] == 0.75  # before the penalty


def test_without_a_kl_no_reference_is_looked_at():
    made = collector(MIXED + MIXED)
    made.sampler.load(NOW, 1)
    assert made.collect(NOW, None, 1, 0, KEY).batch.ref_logp is None
    unpaid = replace(made, algorithm=make_algorithm(kl=Kl(kl.k3, 0.0, "loss")))
    assert unpaid.collect(NOW, None, 1, 0, KEY).batch.ref_logp is None


def test_the_gap_between_sampler_and_trainer_is_measured():
    made = collector(MIXED + MIXED)
    made.sampler.logp = -1.25
    metrics = collect(made).metrics
    assert metrics["sampling/sampling_logp_difference/mean"] == pytest.approx(0.25)
    batch = collect(made).batch
    assert (batch.rollout.sampler_logp[batch.rollout.mask] == -1.25).all()
    assert jnp.all(batch.old_logp == -1)
