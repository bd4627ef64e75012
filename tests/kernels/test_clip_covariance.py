"""Clip-Cov and KL-Cov: which tokens they pick, and what becomes of them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import clip
from grpo_jax.kernels.clip_covariance import clip_cov, kl_cov
from grpo_jax.rules import asks, sees_all_rows

WHOLE = {"low": 0.2, "high": 0.2, "covariance_low": -1e9, "covariance_high": 1e9}
KEY = jax.random.key(0)


@pytest.fixture
def batch():
    """log_ratio, advantage [B, 1], logp, mask; float64, 31 tokens."""
    rng = np.random.default_rng(5)
    mask = np.arange(7) < np.array([7, 3, 1, 5, 0, 6, 2, 7])[:, None]
    with jax.enable_x64(True):
        yield tuple(
            jnp.asarray(x)
            for x in (
                rng.normal(0, 0.3, (8, 7)),
                rng.normal(size=(8, 1)),
                -rng.exponential(1.0, (8, 7)),
                mask,
            )
        )


def covariance(advantage, logp, mask):
    advantage = np.broadcast_to(advantage, mask.shape)
    mask = np.asarray(mask)
    part = (advantage - advantage[mask].mean()) * (np.asarray(logp) - np.asarray(logp)[mask].mean())
    return np.where(mask, part, -np.inf)


def test_they_ask_for_all_rows_and_a_key():
    assert sees_all_rows(partial(clip_cov, share=1.0, **WHOLE))
    assert sees_all_rows(partial(kl_cov, share=1.0, coef=1.0))
    assert asks(clip_cov, "key")
    assert not asks(kl_cov, "key")


# clip_cov


def test_clip_cov_with_a_share_of_one_takes_every_candidate(batch):
    log_ratio, advantage, logp, mask = batch
    constants = WHOLE | {"covariance_low": -0.2, "covariance_high": 0.4}
    objective, clipped = clip_cov(*batch, key=KEY, share=1.0, **constants)
    plain, by_clip = clip.bounded(*batch, low=0.2, high=0.2)
    cov = covariance(advantage, logp, mask)
    candidate = (cov > -0.2) & (cov < 0.4) & ~np.asarray(by_clip)
    assert 3 < candidate.sum() < 20
    assert (np.asarray(by_clip) & (cov > -0.2) & (cov < 0.4)).any()  # these it leaves to the clip
    np.testing.assert_array_equal(objective, np.where(candidate, 0, plain))
    np.testing.assert_array_equal(clipped, candidate | np.asarray(by_clip))
    gradient = jax.grad(lambda x: clip_cov(x, *batch[1:], key=KEY, share=1.0, **constants)[0].sum())
    np.testing.assert_array_equal(np.asarray(gradient(log_ratio))[candidate], 0)


@pytest.mark.parametrize(("share", "count"), [(1e-9, 1), (0.1, 3), (0.129, 3), (0.5, 15)])
def test_clip_cov_draws_a_share_of_all_tokens_and_at_least_one(batch, share, count):
    wide = WHOLE | {"low": 9.0, "high": 9.0}  # nothing is clipped by the clip itself
    _, clipped = clip_cov(*batch, key=KEY, share=share, **wide)
    assert batch[3].sum() == 31
    assert clipped.sum() == count
    assert not (clipped & ~batch[3]).any()


def test_clip_cov_without_candidates_is_the_clip(batch):
    nobody = WHOLE | {"covariance_low": 1e6}
    for a, b in zip(
        clip_cov(*batch, key=KEY, share=1.0, **nobody),
        clip.bounded(*batch, low=0.2, high=0.2),
        strict=True,
    ):
        np.testing.assert_array_equal(a, b)


def test_clip_cov_is_strict_about_its_bounds():
    logp, advantage = jnp.array([[1.0, -1.0, 3.0, -3.0]]), jnp.array([[1.0, -1.0, 1.0, -1.0]])
    mask = jnp.ones((1, 4), bool)  # covariances 1, 1, 3, 3
    rule = partial(clip_cov, jnp.zeros((1, 4)), advantage, logp, mask, key=KEY, share=1.0)
    for low, high, drawn in ((0, 3, [1, 1, 0, 0]), (1, 4, [0, 0, 1, 1]), (1, 3, [0] * 4)):
        _, clipped = rule(low=0.2, high=0.2, covariance_low=low, covariance_high=high)
        np.testing.assert_array_equal(clipped, [drawn])


def test_clip_cov_draws_each_candidate_as_often(batch):
    wide = WHOLE | {"low": 9.0, "high": 9.0}
    keys = jax.random.split(jax.random.key(1), 4000)
    draw = jax.jit(jax.vmap(lambda key: clip_cov(*batch, key=key, share=0.1, **wide)[1]))
    drawn = np.asarray(draw(keys)).sum(0)[np.asarray(batch[3])]
    expected = 4000 * 3 / 31
    assert ((drawn - expected) ** 2 / expected).sum() < 59.7  # chi-square, 30 degrees, p = 0.001
    again = clip_cov(*batch, key=KEY, share=0.1, **wide)[1]
    np.testing.assert_array_equal(again, clip_cov(*batch, key=KEY, share=0.1, **wide)[1])


# kl_cov


@pytest.mark.parametrize(("share", "count"), [(1e-9, 1), (0.2, 6), (1.0, 31)])
def test_kl_cov_penalises_the_tokens_of_highest_covariance(batch, share, count):
    log_ratio, advantage, logp, mask = batch
    cov = covariance(advantage, logp, mask)
    top = cov >= np.sort(cov, axis=None)[-count]
    assert top.sum() == count
    objective, clipped = kl_cov(*batch, share=share, coef=0.3)
    plain = np.where(mask, np.exp(log_ratio) * advantage, 0)
    np.testing.assert_allclose(objective, plain - np.where(top, 0.3 * abs(log_ratio), 0), rtol=1e-9)
    assert not clipped.any()
    gradient = jax.grad(lambda x: kl_cov(x, *batch[1:], share=share, coef=0.3)[0].sum())(log_ratio)
    slope = plain - np.where(top, 0.3 * np.sign(log_ratio), 0)
    np.testing.assert_allclose(gradient, slope, rtol=1e-9)


def test_kl_cov_on_policy_has_the_gradient_of_ppo(batch):
    _, advantage, logp, mask = batch
    f = jax.grad(lambda x: kl_cov(x, advantage, logp, mask, share=1.0, coef=1.0)[0].sum())
    np.testing.assert_allclose(f(jnp.zeros_like(logp)), np.where(mask, advantage, 0), rtol=1e-12)


def test_kl_cov_breaks_ties_by_position():
    logp, advantage = jnp.array([[-1.0, 1.0], [-1.0, 1.0]]), jnp.array([[-1.0, 1.0]] * 2)
    log_ratio = jnp.ones((2, 2))
    plain, _ = clip.importance(log_ratio, advantage, logp, jnp.ones((2, 2), bool))
    for share, marked in ((0.25, [[1, 0], [0, 0]]), (0.5, [[1, 1], [0, 0]])):
        objective, _ = kl_cov(
            log_ratio, advantage, logp, jnp.ones((2, 2), bool), share=share, coef=1.0
        )
        np.testing.assert_allclose(plain - objective, marked, atol=1e-6)


def test_rubbish_behind_the_mask_moves_no_mean(batch):
    log_ratio, advantage, logp, mask = batch
    for rubbish in (jnp.nan, 1e30, -jnp.inf):
        dirty = jnp.where(mask, jnp.broadcast_to(advantage, mask.shape), rubbish)
        there = (jnp.where(mask, log_ratio, rubbish), dirty, jnp.where(mask, logp, rubbish), mask)
        for rule in (
            partial(kl_cov, share=0.2, coef=0.3),
            partial(clip_cov, key=KEY, share=0.2, **WHOLE),
        ):
            for a, b in zip(rule(*batch), rule(*there), strict=True):
                np.testing.assert_allclose(a, b, rtol=1e-9)


def test_constants_may_be_swept_in_one_jit(batch):
    def f(share, x):
        drawn = clip_cov(*batch, key=KEY, share=share, **(WHOLE | {"covariance_low": x}))
        return drawn, kl_cov(*batch, share=share, coef=x)

    swept = jax.jit(jax.vmap(f))(jnp.array([0.1, 0.4]), jnp.array([0.0, 0.5]))
    for index, (share, x) in enumerate(((0.1, 0.0), (0.4, 0.5))):
        for a, b in zip(jax.tree.leaves(swept), jax.tree.leaves(f(share, x)), strict=True):
            np.testing.assert_allclose(a[index], b, rtol=1e-9)
