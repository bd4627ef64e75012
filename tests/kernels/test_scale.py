"""What the centred reward is divided by."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import scale
from grpo_jax.rules import call

NAN = jnp.nan
REWARD = jnp.array([[1.0, 0.0, 0.0, 1.0], [2.0, 0.5, -0.5, 0.0]])
CENTERED = REWARD - REWARD.mean(1, keepdims=True)
EVERY = {
    "none": scale.none,
    "group_std": partial(scale.group_std, ddof=0, eps=0.0),
    "batch_std": partial(scale.batch_std, ddof=0, eps=0.0),
    "group_mean": scale.group_mean,
    "whiten": partial(scale.whiten, ddof=0, eps=0.0, hold_tied=False),
    "whiten_held": partial(scale.whiten, ddof=0, eps=0.0, hold_tied=True),
    "whiten_tokens": partial(scale.whiten_tokens, ddof=0, eps=0.0, hold_tied=False),
    "pass_at_k_std": partial(scale.pass_at_k_std, k=2, right=0.25),
    "informative_share": scale.informative_share,
    "nonzero_share": scale.nonzero_share,
}
LENGTH = jnp.array([[4, 1, 1, 2], [1, 2, 1, 4]])


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [0.0, 1e-4, 0.5])
def test_std_of_the_group_of_the_batch_and_whitening(ddof, eps):
    reward, centered = np.asarray(REWARD), np.asarray(CENTERED)
    group = centered / (reward.std(1, ddof=ddof, keepdims=True) + eps)
    np.testing.assert_allclose(
        scale.group_std(CENTERED, REWARD, ddof=ddof, eps=eps), group, rtol=1e-5
    )
    batch = centered / (reward.std(ddof=ddof) + eps)
    np.testing.assert_allclose(
        scale.batch_std(CENTERED, REWARD, ddof=ddof, eps=eps), batch, rtol=1e-5
    )
    shifted = centered + 0.25
    white = (shifted - shifted.mean()) / (shifted.std(ddof=ddof) + eps)
    np.testing.assert_allclose(
        scale.whiten(CENTERED + 0.25, REWARD, ddof=ddof, eps=eps, hold_tied=True),
        white,
        rtol=1e-5,
    )


def test_batch_std_is_of_the_raw_rewards():
    reward = jnp.array([[10.0, 12.0], [0.0, 2.0]])
    centered = jnp.array([[-1.0, 1.0], [-1.0, 1.0]])
    expected = np.asarray(centered) / np.std([10, 12, 0, 2])
    np.testing.assert_allclose(
        scale.batch_std(centered, reward, ddof=0, eps=0.0), expected, rtol=1e-6
    )


def test_group_mean_divides_by_the_mean_where_there_is_one():
    reward = jnp.array([[1.0, 0.0, 0.0, 0.0], [0.0] * 4, [-1.0, 0.5, 0.0, 0.0]])
    centered = reward - reward.mean(1, keepdims=True)
    expected = [[3, -1, -1, -1], [0] * 4, [0] * 4]
    np.testing.assert_array_equal(scale.group_mean(centered, reward), expected)


def test_rewards_that_cancel_to_a_rounding_error_are_not_blown_up():
    reward = jnp.array([[0.1, 0.2, -0.3, 0.0]], jnp.float32)
    assert 0 < abs(float(reward.mean())) < 1e-7 or reward.mean() == 0
    np.testing.assert_array_equal(scale.group_mean(reward, reward), 0)


@pytest.mark.parametrize("rule", EVERY.values(), ids=EVERY)
def test_unscorable_rows_get_zero_and_leave_the_statistics(rule):
    reward = REWARD.at[0, 1].set(NAN).at[1, 3].set(NAN)
    columns = jnp.array([[0, 2, 3], [0, 1, 2]])
    kept = jnp.take_along_axis(reward, columns, 1)
    centered = kept - 0.25
    scaled = call(rule, reward - 0.25, reward, length=LENGTH)
    assert scaled[0, 1] == 0
    assert scaled[1, 3] == 0
    alone = call(rule, centered, kept, length=jnp.take_along_axis(LENGTH, columns, 1))
    np.testing.assert_allclose(jnp.take_along_axis(scaled, columns, 1), alone, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("rule", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("value", [0.7, 0.0, NAN])
def test_a_batch_with_no_spread_divides_by_one(rule, value):
    reward = jnp.full((2, 8), value, jnp.float32)
    scaled = call(rule, reward * 0, reward, length=jnp.arange(16).reshape(2, 8))
    np.testing.assert_array_equal(scaled, 0)


def test_a_tied_group_keeps_what_another_baseline_gave_it():
    reward = jnp.array([[1.0, 1.0], [0.0, 1.0]])
    centered = reward - 0.75
    scaled = scale.group_std(centered, reward, ddof=0, eps=0.0)
    np.testing.assert_array_equal(scaled, [[0.25, 0.25], [-1.5, 0.5]])
    white = scale.whiten(centered, reward, ddof=0, eps=0.0, hold_tied=True)
    np.testing.assert_allclose(white.mean(), 0, atol=1e-7)
    np.testing.assert_allclose(white.std(), 1, rtol=1e-6)


def test_whitening_leaves_a_dead_group_at_exactly_zero():
    centered = jnp.array([[0.0, 0.0, 0.0], [0.7, -0.1, 0.3]])  # as length_weighted leaves them
    reward = jnp.array([[0.7, 0.7, 0.7], [1.0, 0.2, 0.6]])
    white = scale.whiten(centered, reward, ddof=0, eps=1e-8, hold_tied=True)
    np.testing.assert_array_equal(white[0], 0)
    assert (jnp.abs(white[1]) > 0.1).all()
    moved = scale.whiten(centered, reward, ddof=0, eps=1e-8, hold_tied=False)
    np.testing.assert_allclose(moved[0], -0.15 / np.std([0, 0, 0, 0.7, -0.1, 0.3]), rtol=1e-5)
    np.testing.assert_allclose(moved[1], white[1])


def test_a_group_that_failed_is_below_the_mean_of_a_batch_without_baseline():
    reward = jnp.array([[0.0, 0.0], [1.0, 1.0]])
    white = scale.whiten(reward, reward, ddof=0, eps=0.0, hold_tied=False)
    np.testing.assert_allclose(white, [[-1, -1], [1, 1]])
    tokens = scale.whiten_tokens(
        reward, reward, length=jnp.ones((2, 2), int), ddof=0, eps=0.0, hold_tied=False
    )
    np.testing.assert_allclose(tokens, [[-1, -1], [1, 1]])


# ---------------------------------------------------------------- whitening over tokens


def whiten_tokens(centered, reward, length, ddof=1, eps=1e-8, hold_tied=False):
    return scale.whiten_tokens(
        centered, reward, length=length, ddof=ddof, eps=eps, hold_tied=hold_tied
    )


def test_whitening_over_tokens_by_hand():
    centered = jnp.array([[1.0, -1.0]])
    value = whiten_tokens(centered, centered, jnp.array([[3, 1]]), ddof=0, eps=0.25)
    # tokens 1, 1, 1, -1: mean 0.5, variance 0.75, and 0.25 in the root beside it
    np.testing.assert_allclose(value, [[0.5, -1.5]], rtol=1e-6)


@pytest.mark.parametrize("ddof", [0, 1])
@pytest.mark.parametrize("eps", [1e-8, 0.1])
def test_whitening_over_tokens_is_whitening_each_rows_tokens(ddof, eps):
    rng = np.random.default_rng(0)
    centered, length = rng.normal(size=(5, 4)), rng.integers(0, 9, (5, 4))
    tokens = np.repeat(centered.reshape(-1), length.reshape(-1))
    expected = (centered - tokens.mean()) / np.sqrt(tokens.var(ddof=ddof) + eps)
    with jax.enable_x64(True):
        x = jnp.asarray(centered)
        value = np.asarray(whiten_tokens(x, x, jnp.asarray(length), ddof, eps))
    np.testing.assert_allclose(value, expected, rtol=1e-9)
    np.testing.assert_allclose((length * value).sum(), 0, atol=1e-9)


def test_rows_of_one_length_are_whitened_as_rows():
    value = whiten_tokens(CENTERED + 0.25, REWARD, jnp.full((2, 4), 3), ddof=0, eps=0.0)
    rows = scale.whiten(CENTERED + 0.25, REWARD, ddof=0, eps=0.0, hold_tied=False)
    np.testing.assert_allclose(value, rows, rtol=1e-5)


def test_the_mean_over_tokens_moves_a_tied_group_unless_it_is_held():
    reward = jnp.array([[0.7, 0.7], [1.0, 0.0]], jnp.float32)
    centered = jnp.array([[0.0, 0.0], [0.5, -0.5]], jnp.float32)
    length = jnp.array([[2, 2], [6, 2]])
    moved = whiten_tokens(centered, reward, length)
    held = whiten_tokens(centered, reward, length, hold_tied=True)
    assert (moved[0] < -0.1).all()  # the right answer is the long one
    np.testing.assert_array_equal(held[0], 0)
    np.testing.assert_array_equal(held[1], moved[1])


def test_no_tokens_and_one_token_are_finite():
    for length in ([[0, 0], [0, 0]], [[0, 1], [0, 0]]):
        value = whiten_tokens(CENTERED[:, :2], REWARD[:, :2], jnp.array(length))
        np.testing.assert_array_equal(value, 0)


# ---------------------------------------------------------------- Pass@k and GPG


def test_the_deviation_of_pass_at_k_by_hand():
    reward = jnp.array([[1.0, 0.0, 0.0, 0.0]])  # k = 2: P = 1/2, deviation 1/2
    value = scale.pass_at_k_std(jnp.full((1, 4), 0.3), reward, k=2, right=0.5)
    np.testing.assert_allclose(value, 0.6, rtol=1e-6)
    value = scale.pass_at_k_std(jnp.full((1, 4), 0.3), reward, k=1, right=0.5)  # P = 1/4
    np.testing.assert_allclose(value, 0.3 / np.sqrt(3 / 16), rtol=1e-6)


@pytest.mark.parametrize("rights", [0, 3, 4])  # of 4, two drawn: surely wrong, surely right
def test_a_sure_draw_has_no_deviation_and_no_advantage(rights):
    reward = (jnp.arange(4) < rights).astype(jnp.float32)[None]
    value = scale.pass_at_k_std(jnp.full((1, 4), 0.3), reward, k=2, right=0.5)
    np.testing.assert_array_equal(value, 0)


def test_gpg_counts_groups_and_verl_counts_rewards():
    reward = jnp.array([[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [NAN, NAN]])
    centered = jnp.array([[0.5, -0.5], [0.0, 0.0], [0.0, 0.0], [NAN, NAN]])
    groups = scale.informative_share(centered, reward)
    np.testing.assert_allclose(groups[0], [1.5, -1.5])  # 3 groups, 1 of them differs
    rows = scale.nonzero_share(centered, reward)
    np.testing.assert_allclose(rows[0], [1, -1])  # 6 rows, 3 of them not 0
    np.testing.assert_array_equal(groups[1:], 0)
    np.testing.assert_array_equal(rows[1:], 0)


def test_gpg_does_not_depend_on_the_zero_of_the_reward_and_verls_reading_does():
    reward = jnp.array([[1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    centered = reward - reward.mean(1, keepdims=True)
    for shift, rows in ((0, 6), (-0.5, 1)):
        value = scale.informative_share(centered, reward + shift)
        np.testing.assert_allclose(value, 3 * centered)
        np.testing.assert_allclose(
            scale.nonzero_share(centered, reward + shift), rows * centered, rtol=1e-6
        )


def test_nothing_informative_divides_by_one():
    reward = jnp.array([[0.7, 0.7 + 5e-7], [0.0, 0.0]], jnp.float32)
    value = scale.informative_share(reward - 0.25, reward)
    np.testing.assert_array_equal(value, reward - 0.25)
    zero = jnp.zeros((2, 2))
    np.testing.assert_array_equal(scale.nonzero_share(zero + 0.5, zero), 2)  # 4 rows / 1


# ---------------------------------------------------------------- all of them


@pytest.mark.parametrize("rule", EVERY.values(), ids=EVERY)
def test_permuted_rows_and_groups(rule):
    rng = np.random.default_rng(0)
    reward, length = rng.random((5, 4)).astype(np.float32), rng.integers(1, 9, (5, 4))
    reward[3] = 0.7
    centered = reward - reward.mean(1, keepdims=True)
    rows, columns = rng.permutation(5), rng.permutation(4)

    def f(*arrays, length):
        return call(rule, *(jnp.asarray(x) for x in arrays), length=jnp.asarray(length))

    whole = np.asarray(f(centered, reward, length=length))
    moved = [x[rows][:, columns] for x in (centered, reward, length)]
    np.testing.assert_allclose(
        f(*moved[:2], length=moved[2]), whole[rows][:, columns], rtol=1e-4, atol=1e-6
    )


def test_constants_may_be_swept_in_one_jit():
    def f(ddof, eps, hold_tied, k, right):
        white = scale.whiten(CENTERED, REWARD, ddof=ddof, eps=eps, hold_tied=hold_tied)
        tokens = whiten_tokens(CENTERED, REWARD, LENGTH, ddof, eps, hold_tied)
        return white, tokens, scale.pass_at_k_std(CENTERED, REWARD, k=k, right=right)

    knobs = [(0, 1e-8, True, 1, 0.25), (1, 0.1, False, 2, 0.75)]
    swept = jax.jit(jax.vmap(f))(*(jnp.array(x) for x in zip(*knobs, strict=True)))
    for i, constants in enumerate(knobs):
        for value, alone in zip(swept, f(*constants), strict=True):
            np.testing.assert_allclose(value[i], alone, rtol=1e-5, atol=1e-6)
