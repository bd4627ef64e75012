"""The weight of every token (public cases K6, K7, K9)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import aggregation
from grpo_jax.policy import cut
from tests.cases import AGGREGATION

MASK = jnp.array([[True, True, False, False], [True] * 4])
GROUP = jnp.array([0, 0])
LOSS = jnp.array([[1.0, 1.0, 0.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
CONSTANT = partial(aggregation.constant, length=4)


def test_k6_one_batch_five_losses():
    def loss(rule, group=GROUP):
        return float((rule(MASK, group) * LOSS).sum())

    assert loss(aggregation.sequence_mean) == pytest.approx(1.5)
    assert loss(aggregation.token_mean) == pytest.approx(1.6666667)
    assert loss(CONSTANT) == pytest.approx(1.25)
    assert loss(aggregation.sequence_sum) == pytest.approx(5)
    assert loss(aggregation.prompt_mean) == pytest.approx(1.6666667)  # one prompt
    assert loss(aggregation.prompt_mean, jnp.array([0, 1])) == pytest.approx(1.5)  # two


def test_k7_the_weights_of_a_micro_batch_are_rows_of_the_whole():
    weight = aggregation.token_mean(MASK, GROUP)
    assert sum(float((weight[i] * LOSS[i]).sum()) for i in (0, 1)) == pytest.approx(1.6666667)
    alone = [aggregation.token_mean(MASK[i : i + 1], GROUP[i : i + 1]) for i in (0, 1)]
    averaged = sum(float((alone[i] * LOSS[i]).sum()) for i in (0, 1)) / 2
    assert averaged == pytest.approx(1.5)  # the peers' bug


def test_k9_a_masked_row_still_counts_in_the_sequence_denominators():
    mask = jnp.array([[True, True], [False, False]])
    np.testing.assert_array_equal(
        aggregation.sequence_mean(mask, GROUP), [[0.25, 0.25], [0.0, 0.0]]
    )
    np.testing.assert_array_equal(aggregation.sequence_sum(mask, GROUP), [[0.5, 0.5], [0, 0]])
    np.testing.assert_array_equal(aggregation.token_mean(mask, GROUP), [[0.5, 0.5], [0, 0]])
    np.testing.assert_array_equal(CONSTANT(mask, GROUP), [[0.125, 0.125], [0, 0]])
    two = jnp.array([3, 8])
    np.testing.assert_array_equal(aggregation.prompt_mean(mask, two), [[0.25, 0.25], [0, 0]])


def test_prompt_mean_counts_groups_by_their_ids():
    mask = jnp.array([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]], bool)
    group = jnp.array([70, -3, 70, -3])  # any ids, in any order
    expected = np.array([[0.1, 0.1, 0.1], [0.5, 0, 0], [0.1, 0.1, 0], [0, 0, 0]])
    weight = jax.jit(aggregation.prompt_mean)(mask, group)
    np.testing.assert_allclose(weight, expected, rtol=1e-6)


@pytest.mark.parametrize("name", AGGREGATION)
def test_properties_of_every_rule(name):
    rule = AGGREGATION[name]
    rng = np.random.default_rng(0)
    mask = np.arange(6) < rng.integers(0, 7, (12, 1))
    group = np.repeat([5, 1, 9], 4)
    weight = np.asarray(rule(jnp.asarray(mask), jnp.asarray(group)))
    assert weight.dtype == np.float32
    assert (weight[~mask] == 0).all()
    assert (weight[mask] > 0).all()

    padded = rule(jnp.asarray(np.pad(mask, ((0, 0), (0, 5)))), jnp.asarray(group))
    np.testing.assert_array_equal(padded[:, :6], weight)  # the width of the batch is not in it

    order = rng.permutation(12)
    moved = rule(jnp.asarray(mask[order]), jnp.asarray(group[order]))
    as_before = np.allclose(moved, weight[order], rtol=1e-6)
    assert as_before == (name != "local")

    nothing = rule(jnp.zeros((12, 6), bool), jnp.asarray(group))
    np.testing.assert_array_equal(nothing, 0)


@pytest.mark.parametrize("name", ["sequence_mean", "token_mean", "prompt_mean"])
def test_means_sum_to_one_when_no_row_is_empty(name):
    mask = jnp.arange(6) < jnp.array([[1], [6], [3], [2]])
    weight = AGGREGATION[name](mask, jnp.array([0, 0, 1, 1]))
    assert float(weight.sum()) == pytest.approx(1, rel=1e-6)


def test_constant_is_token_mean_times_tokens_over_rows_and_length():
    tokens, rows, length = 6, 2, 4
    np.testing.assert_allclose(
        CONSTANT(MASK, GROUP),
        aggregation.token_mean(MASK, GROUP) * tokens / (rows * length),
        rtol=1e-6,
    )


def test_the_length_bias_is_in_the_weight():
    mask = jnp.arange(200) < jnp.array([[20], [200]])
    weight = aggregation.sequence_mean(mask, GROUP)
    assert float(weight[0, 0] / weight[1, 0]) == pytest.approx(10)
    assert len(set(np.asarray(CONSTANT(mask, GROUP))[mask].tolist())) == 1


def test_length_may_be_traced_and_float64_is_kept():
    swept = jax.vmap(lambda n: aggregation.constant(MASK, GROUP, length=n))(jnp.array([4, 8]))
    np.testing.assert_allclose(swept[0], 2 * swept[1])
    with jax.enable_x64(True):
        for rule in AGGREGATION.values():
            assert rule(MASK, GROUP).dtype == jnp.float64


def test_token_sum_weighs_every_token_one():
    np.testing.assert_array_equal(aggregation.token_sum(MASK, GROUP), MASK)


def local(mask, rows, rule=aggregation.token_mean, group=None):
    group = jnp.zeros(len(mask), int) if group is None else group
    return np.asarray(aggregation.local(mask, group, rows=rows, rule=rule))


def test_local_averages_the_means_of_consecutive_micro_batches():
    mask = jnp.arange(4) < jnp.array([[4], [2], [1], [1]])
    np.testing.assert_allclose(local(mask, 4), aggregation.token_mean(mask, jnp.zeros(4, int)))
    expected = np.array([1 / 12, 1 / 12, 1 / 4, 1 / 4])[:, None] * np.asarray(mask)
    np.testing.assert_allclose(local(mask, 2), expected, rtol=1e-6)
    alone = np.array([1 / 16, 1 / 8, 1 / 4, 1 / 4])[:, None] * np.asarray(mask)
    np.testing.assert_allclose(local(mask, 1), alone, rtol=1e-6)


def test_local_is_the_peers_bug():
    averaged = float((local(MASK, 1) * LOSS).sum())
    assert averaged == pytest.approx(1.5)  # of test_k7; 1.6666667 is right


@pytest.mark.parametrize(("rows", "taken"), [(12, 12), (100, 12), (8, 6), (5, 4), (3, 3), (1, 1)])
def test_local_cuts_as_the_learner_does(rows, taken):
    mask = jnp.arange(6) < jnp.arange(12)[:, None] % 7
    parts = [
        aggregation.token_mean(mask[i : i + taken], jnp.zeros(taken, int)) * taken / 12
        for i in range(0, 12, taken)
    ]
    np.testing.assert_allclose(local(mask, rows), np.concatenate(parts), rtol=1e-6)
    assert cut(mask, rows).shape[:2] == (12 // taken, taken)


def test_local_takes_any_rule_and_a_count_of_rows_does_not_mind():
    mask = jnp.arange(6) < jnp.arange(12)[:, None] % 7
    group = jnp.repeat(jnp.arange(3), 4)
    whole = aggregation.sequence_mean(mask, group)
    np.testing.assert_allclose(local(mask, 4, aggregation.sequence_mean), whole, rtol=1e-6)
    whole = aggregation.prompt_mean(mask, group)  # micro-batches of whole groups
    np.testing.assert_allclose(local(mask, 4, aggregation.prompt_mean, group), whole, rtol=1e-6)
    assert np.abs(local(mask, 3, aggregation.prompt_mean, group) - whole).max() > 0.01
    jitted = jax.jit(partial(aggregation.local, rows=4, rule=aggregation.token_mean))
    np.testing.assert_array_equal(jitted(mask, group), local(mask, 4))


def test_local_of_empty_micro_batches_is_finite_and_they_count():
    mask = jnp.array([[True, True], [False, False]])
    np.testing.assert_array_equal(local(mask, 1), [[0.25, 0.25], [0, 0]])
    np.testing.assert_array_equal(local(jnp.zeros((2, 2), bool), 1), 0)
    with pytest.raises(ValueError, match="rows=0 should be 1 or more"):
        local(mask, 0)
