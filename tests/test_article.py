"""Every number that the article prints about advantages, the clip, the KL and the length bias."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import aggregation, baseline
from grpo_jax.kernels.advantage import advantage
from grpo_jax.kernels.kl import k3
from grpo_jax.loss import policy_loss
from tests.cases import make_algorithm

GRPO = make_algorithm()


def printed(x, expected):
    """To the three decimals of the article."""
    np.testing.assert_array_equal(np.round(np.asarray(x, np.float64), 3), expected)


def group_advantages(rewards):
    reward = jnp.array([rewards], jnp.float32)
    return advantage(GRPO.baseline, GRPO.scale, reward, jnp.ones_like(reward, int))[0]


def test_section_2_2_a_group_of_six():
    six = jnp.array([[1.0, 0, 1, 1, 0, 1]])
    centred = six - baseline.group_mean(six, jnp.ones((1, 6), int))
    printed(centred[0], [0.333, -0.667, 0.333, 0.333, -0.667, 0.333])
    assert round(float(centred.sum()), 6) == 0
    advantages = group_advantages([1, 0, 1, 1, 0, 1])
    printed(advantages, [0.707, -1.414, 0.707, 0.707, -1.414, 0.707])


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([1, 1, 1, 1], [0, 0, 0, 0]),
        ([0, 0, 0, 0], [0, 0, 0, 0]),
        ([1, 0, 1, 0], [1, -1, 1, -1]),
    ],
)
def test_section_2_2_all_same_and_split_groups(rewards, expected):
    printed(group_advantages(rewards), expected)


@pytest.mark.parametrize(("rho", "surrogate"), [(1.1, 1.10), (1.5, 1.20)])
def test_section_2_3_the_clipped_surrogate(rho, surrogate):
    mask = jnp.ones((1, 1), bool)
    log_ratio = jnp.full((1, 1), np.log(rho))
    objective, _ = GRPO.clip(log_ratio, jnp.ones((1, 1)), log_ratio, mask)
    assert round(float(objective[0, 0]), 2) == surrogate


def test_section_2_4_the_kl_leash():
    def at(logp, ref):
        return round(float(k3(jnp.full((1, 1), logp), jnp.full((1, 1), ref))[0, 0]), 4)

    assert at(-1.0, -1.0) == 0.0
    assert at(-1.0, -1.5) == 0.1065


def push(rule, length, budget=200):
    """d objective / d logp of one token of an answer of `length` tokens with advantage 0.5."""
    mask = jnp.arange(budget) < jnp.full((1, 1), length)
    logp = jnp.full((1, budget), -1.0)
    weight = rule(mask, jnp.zeros(1, int))

    def objective(x):
        fixed = {"old_logp": logp, "sampler_logp": logp, "ref_logp": None}
        loss, _ = policy_loss(
            GRPO, x, advantage=jnp.array([0.5]), mask=mask, weight=weight, **fixed
        )
        return -loss

    return float(jax.grad(objective)(logp)[0, 0])


def test_section_4_the_length_bias():
    assert round(push(aggregation.sequence_mean, 20), 4) == 0.0250
    assert round(push(aggregation.sequence_mean, 200), 4) == 0.0025


def test_section_4_dropping_the_division_levels_the_two_bars():
    def level(mask, group):
        return aggregation.constant(mask, group, length=200)

    assert push(level, 20) == push(level, 200) == pytest.approx(0.0025)


def test_section_4_dropping_the_spread_changes_no_sign():
    reward = jnp.array([[1.0, 0, 1, 1, 0, 1]])
    centred = reward - baseline.group_mean(reward, jnp.ones((1, 6), int))
    np.testing.assert_array_equal(jnp.sign(centred[0]), jnp.sign(group_advantages(reward[0])))
