"""Baseline and scale together (public cases K1, K2, K4, K5)."""

from functools import partial
from math import comb

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


SCALES = {
    "none": scale.none,
    "group_std": partial(scale.group_std, ddof=0, eps=1e-8),
    "batch_std": partial(scale.batch_std, ddof=0, eps=1e-8),
    "group_mean": scale.group_mean,
    "whiten": partial(scale.whiten, ddof=0, eps=1e-8, hold_tied=True),
    "whiten_tokens": partial(scale.whiten_tokens, ddof=0, eps=1e-8, hold_tied=True),
    "pass_at_k_std": partial(scale.pass_at_k_std, k=4, right=0.5),
    "informative_share": scale.informative_share,
    "nonzero_share": scale.nonzero_share,
}
PASS_AT_4 = partial(baseline.pass_at_k, k=4, right=0.5)
TO_ZERO = {rule.__name__: rule for rule in (*GROUP_BASELINES, baseline.best_of_group)}
TO_ZERO |= {"pass_at_k": PASS_AT_4}


@pytest.mark.parametrize("divide", SCALES)
@pytest.mark.parametrize("rule", TO_ZERO)
def test_a_dead_group_beside_a_live_one_is_exactly_zero_under_every_scale(rule, divide):
    live = [1.0, 0.2, 0.5, 0.3, 0.1, 0.0, 0.3, 0.9]
    reward = jnp.array([[0.7] * 8, live, [0.3] * 8, [0.0] * 8], jnp.float32)
    length = jnp.arange(32).reshape(4, 8)
    adv = advantage(TO_ZERO[rule], SCALES[divide], reward, length)
    np.testing.assert_array_equal(adv[jnp.array([0, 2, 3])], 0)
    assert jnp.abs(adv[1]).max() > 0.05


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
    for rule in TO_ZERO.values():
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


# ---------------------------------------------------------------- what a rule asks for


def test_greedy_rewards_reach_the_baseline_that_asks():
    reward, length = jnp.array([[1.0, 0.0], [1.0, 0.0]]), jnp.ones((2, 2), int)
    greedy = jnp.array([[0.0], [NAN]])
    adv = advantage(baseline.greedy, scale.none, reward, length, greedy)
    np.testing.assert_array_equal(adv, [[1, 0], [0, 0]])
    other = advantage(baseline.group_mean, scale.none, reward, length, greedy)
    np.testing.assert_array_equal(other, [[0.5, -0.5]] * 2)


def test_a_baseline_that_asks_and_gets_none_is_an_error():
    reward, length = jnp.array([[1.0, 0.0]]), jnp.ones((1, 2), int)
    with pytest.raises(ValueError, match="greedy"):
        advantage(baseline.greedy, scale.none, reward, length)
    bound = partial(baseline.greedy, greedy=jnp.zeros((1, 1)))
    np.testing.assert_array_equal(advantage(bound, scale.none, reward, length), reward)


def test_lengths_reach_the_scale_that_asks():
    reward, length = jnp.array([[1.0, 0.0]]), jnp.array([[3, 1]])
    rule = partial(scale.whiten_tokens, ddof=0, eps=0.0, hold_tied=False)
    adv = advantage(baseline.none, rule, reward, length)
    np.testing.assert_allclose(adv, [[0.25 / 0.1875**0.5, -0.75 / 0.1875**0.5]], rtol=1e-6)


# ---------------------------------------------------------------- Pass@k and MaxRL


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_pass_at_k_as_printed(k):
    n = 16
    reward = np.arange(n) < np.arange(n + 1)[:, None]  # 0 to 16 right
    for right, row in zip(range(n + 1), pass_at_k(reward, k), strict=True):
        wrong = n - right
        mean = 1 - comb(wrong, k) / comb(n, k)
        if mean in (0, 1):
            np.testing.assert_array_equal(row, 0)
            continue
        sigma = np.sqrt(mean * (1 - mean))
        np.testing.assert_allclose(row[:right], (1 - mean) / sigma, rtol=1e-9)
        low = (1 - mean - comb(wrong - 1, k - 1) / comb(n - 1, k - 1)) / sigma
        np.testing.assert_allclose(row[right:], low, rtol=1e-9)


def pass_at_k(reward, k):
    rule = partial(baseline.pass_at_k, k=k, right=0.5)
    divide = partial(scale.pass_at_k_std, k=k, right=0.5)
    return binary(rule, divide, reward)


def binary(rule, divide, reward):
    with jax.enable_x64(True):
        reward = jnp.asarray(reward, float)
        return np.asarray(advantage(rule, divide, reward, jnp.ones(reward.shape, int)))


def gradient_weight(rule, divide, p, size):
    """c in E[gradient] = c * grad p, from the advantage of a row against what the others are."""
    others = np.arange(size - 1) < np.arange(size)[:, None]
    right = binary(rule, divide, np.insert(others, 0, 1, axis=1))[:, 0]
    wrong = binary(rule, divide, np.insert(others, 0, 0, axis=1))[:, 0]
    chance = [comb(size - 1, i) * p**i * (1 - p) ** (size - 1 - i) for i in range(size)]
    return np.dot(chance, right - wrong)


@pytest.mark.parametrize(
    ("p", "weight"), [(0.02, 2.24), (0.05, 1.81), (0.1, 1.38), (0.25, 0.83), (0.5, 0.45)]
)
def test_the_gradient_weight_of_pass_at_4_of_32(p, weight):
    rules = PASS_AT_4, partial(scale.pass_at_k_std, k=4, right=0.5)
    np.testing.assert_allclose(gradient_weight(*rules, p, 32), weight, atol=0.0051)


@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("p", [0.02, 0.1, 0.5])
def test_undivided_the_weight_is_the_slope_of_pass_at_k(p, k):
    rule, size = partial(baseline.pass_at_k, k=k, right=0.5), 32
    slope = k * (1 - p) ** (k - 1)  # of 1 - (1 - p)^k
    weight = gradient_weight(rule, scale.none, p, size)
    np.testing.assert_allclose(weight, slope * (size - k) / (size * k), rtol=1e-9)


@pytest.mark.parametrize("p", [0.01, 0.05, 0.1, 0.25, 0.5])
def test_the_gradient_weights_of_maxrl_rloo_and_the_plain_mean(p):
    size = 16
    maxrl = gradient_weight(baseline.group_mean, scale.group_mean, p, size)
    np.testing.assert_allclose(maxrl, (1 - (1 - p) ** (size - 1)) / p, rtol=1e-9)
    plain = gradient_weight(baseline.group_mean, scale.none, p, size)
    np.testing.assert_allclose(plain, (size - 1) / size, rtol=1e-9)
    rloo = gradient_weight(baseline.leave_one_out, scale.none, p, size)
    np.testing.assert_allclose(rloo, 1, rtol=1e-9)


def test_maxrl_by_hand():
    adv = advantage(
        baseline.group_mean,
        scale.group_mean,
        jnp.array([[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0] * 4]),
        jnp.ones((3, 4), int),
    )
    np.testing.assert_allclose(
        adv, [[3, -1, -1, -1], [1 / 3, 1 / 3, 1 / 3, -1], [0] * 4], rtol=1e-6
    )
