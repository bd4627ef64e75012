"""The tabular policy with lengths: its probabilities, its samples, its expected lengths."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from grpo_jax.models import tabular_length
from grpo_jax.models.tabular_length import FILLER, RIGHT, STOP, WRONG

LONGEST = 5
PARAMS = {
    "branch": jnp.float32(0.4),
    "stop": jnp.array([[-1.0, 0.5, -2.0], [1.0, -0.5, 0.2]]),  # the third column: slots 2, 3, 4
}


def answers():
    """Every answer of the policy as tokens [2 * (LONGEST + 1), 1 + LONGEST]: right ones last."""
    rows = [
        [first] + [FILLER] * fillers + [STOP] * (LONGEST - fillers)
        for first in (WRONG, RIGHT)
        for fillers in range(LONGEST + 1)
    ]
    return np.array(rows)


def probabilities(params):
    """The same answers' probabilities, by hand in float64."""
    sigmoid = lambda x: 1 / (1 + np.exp(-np.asarray(x, np.float64)))  # noqa: E731
    right, table = sigmoid(params["branch"]), sigmoid(params["stop"])
    result = []
    for first, chance in ((WRONG, 1 - right), (RIGHT, right)):
        hazard = [table[first, min(slot, table.shape[1] - 1)] for slot in range(LONGEST)]
        for fillers in range(LONGEST + 1):
            ends = hazard[fillers] if fillers < LONGEST else 1.0
            result.append(chance * np.prod([1 - h for h in hazard[:fillers]]) * ends)
    return np.array(result)


def mask_of(tokens):
    before = np.cumsum(tokens == STOP, axis=1) - (tokens == STOP)
    return before == 0


def test_the_probabilities_of_all_answers_are_those_by_hand():
    tokens = answers()
    logp = tabular_length.logps(PARAMS, jnp.asarray(tokens))
    total = np.where(mask_of(tokens), logp, 0).sum(1)
    np.testing.assert_allclose(np.exp(total), probabilities(PARAMS), rtol=1e-5)
    assert np.exp(total).sum() == pytest.approx(1, abs=1e-6)


def test_the_expected_lengths_are_the_sums_over_all_answers():
    lengths = np.minimum(np.arange(LONGEST + 1) + 1, LONGEST)
    chance = probabilities(PARAMS).reshape(2, -1)
    expected = chance @ lengths / chance.sum(1)
    np.testing.assert_allclose(tabular_length.expected_length(PARAMS, LONGEST), expected, rtol=1e-5)


@partial(jax.jit, static_argnames=("rows", "longest"))
def draw(params, rows, step, *, key=0, longest=LONGEST):
    return tabular_length.sample(
        params, jnp.zeros(rows, int), jax.random.key(key), step, longest=longest
    )


def test_samples_come_at_the_policys_rates():
    rows = 20_000
    rollout = draw(PARAMS, rows, 3)
    tokens, mask = np.asarray(rollout.completion), np.asarray(rollout.mask)
    fillers = (tokens == FILLER).sum(1)
    outcome = (tokens[:, 0] == RIGHT) * (LONGEST + 1) + fillers
    counts = np.bincount(outcome, minlength=2 * (LONGEST + 1))
    # first token and length at once: were they drawn from one number, the counts would tell
    assert stats.chisquare(counts, rows * probabilities(PARAMS)).pvalue > 1e-3
    np.testing.assert_array_equal(mask, mask_of(tokens))
    np.testing.assert_array_equal(rollout.truncated, ~(tokens == STOP).any(1))
    logp = tabular_length.logps(PARAMS, rollout.completion)
    np.testing.assert_allclose(rollout.sampler_logp, np.where(mask, logp, 0), rtol=1e-6)


def test_the_noise_is_a_function_of_key_row_and_step():
    tokens = draw(PARAMS, 64, 2).completion
    np.testing.assert_array_equal(tokens[:32], draw(PARAMS, 32, 2).completion)
    assert (tokens != draw(PARAMS, 64, 3).completion).any()
    assert (tokens != draw(PARAMS, 64, 2, key=1).completion).any()


def test_the_start_is_as_asked_for():
    params = tabular_length.init(right=0.3, mean_length=10.0, columns=7)
    assert jax.nn.sigmoid(params["branch"]) == pytest.approx(0.3)
    assert params["stop"].shape == (2, 7)
    np.testing.assert_allclose(tabular_length.expected_length(params, 1000), 10, rtol=1e-5)
    # sum of 0.9^j, j = 0 .. 63
    cut = (1 - 0.9**64) / 0.1
    np.testing.assert_allclose(tabular_length.expected_length(params, 64), cut, rtol=1e-5)


def test_gradients_reach_only_the_slots_that_a_row_came_to():
    params = tabular_length.init(right=0.3, mean_length=10.0, columns=4)
    tokens = jnp.array([[RIGHT, FILLER, STOP, STOP, STOP]])

    def total(params):
        return jnp.where(mask_of(np.asarray(tokens)), tabular_length.logps(params, tokens), 0).sum()

    grad = jax.grad(total)(params)
    # d log(1 - h) = -h, d log h = 1 - h with h = 0.1
    np.testing.assert_allclose(grad["stop"], [[0, 0, 0, 0], [-0.1, 0.9, 0, 0]], atol=1e-6)
    assert grad["branch"] == pytest.approx(0.7)
