"""The tabular policy of fixed length: its probabilities and samples, its accuracy and entropy."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from grpo_jax.models import tabular_chain

SLOTS, VOCAB = 3, 3
PARAMS, TARGET = tabular_chain.init(
    jax.random.key(4), slots=SLOTS, vocab=VOCAB, spread=0.8, bias=0.5
)
ANSWERS = np.array(list(product(range(VOCAB), repeat=SLOTS)), np.int32)


def probabilities():
    """Of all answers, by hand in float64."""
    logits = np.asarray(PARAMS["logits"], np.float64)
    table = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    result = []
    for answer in ANSWERS:
        chance, before = 1.0, 0
        for slot, token in enumerate(answer):
            chance, before = chance * table[slot, before, token], token
        result.append(chance)
    return np.array(result)


def test_the_start_is_biased_towards_its_target():
    params, target = tabular_chain.init(jax.random.key(0), slots=200, vocab=8, spread=0.5, bias=0.9)
    hit = np.asarray(target)[:, None, None] == np.arange(8)
    noise = np.asarray(params["logits"]) - 0.9 * hit
    assert noise.std() == pytest.approx(0.5, rel=0.05)
    assert noise[np.broadcast_to(hit, noise.shape)].mean() == pytest.approx(0, abs=0.05)
    assert set(np.asarray(target)) == set(range(8))


def test_the_probabilities_of_all_answers_are_those_by_hand():
    logp = tabular_chain.logps(PARAMS, jnp.asarray(ANSWERS))
    np.testing.assert_allclose(np.exp(logp.sum(1)), probabilities(), rtol=1e-5)


def test_accuracy_and_entropy_are_the_sums_over_all_answers():
    chance = probabilities()
    right = (np.asarray(TARGET) == ANSWERS).mean(1)
    assert float(tabular_chain.accuracy(PARAMS, TARGET)) == pytest.approx(chance @ right, rel=1e-5)
    expected = -(chance @ np.log(chance)) / SLOTS
    assert float(tabular_chain.entropy(PARAMS)) == pytest.approx(expected, rel=1e-5)


def test_samples_come_at_the_policys_rates():
    rows = 20_000
    rollout = jax.jit(tabular_chain.sample)(PARAMS, jnp.arange(rows), jax.random.key(1), 2)
    number = np.asarray(rollout.completion) @ VOCAB ** np.arange(SLOTS)[::-1]
    counts = np.bincount(number, minlength=len(ANSWERS))
    assert stats.chisquare(counts, rows * probabilities()).pvalue > 1e-3
    logp = tabular_chain.logps(PARAMS, rollout.completion)
    np.testing.assert_allclose(rollout.sampler_logp, logp, rtol=1e-5, atol=1e-6)
    assert rollout.mask.all() and not rollout.truncated.any()
    np.testing.assert_array_equal(rollout.prompt[:, 0], np.arange(rows))


def test_the_noise_is_a_function_of_key_row_and_step():
    draw = jax.jit(tabular_chain.sample)
    tokens = draw(PARAMS, jnp.zeros(64, int), jax.random.key(0), 3).completion
    fewer = draw(PARAMS, jnp.arange(40), jax.random.key(0), 3).completion
    np.testing.assert_array_equal(tokens[:40], fewer)
    for key, step in ((0, 4), (1, 3)):
        assert (tokens != draw(PARAMS, jnp.arange(64), jax.random.key(key), step).completion).any()
