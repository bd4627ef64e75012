"""The bandit: its starts, its rewards, and what a policy is expected to earn."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import tabular_bandit


def test_the_peaked_start_has_the_share_it_is_given():
    params = tabular_bandit.peaked(3, 5, 0.9)
    expected = np.array([[0.9] + [0.025] * 4] * 3)
    np.testing.assert_allclose(jax.nn.softmax(params["logits"], -1), expected, rtol=1e-5)


def test_the_diffuse_start_is_normal_and_of_its_key():
    one, same, other = (
        tabular_bandit.diffuse(64, 64, 1.5, jax.random.key(seed))["logits"] for seed in (0, 0, 1)
    )
    assert float(one.std()) == pytest.approx(1.5, rel=0.05)
    assert float(one.mean()) == pytest.approx(0, abs=0.1)
    np.testing.assert_array_equal(one, same)
    assert (one != other).all()


def test_rewards_come_at_the_rates_of_their_tokens():
    rows = 20_000
    value, tokens = jnp.array([0.0, 0.3, 1.0]), jnp.tile(jnp.arange(3), rows)[:, None]
    reward = jax.jit(tabular_bandit.pull)(value, tokens, jax.random.key(0), 1)
    assert reward.dtype == jnp.float32
    never, sometimes, always = np.asarray(reward).reshape(rows, 3).T
    assert not never.any() and always.all()
    assert sometimes.mean() == pytest.approx(0.3, abs=0.013)  # four standard errors


def test_the_noise_of_rewards_is_a_function_of_key_row_and_step():
    value, tokens = jnp.full(2, 0.5), jnp.zeros((64, 1), int)
    draw = jax.jit(tabular_bandit.pull)
    reward = draw(value, tokens, jax.random.key(0), 3)
    np.testing.assert_array_equal(reward[:40], draw(value, tokens[:40], jax.random.key(0), 3))
    assert (reward != draw(value, tokens, jax.random.key(0), 4)).any()
    assert (reward != draw(value, tokens, jax.random.key(1), 3)).any()


def test_the_expected_reward_is_the_mean_over_prompts():
    params = {"logits": jnp.log(jnp.array([[0.5, 0.25, 0.25], [0.1, 0.2, 0.7]]))}
    expected = ((0.5 * 0.1 + 0.25 * 0.9 + 0.25 * 0.4) + (0.1 * 0.1 + 0.2 * 0.9 + 0.7 * 0.4)) / 2
    found = tabular_bandit.expected_reward(params, jnp.array([0.1, 0.9, 0.4]))
    assert float(found) == pytest.approx(expected, rel=1e-6)
