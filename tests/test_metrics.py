"""metrics.py: each number against one reckoned by hand."""

import numpy as np
import pytest

from grpo_jax.metrics import (
    correction_metrics,
    gap_metrics,
    known_only,
    length_metrics,
    reward_metrics,
    tied,
    weight_metrics,
)

NAN = float("nan")


def test_rewards():
    total = np.array([[1, 0, 1, 0], [1, 1, 1, NAN], [NAN, NAN, NAN, NAN]], np.float32)
    part = np.array([[2, 0, NAN, NAN], [2, 2, 2, 2], [2, 2, 2, 2]], np.float32)
    got = reward_metrics(total, {"correct": part, "never": np.full((3, 4), NAN)})
    assert got == pytest.approx(
        {
            "reward": 5 / 7,  # of the seven rows that have one
            "reward_std": np.sqrt(5 / 7 * 2 / 7),
            "reward_group_std": (0.5 + 0.0) / 2,  # the third group has none
            "frac_reward_zero_std": 2 / 3,
            "rewards/unscorable": 5.0,
            "rewards/correct/mean": 1.8,
            "rewards/correct/std": 0.6,
        }
    )


def test_the_spread_over_all_rewards_is_not_that_within_groups():
    got = reward_metrics(np.array([[1.0, 1.0], [0.0, 0.0]]), {})
    assert got["reward_std"] == 0.5 and got["reward_group_std"] == 0.0
    assert got["frac_reward_zero_std"] == 1.0


def test_nothing_scorable_leaves_counts_only():
    got = reward_metrics(np.full((1, 2), NAN), {})
    assert got == {"frac_reward_zero_std": 1.0, "rewards/unscorable": 2.0}


def test_tied_groups():
    total = np.array([[0.7, 0.7], [0.7, 0.7 + 5e-7], [0.7, 0.71], [0.7, NAN], [NAN, NAN]])
    assert tied(total).tolist() == [True, True, False, True, True]


def test_lengths():
    lengths = np.array([4, 10, 2, 8])
    truncated = np.array([False, True, False, False])
    correct = np.array([True, False, False, False])
    got = length_metrics(lengths, truncated, correct, ["a", "a", "b", "a"])
    assert got == pytest.approx(
        {
            "completions/mean_length": 6.0,
            "completions/min_length": 2.0,
            "completions/max_length": 10.0,
            "completions/clipped_ratio": 0.25,
            "completions/mean_terminated_length": 14 / 3,
            "bias/length_right": 4.0,
            "bias/length_right/a": 4.0,
            "bias/length_wrong": 20 / 3,
            "bias/length_wrong/a": 9.0,
            "bias/length_wrong/b": 2.0,
            "style/a": 0.75,
            "style/b": 0.25,
        }
    )


def test_lengths_without_a_notion_of_right_or_style():
    got = length_metrics(np.array([3, 5]), np.array([True, True]), None, None)
    assert got == {
        "completions/mean_length": 4.0,
        "completions/min_length": 3.0,
        "completions/max_length": 5.0,
        "completions/clipped_ratio": 1.0,
    }


def test_weight_of_long_and_short_answers():
    # sequence mean over four rows of 1, 2, 4 and 8 tokens: weight 1 / (4 n)
    mask = np.arange(8) < np.array([1, 2, 4, 8])[:, None]
    weight = mask / (4 * mask.sum(-1, keepdims=True))
    advantage = np.array([1.0, -1.0, 0.5, 0.5])
    got = weight_metrics(weight, advantage, None)
    assert got == pytest.approx({"bias/token_weight_long": 1 / 8, "advantage/abs_mean": 0.75})
    assert weight_metrics(mask / 15, advantage, None)["bias/token_weight_long"] == pytest.approx(1)


def test_rows_without_weight_are_left_out():
    weight = np.array([[0.5, 0.5], [0, 0]])
    assert weight_metrics(weight, np.array([2.0, 9.0]), None) == {"advantage/abs_mean": 2.0}
    assert weight_metrics(np.zeros((4, 2)), np.ones(4), None) == {}


def test_advantages_by_difficulty():
    # two rows a group; tied groups (pass rate 0 and 1) have no say
    pass_rate = np.array([0.0, 0.125, 0.25, 0.5, 0.9, 1.0])
    advantage = np.array([9, 9, 2, -2, 4, -4, 1, -1, 3, -3, 9, 9.0])
    got = weight_metrics(np.zeros((12, 1)), advantage, pass_rate)
    assert got == {
        "bias/advantage_hard": 3.0,
        "bias/advantage_medium": 1.0,
        "bias/advantage_easy": 3.0,
    }


def test_gap_and_entropy_are_of_unmasked_tokens():
    mask = np.array([[True, True, False]])
    old, own = np.array([[-1.0, -2.0, 5.0]]), np.array([[-1.5, -1.9, NAN]])
    got = gap_metrics(old, own, np.array([[1.0, 3.0, 99.0]]), mask)
    assert got == pytest.approx(
        {
            "sampling/sampling_logp_difference/mean": 0.3,
            "sampling/sampling_logp_difference/max": 0.5,
            "entropy": 2.0,
        }
    )
    assert gap_metrics(old, own, old, np.zeros((1, 3), bool)) == {}


def test_the_weights_of_a_correction_and_how_many_it_holds_back():
    mask = np.array([[True, True, False], [True, True, True]])
    old = np.log([[0.5, 0.5, 9.0], [0.5, 0.4, 0.2]])
    sampler = np.array([[0.5, 0.125, NAN], [1.0, 0.4, NAN]])  # ratios 1, 4 | 1/2, 1, unknown: 1
    weight = np.array([[1, 2, 1], [0.5, 1, 1]])  # held at 2
    got = correction_metrics(weight, old, np.log(sampler), mask)
    ratio = "sampling/importance_sampling_ratio"
    assert got == pytest.approx(
        {
            f"{ratio}/min": 0.5,
            f"{ratio}/mean": 1.1,
            f"{ratio}/max": 2.0,
            "sampling/effective_sample_size": 7.5**2 / (1 + 16 + 0.25 + 1 + 1) / 5,
            "sampling/corrected_fraction": 0.2,
        }
    )
    rows = np.array([[4, 4, 1], [0.5, 0.5, 0.5]])  # products of each row: none is held back
    assert correction_metrics(rows, old, np.log(sampler), mask)["sampling/corrected_fraction"] == 0
    assert correction_metrics(weight, old, sampler, np.zeros((2, 3), bool)) == {}


def test_only_what_is_known_is_kept():
    assert known_only({"a": 1.0, "b": NAN, "c": float("inf")}) == {"a": 1.0, "c": float("inf")}
