"""Baseline and scale together (public cases K1, K2, K4, K5)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import baseline, scale
from grpo_jax.kernels.advantage import advantage

NAN = jnp.nan
GROUP_BASELINES = [baseline.group_mean, baseline.leave_one_out, baseline.length_weighted]


def grpo(reward, ddof=0, eps=1e-8, rule=baseline.group_mean):
    reward = jnp.asarray(reward, jnp.float32)
    length = jnp.arange(1, reward.size + 1).reshape(reward.shape)
    return advantage(rule, partial(scale.group_std, ddof=ddof, eps=eps), reward, length)


@pytest.mark.parametrize(
    ("ddof", "eps", "right", "wrong"),
    [
        (0, 1e-8, 0.70710678, -1.41421356),
        (1, 0.0, 0.64549722, -1.29099445),
        (1, 1e-4, 0.64537225, -1.29074450),  # TRL
    ],
)
def test_k1_the_definition_of_std_is_a_value(ddof, eps, right, wrong):
    expected = [[right, wrong, right, right, wrong, right]]
    np.testing.assert_allclose(grpo([[1, 0, 1, 1, 0, 1]], ddof, eps), expected, rtol=1e-6)


def test_k1_two_answers():
    np.testing.assert_allclose(grpo([[1, 0]], 0, 1e-8), [[1, -1]], rtol=1e-6)
    np.testing.assert_allclose(grpo([[1, 0]], 1, 1e-8), [[0.70710678, -0.70710678]], rtol=1e-6)
    np.testing.assert_allclose(grpo([[1, 0]], 1, 1e-4), [[0.7070068, -0.7070068]], rtol=1e-6)


@pytest.mark.parametrize("rule", GROUP_BASELINES)
@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [0.0, 1e-8, 1e-4])
def test_k2_equal_rewards_teach_exactly_nothing(rule, ddof, eps):
    adv = grpo([[value] * 8 for value in (1.0, 0.0, 2.5, 0.7, 0.3, 1 / 3)], ddof, eps, rule)
    np.testing.assert_array_equal(adv, 0)


def test_k2_the_plain_formula_would_not_pass():
    reward = jnp.full(8, 0.7, jnp.float32)
    plain = (reward - reward.mean()) / (reward.std() + 1e-8)
    assert abs(plain[0]) > 0.5


@pytest.mark.parametrize("rule", GROUP_BASELINES)
@pytest.mark.parametrize("divide", ["none", "batch_std", "group_mean", "whiten"])
def test_a_dead_group_beside_a_live_one_is_exactly_zero_under_every_scale(rule, divide):
    constants = {"ddof": 0, "eps": 1e-8} if divide in ("batch_std", "whiten") else {}
    divide = partial(getattr(scale, divide), **constants)
    reward = jnp.array([[0.7] * 8, [1.0, 0.2, 0.7, 0.7, 0.1, 0.0, 0.3, 0.9]], jnp.float32)
    adv = advantage(rule, divide, reward, jnp.arange(16).reshape(2, 8))
    np.testing.assert_array_equal(adv[0], 0)
    assert jnp.abs(adv[1]).max() > 0.1


def test_k4_groups_are_the_rows_of_the_matrix():
    prompt, reward = np.array(["a", "b", "a", "b"]), np.array([1.0, 1.0, 0.0, 1.0])
    order = np.argsort(prompt, kind="stable")
    adv = np.empty(4)
    adv[order] = grpo(reward[order].reshape(2, 2)).reshape(-1)
    np.testing.assert_allclose(adv, [1, 0, -1, 0], rtol=1e-6)


def test_k5_an_unscorable_answer_leaves_its_group():
    adv = grpo([[1, NAN, 0, 1], [NAN] * 4])
    np.testing.assert_allclose(adv[0], [0.70710678, 0, -1.41421356, 0.70710678], rtol=1e-6)
    np.testing.assert_array_equal(adv[1], 0)


def test_a_group_of_one_has_no_advantage():
    for rule in GROUP_BASELINES:
        for ddof in (0, 1):
            np.testing.assert_array_equal(grpo([[1.0]], ddof, 1e-8, rule), 0)


def test_permuting_answers_and_prompts_permutes_advantages():
    rng = np.random.default_rng(0)
    reward, length = rng.normal(size=(5, 6)).astype(np.float32), rng.integers(1, 9, (5, 6))
    rows, columns = rng.permutation(5), rng.permutation(6)
    for rule in GROUP_BASELINES:
        f = partial(advantage, rule, partial(scale.group_std, ddof=1, eps=1e-6))
        whole = np.asarray(f(jnp.asarray(reward), jnp.asarray(length)))
        moved = [jnp.asarray(x[rows][:, columns]) for x in (reward, length)]
        np.testing.assert_allclose(f(*moved), whole[rows][:, columns], rtol=1e-4, atol=1e-6)


def test_dividing_by_the_spread_never_flips_a_sign():
    reward = jnp.asarray(np.random.default_rng(1).normal(size=(20, 6)), jnp.float32)
    plain = reward - baseline.group_mean(reward, jnp.ones((20, 6), int))
    np.testing.assert_array_equal(jnp.sign(grpo(reward)), jnp.sign(plain))


def test_constants_may_be_swept_in_one_jit():
    reward = jnp.array([[1.0, 0.0, 1.0, 1.0]])

    def f(ddof, eps):
        divide = partial(scale.group_std, ddof=ddof, eps=eps)
        return advantage(baseline.group_mean, divide, reward, jnp.ones((1, 4), int))

    swept = jax.jit(jax.vmap(f))(jnp.array([0, 1]), jnp.array([1e-8, 1e-4]))
    np.testing.assert_allclose(swept[0], f(0, 1e-8), rtol=1e-6)
    np.testing.assert_allclose(swept[1], f(1, 1e-4), rtol=1e-6)
