"""Corrections with a lower bound, with another one inside, and for a sampler that cannot tell."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import correction
from grpo_jax.rules import sees_all_rows

RHO = jnp.array([[0.5, 1.5, 4.0, 9.0], [1.2, 1.1, 9.0, 9.0]])  # 9.0 lies behind the mask
SAMPLER = jnp.array([[-1.0, -2.0, -3.0, -4.0], [-0.5, -1.5, -2.5, -3.5]])
OLD = SAMPLER + jnp.log(RHO)
MASK = jnp.array([[True, True, True, False], [True, True, False, False]])
NOTHING = jnp.zeros_like(MASK)
TRUNCATE = partial(correction.token_truncate, cap=3.0)
BAD = jnp.array([[-1.0], [-1.0]])


def off_policy(moved, advantage=BAD, threshold=0.5, rule=correction.none, sampler=SAMPLER):
    """With the policy `moved` nats a token below the sampler."""
    logp = SAMPLER - jnp.asarray(moved)[:, None]
    given = {"logp": logp, "advantage": advantage, "threshold": threshold, "rule": rule}
    return correction.off_policy_sequence(OLD, sampler, MASK, **given)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (partial(correction.token_truncate, low=0.7, cap=3), [[0.7, 1.5, 3, 1], [1.2, 1.1, 1, 1]]),
        (partial(correction.sequence_truncate, low=0, cap=5), [[3, 3, 3, 1], [1.32, 1.32, 1, 1]]),
        (partial(correction.sequence_truncate, low=1.5, cap=2), [[2, 2, 2, 1], [1.5, 1.5, 1, 1]]),
    ],
)
def test_truncation_from_below(rule, expected):
    np.testing.assert_allclose(rule(OLD, SAMPLER, MASK), expected, rtol=1e-5)


def test_a_bad_answer_that_the_policy_has_left_is_dropped():
    keep, drop = np.ones((1, 4)), [[0, 0, 0, 1]]
    np.testing.assert_array_equal(off_policy([0.6, 0.4])[:1], drop)
    np.testing.assert_array_equal(off_policy([0.6, 0.4])[1:], keep)
    np.testing.assert_array_equal(off_policy([0.6, 0.6], advantage=-BAD), np.ones((2, 4)))
    np.testing.assert_array_equal(off_policy([0.6, 0.6], advantage=0 * BAD), np.ones((2, 4)))
    np.testing.assert_array_equal(off_policy([-0.6, -0.6]), np.ones((2, 4)))  # nearer: kept
    np.testing.assert_array_equal(off_policy([0.6, 0.4], threshold=0.7)[:1], keep)


def test_off_policy_averages_over_the_rows_own_tokens():
    logp = SAMPLER - jnp.array([[1.6, 0.0, 0.0, 99.0], [0.9, 0.0, 99.0, 99.0]])  # means .53, .45
    weight = correction.off_policy_sequence(
        OLD, SAMPLER, MASK, logp=logp, advantage=BAD, threshold=0.5, rule=TRUNCATE
    )
    np.testing.assert_allclose(weight, [[0, 0, 0, 1], [1.2, 1.1, 1, 1]], rtol=1e-5)


def test_off_policy_with_advantages_by_token_drops_those_below_zero():
    advantage = jnp.array([[-1.0, 1.0, -1.0, -1.0], [-1.0, 1.0, 1.0, 1.0]])
    weight = off_policy([0.6, 0.4], advantage=advantage)
    np.testing.assert_array_equal(weight, [[0, 1, 0, 1], [1, 1, 1, 1]])


def test_batch_normalised_by_tokens_and_by_rows():
    tokens = correction.batch_normalised(OLD, SAMPLER, MASK, rule=TRUNCATE, by_row=False)
    mean = (0.5 + 1.5 + 3 + 1.2 + 1.1) / 5
    expected = np.array([[0.5, 1.5, 3, mean], [1.2, 1.1, mean, mean]]) / mean
    np.testing.assert_allclose(tokens, expected, rtol=1e-5)

    whole = partial(correction.sequence_truncate, cap=2.0)
    rows = correction.batch_normalised(OLD, SAMPLER, MASK, rule=whole, by_row=True)
    expected = np.array([[2, 2, 2, 1.66], [1.32, 1.32, 1.66, 1.66]]) / 1.66
    np.testing.assert_allclose(rows, expected, rtol=1e-5)
    taller = [jnp.concatenate([x, x[:1]]) for x in (OLD, SAMPLER)]
    mask = jnp.concatenate([MASK, NOTHING[:1]])  # an empty row
    again = correction.batch_normalised(*taller, mask, rule=whole, by_row=True)
    np.testing.assert_allclose(again[:2], expected, rtol=1e-5)


@pytest.mark.parametrize("by_row", [False, True])
def test_weights_that_are_all_zero_stay_zero(by_row):
    none_fits = partial(correction.token_mask, low=50.0, high=60.0)
    weight = correction.batch_normalised(OLD, SAMPLER, MASK, rule=none_fits, by_row=by_row)
    np.testing.assert_array_equal(weight, ~MASK)


COMPOSED = {
    "off_policy": lambda old, sampler, mask: correction.off_policy_sequence(
        old, sampler, mask, logp=old - 1, advantage=BAD, threshold=0.9, rule=TRUNCATE
    ),
    "by_token": partial(correction.batch_normalised, rule=TRUNCATE, by_row=False),
    "by_row": partial(correction.batch_normalised, rule=TRUNCATE, by_row=True),
    "bounded": partial(correction.sequence_truncate, low=0.5, cap=2.0),
}


@pytest.mark.parametrize("rule", COMPOSED.values(), ids=COMPOSED)
def test_no_gradient_and_no_rubbish_from_behind_the_mask(rule):
    for rubbish in (jnp.nan, jnp.inf, -jnp.inf):
        old, sampler = (jnp.where(MASK, x, rubbish) for x in (OLD, SAMPLER))
        np.testing.assert_allclose(rule(old, sampler, MASK), rule(OLD, SAMPLER, MASK))
        gradients = jax.grad(lambda a, b: rule(a, b, MASK).sum(), argnums=(0, 1))(old, sampler)
        np.testing.assert_array_equal(jnp.stack(gradients), 0)
        np.testing.assert_array_equal(rule(old, sampler, NOTHING), 1)


def test_a_token_that_the_sampler_could_not_score_has_no_correction():
    unsure = SAMPLER.at[0, 2].set(jnp.nan)  # the one of rho 4
    np.testing.assert_allclose(TRUNCATE(OLD, unsure, MASK)[0], [0.5, 1.5, 1, 1], rtol=1e-5)
    whole = correction.sequence_mask(OLD, unsure, MASK, low=0.0, high=3.0)
    np.testing.assert_allclose(whole[0], [0.75, 0.75, 0.75, 1], rtol=1e-5)
    # a mean of (0.9 + 0.9 + 0) / 3 and not of two, as TRL
    np.testing.assert_array_equal(off_policy([0.9, 0.9], threshold=0.7, sampler=unsure)[0], 1)
    weight = off_policy([0.9, 0.9], threshold=0.5, sampler=unsure)
    np.testing.assert_array_equal(weight[0], [0, 0, 0, 1])


def test_a_nan_of_the_trainer_stays_visible():
    broken = OLD.at[0, 0].set(jnp.nan)
    assert jnp.isnan(TRUNCATE(broken, SAMPLER, MASK)[0, 0])
    assert jnp.isnan(TRUNCATE(broken, SAMPLER.at[0, 0].set(jnp.nan), MASK)[0, 0])


def test_normalising_sees_all_rows_wherever_it_is_nested():
    inside = partial(correction.batch_normalised, rule=TRUNCATE, by_row=False)
    assert sees_all_rows(inside)
    assert sees_all_rows(partial(correction.off_policy_sequence, threshold=0.5, rule=inside))
    assert not sees_all_rows(partial(correction.off_policy_sequence, threshold=0.5, rule=TRUNCATE))


def test_constants_may_be_swept():
    swept = jax.jit(
        jax.vmap(lambda low: correction.token_truncate(OLD, SAMPLER, MASK, cap=3.0, low=low))
    )
    np.testing.assert_allclose(swept(jnp.array([0.0, 0.7]))[:, 0, 0], [0.5, 0.7], rtol=1e-6)
    swept = jax.jit(jax.vmap(lambda t: off_policy([0.6, 0.4], threshold=t)))
    np.testing.assert_array_equal(swept(jnp.array([0.3, 0.5, 0.7]))[..., 0].sum(1), [0, 1, 2])
