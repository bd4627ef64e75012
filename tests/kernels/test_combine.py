"""Several reward parts, one advantage."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import baseline, combine, scale
from grpo_jax.kernels.advantage import advantage

NAN = jnp.nan
LENGTH = jnp.array([[4, 1, 1, 2], [1, 2, 1, 4]])
PARTS = jnp.array(
    [
        [[1.0, 0.0, 0.0, 1.0], [2.0, 0.5, -0.5, 0.0]],
        [[0.0, 1.0, 0.5, 0.25], [10.0, 30.0, 20.0, 0.0]],
    ]
)
ROWS = partial(scale.whiten, ddof=1, eps=1e-4, hold_tied=True)
TOKENS = partial(scale.whiten_tokens, ddof=1, eps=1e-8, hold_tied=False)
WHITEN = {"rows": ROWS, "tokens": TOKENS}


def normalise(reward, length=LENGTH, eps=1e-4):
    divide = partial(scale.group_std, ddof=1, eps=eps)
    return advantage(baseline.group_mean, divide, reward, length)


def alone(parts, weight, whiten=ROWS, length=LENGTH, eps=1e-4):
    """GDPO."""
    rule = partial(normalise, length=length, eps=eps)
    weight = jnp.asarray(weight, parts.dtype)
    return combine.normalize_then_sum(parts, weight, rule, length=length, whiten=whiten)


def summed(parts, weight, rule=normalise):
    return combine.sum_then_normalize(parts, jnp.asarray(weight, parts.dtype), rule)


def test_the_sum_is_one_reward():
    value = summed(PARTS, [1.0, 0.5])
    np.testing.assert_allclose(value, normalise(PARTS[0] + 0.5 * PARTS[1]), rtol=1e-6)
    negative = summed(PARTS, [1.0, -0.5])
    np.testing.assert_allclose(negative, normalise(PARTS[0] - 0.5 * PARTS[1]), rtol=1e-6)
    np.testing.assert_array_equal(summed(PARTS[:1], [1.0]), normalise(PARTS[0]))


def test_normalised_alone_by_hand():
    parts = jnp.array([[[1.0, -1.0], [1.0, -1.0]], [[100.0, -100.0], [-9.0, 9.0]]])
    length = jnp.ones((2, 2), int)
    # each part is +-1/sqrt(2) alone; the sums are +-3/sqrt(2) and -+1/sqrt(2), their mean is 0 and
    # their deviation sqrt((9 + 9 + 1 + 1) / 2 / 3)
    expected = np.array([[3, -3], [-1, 1]]) / np.sqrt(2) / np.sqrt(10 / 3)
    value = alone(parts, [1.0, 2.0], partial(ROWS, eps=0.0), length, eps=0.0)
    np.testing.assert_allclose(value, expected, rtol=1e-6)


def printed(parts, weight, length, tokens):
    """GDPO with the constants of TRL (rows) or verl (tokens)."""
    mean, std = parts.mean(2, keepdims=True), parts.std(2, ddof=1, keepdims=True)
    total = np.tensordot(weight, (parts - mean) / (std + (1e-6 if tokens else 1e-4)), 1)
    if not tokens:
        return (total - total.mean()) / (total.std(ddof=1) + 1e-4)
    each = np.repeat(total.reshape(-1), length.reshape(-1))
    return (total - each.mean()) / np.sqrt(each.var(ddof=1) + 1e-8)


@pytest.mark.parametrize("whiten", WHITEN)
@pytest.mark.parametrize("weight", [[1.0, 1.0, 1.0], [1.0, 0.3, -0.7]])
def test_as_trl_and_verl_have_it(whiten, weight):
    rng = np.random.default_rng(0)
    parts, length = rng.normal(size=(3, 5, 4)), rng.integers(1, 9, (5, 4))
    expected = printed(parts, weight, length, whiten == "tokens")
    with jax.enable_x64(True):
        eps = 1e-6 if whiten == "tokens" else 1e-4
        value = alone(jnp.asarray(parts), weight, WHITEN[whiten], jnp.asarray(length), eps)
    np.testing.assert_allclose(value, expected, rtol=1e-9)


def test_lengths_count_where_tokens_are_whitened():
    long = LENGTH.at[0, 0].set(40)
    args = PARTS, [1.0, 0.5]
    assert not np.allclose(alone(*args, TOKENS), alone(*args, TOKENS, long), atol=1e-3)
    np.testing.assert_array_equal(alone(*args, ROWS), alone(*args, ROWS, long))


def test_a_part_counts_by_its_weight_and_not_by_its_spread():
    wide = PARTS.at[1].multiply(1000)
    args = {"whiten": partial(ROWS, eps=0.0), "eps": 0.0}
    np.testing.assert_allclose(
        alone(wide, [1.0, 0.5], **args), alone(PARTS, [1.0, 0.5], **args), rtol=1e-4, atol=1e-6
    )
    assert not np.allclose(summed(wide, [1.0, 0.5]), summed(PARTS, [1.0, 0.5]), atol=0.1)


# ---------------------------------------------------------------- parts that play no part

RULES = {
    "summed": summed,
    "rows": partial(alone, whiten=ROWS),
    "tokens": partial(alone, whiten=TOKENS),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("content", [0.0, 7.0, NAN, jnp.inf])
def test_a_part_of_weight_0_plays_no_part(rule, content):
    third = jnp.full((1, 2, 4), content).at[0, 0, 0].set(NAN)
    value = rule(jnp.concatenate([PARTS, third]), [1.0, 0.5, 0.0])
    np.testing.assert_allclose(value, rule(PARTS, [1.0, 0.5]), rtol=1e-6)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@pytest.mark.parametrize("content", [0.0, 0.7])
def test_a_part_of_equal_rewards_adds_nothing(rule, content):
    third = jnp.full((1, 2, 4), content)
    value = rule(jnp.concatenate([PARTS, third]), [1.0, 0.5, 2.0])
    np.testing.assert_allclose(value, rule(PARTS, [1.0, 0.5]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_row_unscorable_in_any_part_leaves_all_of_them(rule):
    parts = PARTS.at[0, 0, 1].set(NAN).at[1, 1, 3].set(NAN)
    everywhere = PARTS.at[:, 0, 1].set(NAN).at[:, 1, 3].set(NAN)
    value = rule(parts, [1.0, 0.5])
    np.testing.assert_array_equal(value, rule(everywhere, [1.0, 0.5]))
    assert value[0, 1] == 0
    assert value[1, 3] == 0
    assert jnp.isfinite(value).all()

    columns = jnp.array([[0, 2, 3], [0, 1, 2]])  # the same batch without the two rows
    kept = jnp.stack([jnp.take_along_axis(part, columns, 1) for part in parts])
    length = jnp.take_along_axis(LENGTH, columns, 1)
    if rule is summed:
        expected = normalise(kept[0] + 0.5 * kept[1], length)
    else:
        expected = rule(kept, [1.0, 0.5], length=length)
    np.testing.assert_allclose(
        jnp.take_along_axis(value, columns, 1), expected, rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_nothing_scorable_or_nothing_weighed_is_zero(rule):
    np.testing.assert_array_equal(rule(jnp.full_like(PARTS, NAN), [1.0, 0.5]), 0)
    np.testing.assert_array_equal(rule(PARTS, [0.0, 0.0]), 0)


# ---------------------------------------------------------------- ties, order, jit


@pytest.mark.parametrize("rule", [summed, partial(alone, whiten=ROWS)])
def test_a_group_that_is_tied_in_every_part_is_exactly_zero(rule):
    rng = np.random.default_rng(0)
    live = rng.random((2, 1, 8)).astype(np.float32)
    dead = np.broadcast_to(np.array([0.7, 0.1], np.float32)[:, None, None], (2, 1, 8))
    parts = jnp.asarray(np.concatenate([dead, live], axis=1))
    length = jnp.arange(16).reshape(2, 8)
    if rule is summed:
        value = summed(parts, [1.0, 0.3], partial(normalise, length=length, eps=1e-8))
    else:
        value = rule(parts, [1.0, 0.3], length=length, eps=1e-8)
    np.testing.assert_array_equal(value[0], 0)
    assert (jnp.abs(value[1]) > 0).all()


def test_as_verl_has_it_a_tied_group_is_moved():
    parts = PARTS.at[:, 1].set(0.7)
    value = alone(parts, [1.0, 0.5], TOKENS)
    assert (jnp.abs(value[1]) > 0.01).all()
    np.testing.assert_allclose(value[1], value[1, 0])


@pytest.mark.parametrize("whiten", WHITEN)
def test_permuted_parts_rows_and_groups(whiten):
    rng = np.random.default_rng(0)
    parts, length = rng.random((3, 5, 4)).astype(np.float32), rng.integers(1, 9, (5, 4))
    weight = np.array([1.0, 0.3, 0.7], np.float32)
    order, rows, columns = rng.permutation(3), rng.permutation(5), rng.permutation(4)
    whole = alone(jnp.asarray(parts), weight, WHITEN[whiten], jnp.asarray(length))
    moved = alone(
        jnp.asarray(parts[order][:, rows][:, :, columns]),
        weight[order],
        WHITEN[whiten],
        jnp.asarray(length[rows][:, columns]),
    )
    np.testing.assert_allclose(moved, np.asarray(whole)[rows][:, columns], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_weights_may_be_swept_in_one_jit(rule):
    parts = PARTS.at[1, 0, 0].set(NAN)
    weights = jnp.array([[1.0, 0.5], [1.0, 0.0], [0.2, -1.0]])
    swept = jax.jit(jax.vmap(partial(rule, parts)))(weights)
    for value, weight in zip(swept, weights, strict=True):
        np.testing.assert_allclose(value, rule(parts, weight), rtol=1e-5, atol=1e-6)
    assert swept[1, 0, 0] != 0  # scorable, where the NaN doesn't count
    assert swept[0, 0, 0] == 0


def test_whiten_may_be_any_scale():
    value = alone(PARTS, [1.0, 0.0], scale.none)
    np.testing.assert_allclose(value, normalise(PARTS[0]), rtol=1e-6)
