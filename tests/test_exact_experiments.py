"""The experiments that compute expectations instead of sampling them, and what they stand on."""

import csv
import importlib.util
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import binom

from grpo_jax import tabular_exact as exact
from grpo_jax.config import load_algorithm
from grpo_jax.loss import policy_loss
from grpo_jax.models import tabular_tree

pytestmark = pytest.mark.core

FOLDER = Path(__file__).parents[1] / "experiments"


def loaded(name):
    spec = importlib.util.spec_from_file_location(f"{name}_run", FOLDER / name / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


difficulty, bias, mismatch = map(
    loaded, ("difficulty_weight", "estimator_bias", "sampler_mismatch")
)
TREE = tabular_tree.enumerate_tree(3, 2)  # 7 answers: EOS, xEOS twice, xy four times
REWARD = np.array([0.0, 1.0, 0.0, 1.0, 0.0, 0.0, 1.0])


@pytest.fixture
def float64():
    with jax.enable_x64():
        yield


def policy(seed=0):
    return tabular_tree.init(TREE, jax.random.key(seed), spread=0.7, dtype=jnp.float64)


def measured(algorithm, params, size, sampler=None):
    """The comparison on the small tree; the sampler is the policy itself unless told otherwise."""
    groups, reward = exact.all_groups(7, size), jnp.asarray(REWARD)

    @jax.jit
    def run(params, sampler):
        advantages = exact.group_advantages(algorithm, TREE, groups.rows, reward)
        here = {"old": params, "sampler": sampler}
        each = exact.gradients(algorithm, TREE, params, groups.rows, advantages, **here)
        chance = exact.group_probabilities(groups, tabular_tree.probabilities(sampler, TREE))
        true = tabular_tree.policy_gradient(params, TREE, reward)["logits"]
        return exact.compare(each, chance, true)[1]

    return run(params, params if sampler is None else sampler)


# --- what they stand on ---------------------------------------------------------------------------


def test_every_group_once_and_in_all_its_orders(float64):
    """Two of three answers: 6 groups, 9 orders; their chances are those of a multinomial."""
    groups = exact.all_groups(3, 2)
    assert groups.rows.tolist() == [[0, 0], [0, 1], [0, 2], [1, 1], [1, 2], [2, 2]]
    assert groups.orders.tolist() == [1, 2, 2, 1, 2, 1]
    chance = exact.group_probabilities(groups, jnp.array([0.5, 0.3, 0.2]))
    np.testing.assert_allclose(chance, [0.25, 0.3, 0.2, 0.09, 0.12, 0.04])
    assert exact.all_groups(7, 4).orders.sum() == 7**4


def test_the_expectation_is_that_of_samples(float64):
    """Against the loss of 20,000 sampled groups as one minibatch: within 5 % of its length."""
    algorithm = load_algorithm("grpo", "kl=none")
    params, reward = policy(), jnp.asarray(REWARD)
    answer = np.asarray(jax.jit(lambda p: tabular_tree.probabilities(p, TREE))(params))
    drawn = np.random.default_rng(0).choice(7, size=(20_000, 3), p=answer / answer.sum())

    @jax.jit
    def sampled(params, drawn):
        advantages = exact.group_advantages(algorithm, TREE, drawn, reward).reshape(-1)
        mask = jnp.asarray(TREE.mask)[drawn.reshape(-1)]
        weight = algorithm.aggregation(mask, jnp.arange(len(mask)) // 3)
        old = tabular_tree.logps(params, TREE)[drawn.reshape(-1)]

        def loss(params):
            logp = tabular_tree.logps(params, TREE)[drawn.reshape(-1)]
            fixed = {"old_logp": old, "sampler_logp": old, "ref_logp": None, "mask": mask}
            return policy_loss(algorithm, logp, advantage=advantages, weight=weight, **fixed)[0]

        return -jax.grad(loss)(params)["logits"]

    @jax.jit
    def expected(params, groups):
        every = exact.group_advantages(algorithm, TREE, groups.rows, reward)
        same = {"old": params, "sampler": params}
        each = exact.gradients(algorithm, TREE, params, groups.rows, every, **same)
        return jnp.tensordot(exact.group_probabilities(groups, jnp.asarray(answer)), each, 1)

    mean = np.asarray(expected(params, exact.all_groups(7, 3)))
    assert np.linalg.norm(sampled(params, drawn) - mean) < 0.05 * np.linalg.norm(mean)


def test_a_known_gradient_is_compared_right(float64):
    """Twice the truth, half of the time and 0 otherwise: scale 1, error 0, variance |g|² / |g|²."""
    true = jnp.array([[3.0, 4.0]])
    each, half = jnp.stack([2 * true, 0 * true]), jnp.array([0.5, 0.5])
    mean, found = exact.compare(each, half, true)
    np.testing.assert_allclose(mean, true)
    np.testing.assert_allclose([found.scale, found.cosine, found.error], [1, 1, 0], atol=1e-15)
    np.testing.assert_allclose(found.variance, 1.0)
    # (3, 4) turned by a right angle and added: error 1, cosine 1 / sqrt 2
    turned = (true + jnp.array([[-4.0, 3.0]]))[None]
    _, found = exact.compare(turned, jnp.ones(1), true)
    np.testing.assert_allclose([found.scale, found.cosine, found.error], [1, 0.5**0.5, 1])


# --- difficulty_weight ----------------------------------------------------------------------------


PRESETS = [("grpo", "kl=none"), ("dr_grpo", "aggregation=sequence_sum"), ("maxrl",)]


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset[0])
def test_the_weight_is_that_of_the_loss_gradient(float64, preset):
    """E of the gradient of `policy_loss` in p, over the 4 counts of G = 3, is c(p, 3)."""
    algorithm, rate, mask = load_algorithm(*preset), 0.2, jnp.ones((3, 1), bool)

    def gradient(right):
        reward = (jnp.arange(3) < right).astype(float)
        weight = algorithm.aggregation(mask, jnp.zeros(3, jnp.int32))

        def loss(p):
            logp = jnp.log(jnp.where(reward == 1, p, 1 - p))[:, None]
            fixed = {"old_logp": logp, "sampler_logp": logp, "ref_logp": None, "mask": mask}
            advantages = difficulty.advantages(algorithm, reward[None])[0]
            return policy_loss(algorithm, logp, advantage=advantages, weight=weight, **fixed)[0]

        return -jax.grad(loss)(rate)

    expected = binom.pmf(np.arange(4), 3, rate) @ jax.jit(jax.vmap(gradient))(jnp.arange(4))
    weight = difficulty.exact(algorithm, 3, np.array([rate]), batch=False)
    np.testing.assert_allclose(expected, weight[0], rtol=1e-9)


def test_weights_are_those_of_closed_forms():
    """G = 2 weighs every p the same; MaxRL's own formula; and G = 16 from another program."""
    rates = difficulty.RATES
    of = difficulty.algorithms(16)
    found = {name: difficulty.exact(of[name], 16, rates, batch=False) for name in list(of)[:4]}
    np.testing.assert_allclose(found[difficulty.NONE], 15 / 16)
    np.testing.assert_allclose(found[difficulty.RLOO], 1)
    np.testing.assert_allclose(found[difficulty.MAXRL], (1 - (1 - rates) ** 15) / rates)
    np.testing.assert_allclose(found[difficulty.STD][:5], [3.733, 3.267, 2.848, 2.198, 1.934], 2e-4)
    two = difficulty.exact(difficulty.algorithms(2)[difficulty.STD], 2, rates, batch=False)
    np.testing.assert_allclose(two, 1, atol=1e-7)


def test_the_exact_weight_of_a_batch_rule_is_that_of_all_batches():
    """Two groups of 2 whose std is the batch's: against the sum over all 16 batches, in numpy."""
    rates = np.array([0.2, 0.7])
    got = difficulty.exact(load_algorithm("lite_ppo", "scale.eps=0"), 2, rates, batch=True)
    expected = np.zeros(2)
    for bits in np.ndindex(2, 2, 2, 2):
        reward = np.array(bits, float).reshape(2, 2)
        p = rates[:, None]
        chance = np.prod(np.where(reward == 1, p, 1 - p))
        std = reward.std(ddof=1)
        a = (reward - reward.mean(1, keepdims=True)) / (std if std else 1)
        expected += chance * (a * (reward - p) / (p * (1 - p))).mean(1)
    np.testing.assert_allclose(got, expected, rtol=1e-6)


def test_samples_agree_with_the_exact_weights():
    """A small run of the experiment; and one wrong weight in it is found."""
    size = 2
    weights, samples = {}, {}
    for rule, algorithm in difficulty.algorithms(size).items():
        weights[rule, size] = difficulty.exact(
            algorithm, size, difficulty.RATES, batch=rule == difficulty.BATCH
        )
    for rule, found in difficulty.sampled(size, groups=50_000).items():
        samples[rule, size] = found
    z, bound = difficulty.distances(weights, samples)
    assert max(np.nanmax(row) for row in z.values()) < bound
    weights[difficulty.RLOO, size] = weights[difficulty.RLOO, size] * 1.1
    z, bound = difficulty.distances(weights, samples)
    assert np.nanmax(z[difficulty.RLOO, size]) > bound


# --- estimator_bias -------------------------------------------------------------------------------


def test_only_a_constant_keeps_the_direction(float64):
    params, length = policy(), "aggregation.length=2"
    for size in (2, 3):
        found = measured(load_algorithm("dr_grpo", length), params, size)
        np.testing.assert_allclose([found.error, found.cosine], [0, 1], atol=1e-12)
        np.testing.assert_allclose(found.scale, (size - 1) / size / 2)
    by_answer, by_group = (
        measured(load_algorithm(*preset), params, 3)
        for preset in (("grpo", "kl=none"), ("dapo_paper",))
    )
    assert 0.01 < by_group.error < by_answer.error / 2


def test_more_groups_a_minibatch_less_bias(float64):
    """And one group is what the aggregation itself gives."""
    algorithm, params = load_algorithm("dapo"), bias.policies()[0]
    groups = exact.all_groups(31, 4)
    groups = exact.Groups(groups.rows[::500], groups.orders[::500])
    alone = bias.batch_weight(algorithm, groups, params, 1)
    for rows, weight in zip(groups.rows, alone, strict=True):
        mask = jnp.asarray(bias.TREE.mask)[rows]
        np.testing.assert_allclose(weight, algorithm.aggregation(mask, jnp.zeros(4, jnp.int32)))
    spread = [
        np.ptp(np.asarray(batch * bias.batch_weight(algorithm, groups, params, batch))[:, 0, 0])
        for batch in (1, 2, 8)
    ]
    assert spread[0] > 2 * spread[1] > 4 * spread[2]


def test_only_the_ratio_of_whole_answers_has_no_bias(float64):
    errors, drift = {}, 0.3
    for label in (bias.FULL, "token ratio, no clip"):
        role, preset, *overrides = bias.ESTIMATORS[label]
        algorithm = load_algorithm(preset, *bias.PLAIN, *overrides)
        measure = jax.jit(partial(bias.off_policy, algorithm, role))
        errors[label] = float(measure(drift, jax.random.key(3)).error)
    assert errors.pop(bias.FULL) < 1e-12
    assert min(errors.values()) > 0.01


# --- sampler_mismatch -----------------------------------------------------------------------------


def test_a_sampler_of_its_own_biases_all_but_whole_weights(float64):
    params = policy(1)
    noise = 0.3 * jax.random.normal(jax.random.key(2), params["logits"].shape, jnp.float64)
    sampler = {"logits": params["logits"] + noise}
    found = {
        name: measured(mismatch.algorithm_of(name), params, 3, sampler=sampler)
        for name in ("none", "token_truncate, cap 2", mismatch.FULL)
    }
    assert found[mismatch.FULL].error < 1e-12
    np.testing.assert_allclose(found[mismatch.FULL].scale, 2 / 3)
    assert 0.01 < found["token_truncate, cap 2"].error < found["none"].error


@pytest.mark.parametrize("name", ["token_mask [1/2, 2]", "batch_normalised, answers"])
def test_without_mismatch_no_correction_does_anything(float64, name):
    found = measured(mismatch.algorithm_of(name), policy(1), 2)
    np.testing.assert_allclose([found.error, found.scale], [0, 0.5], atol=1e-12)


# --- what is written up ---------------------------------------------------------------------------


def test_the_written_results_hold_what_they_claim():
    """The csv files beside the texts: the numbers that the verdicts rest on."""

    def rows(name):
        with (FOLDER / name / "results.csv").open() as file:
            return list(csv.DictReader(file))

    for row in rows("sampler_mismatch"):
        if row["correction"] == mismatch.FULL:
            assert float(row["largest_error"]) < 1e-6
    for row in rows("estimator_bias"):
        if row["part"] == "on policy" and row["estimator"] == "dr_grpo":
            assert float(row["error"]) < 1e-6
    by_size = {
        (row["group_size"], row["pass_rate"]): float(row["exact"])
        for row in rows("difficulty_weight")
        if row["rule"] == difficulty.STD
    }
    np.testing.assert_allclose([by_size["16", "0.01"], by_size["16", "0.5"]], [3.733, 1.934], 3e-4)
