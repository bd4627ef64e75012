"""Clip rules: values, gradients and what counts as clipped (public cases K10 and K15)."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import clip, clip_covariance

SYMMETRIC = partial(clip.bounded, low=0.2, high=0.2)
HIGHER = partial(clip.bounded, low=0.2, high=0.28)
DUAL = partial(clip.dual, low=0.2, high=0.2, cap=3.0)
CISPO = partial(clip.cispo, low=1.0, high=0.28)


def vespo(log_ratio, advantage, logp, mask):
    """With weights of 1, and what must not be seen behind the mask."""
    correction = jnp.where(mask, jnp.ones_like(logp), jnp.nan)
    how = {"correction": correction, "correction_level": "token"}
    constants = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0}
    constants["lambda_negative"] = 2.0
    return clip.vespo(log_ratio, advantage, logp, mask, **how, **constants)


def clip_cov(log_ratio, advantage, logp, mask):
    """It draws half of the tokens with any covariance."""
    constants = {"low": 0.2, "high": 0.2, "covariance_low": -1e9, "covariance_high": 1e9}
    key = jax.random.key(0)
    return clip_covariance.clip_cov(
        log_ratio, advantage, logp, mask, key=key, share=0.5, **constants
    )


EVERY = {
    "symmetric": SYMMETRIC,
    "higher": HIGHER,
    "dual": DUAL,
    "cispo": CISPO,
    "none": clip.none,
    "importance": clip.importance,
    "cispo_cap": partial(clip.cispo_cap, cap=5.0),
    "delta": partial(clip.delta, low=0.2, high=0.2, delta=4.0),
    "sapo": partial(clip.sapo, tau_positive=1.0, tau_negative=1.05),
    "gmpo": partial(clip.gmpo, low=0.4, high=0.4),
    "vespo": vespo,
    "dppo_tv": partial(clip.dppo_tv, low=0.2, high=0.2, cap=20.0),
    "dppo_kl": partial(clip.dppo_kl, low=0.2, high=0.2, cap=20.0),
    "clip_cov": clip_cov,
    "kl_cov": partial(clip_covariance.kl_cov, share=0.5, coef=0.1),
}


def at(rule, rho, advantage, logp=-1.0):
    """Objective, clipped and d objective / d logp of one token, whose old log-prob is held."""

    def f(x):
        log_ratio = jnp.log(jnp.float32(rho)) + x - logp
        objective, clipped = rule(
            log_ratio.reshape(1, 1),
            jnp.full((1, 1), advantage, jnp.float32),
            x.reshape(1, 1),
            jnp.ones((1, 1), bool),
        )
        return objective[0, 0], clipped[0, 0]

    (value, clipped), gradient = jax.value_and_grad(f, has_aux=True)(jnp.float32(logp))
    return float(value), bool(clipped), float(gradient)


@pytest.mark.parametrize(
    ("rho", "advantage", "symmetric", "higher"),
    [
        (0.5, 1, 0.5, 0.5),
        (0.5, -1, -0.8, -0.8),
        (1.25, 1, 1.2, 1.25),
        (1.3, 1, 1.2, 1.28),
        (1.3, -1, -1.3, -1.3),
        (10, -1, -10, -10),
    ],
)
def test_k10_the_surrogate(rho, advantage, symmetric, higher):
    assert at(SYMMETRIC, rho, advantage)[0] == pytest.approx(symmetric, rel=1e-5)
    assert at(HIGHER, rho, advantage)[0] == pytest.approx(higher, rel=1e-5)


@pytest.mark.parametrize(
    ("rho", "advantage", "gradient"), [(1.5, 1, 0), (1.5, -1, -1.5), (0.5, 1, 0.5), (0.5, -1, 0)]
)
def test_k10_the_gradient_vanishes_where_clipped(rho, advantage, gradient):
    _, clipped, measured = at(SYMMETRIC, rho, advantage)
    assert measured == pytest.approx(gradient, rel=1e-5)
    assert clipped == (gradient == 0)


def test_k10_clipped_counts_only_the_side_at_work():
    log_ratio = jnp.log(jnp.array([[0.7, 1.3, 1.3, 0.7]]))
    advantage = jnp.array([[1.0, 1.0, -1.0, -1.0]])
    mask = jnp.ones((1, 4), bool)
    for rule in (SYMMETRIC, DUAL, CISPO.func):
        rule = partial(rule, low=0.2, high=0.2) if rule is CISPO.func else rule
        _, clipped = rule(log_ratio, advantage, log_ratio, mask)
        np.testing.assert_array_equal(clipped, [[0, 1, 0, 1]])


def test_it_is_the_min_of_the_two_products():
    rng = np.random.default_rng(0)
    log_ratio = jnp.asarray(rng.normal(0, 0.4, (40, 9)), jnp.float32)
    advantage = jnp.asarray(rng.normal(size=(40, 1)), jnp.float32)
    mask = jnp.ones((40, 9), bool)
    objective, clipped = HIGHER(log_ratio, advantage, log_ratio, mask)
    rho = jnp.exp(log_ratio)
    printed = jnp.minimum(rho * advantage, jnp.clip(rho, 0.8, 1.28) * advantage)
    np.testing.assert_allclose(objective, printed, rtol=1e-6)
    assert 0.1 < clipped.mean() < 0.5


def test_on_the_edge_the_gradient_is_whole():
    ones = jnp.ones((1, 1))
    f = partial(clip.bounded, low=0.0, high=0.0, mask=jnp.ones((1, 1), bool))
    gradient = jax.grad(lambda x: f(x, ones, x)[0].sum())(jnp.zeros((1, 1)))
    assert gradient == 1  # ratio 1 = 1 + high: inside


def test_dual_caps_the_ratio_of_a_bad_answer_only():
    assert at(DUAL, 10, -1)[0] == pytest.approx(-3)
    assert at(DUAL, 10, -1)[1:] == (False, 0)  # at the cap: no gradient, no side of the region
    assert at(DUAL, 2.5, -1)[0] == pytest.approx(-2.5, rel=1e-5)
    assert at(DUAL, 10, 1)[0] == pytest.approx(1.2)
    assert at(DUAL, 0.5, -1) == at(SYMMETRIC, 0.5, -1)
    below_the_region = partial(clip.dual, low=0.2, high=1.0, cap=1.5)
    assert at(below_the_region, 1.8, 1)[0] == pytest.approx(1.8, rel=1e-5)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_k15_cispo_clips_the_weight_and_keeps_the_gradient(advantage):
    value, _, gradient = at(CISPO, 1.5, advantage, logp=-2.0)
    assert gradient == pytest.approx(1.28 * advantage, rel=1e-6)
    assert value == pytest.approx(1.28 * advantage * -2.0, rel=1e-6)
    assert at(CISPO, 0.01, advantage)[2] == pytest.approx(0.01 * advantage, rel=1e-5)
    floor = partial(clip.cispo, low=0.2, high=0.28)
    assert at(floor, 0.5, advantage)[2] == pytest.approx(0.8 * advantage, rel=1e-5)


def test_none_is_reinforce_and_importance_is_unbounded():
    assert at(clip.none, 7.0, 0.5, logp=-2.0) == (-1.0, False, 0.5)
    value, clipped, gradient = at(clip.importance, 7.0, 0.5)
    assert (value, gradient) == pytest.approx((3.5, 3.5), rel=1e-5)
    assert not clipped


# Every rule, on arrays of one shape: each operation of another shape is one more to compile.


@pytest.mark.parametrize("rule", EVERY.values(), ids=EVERY)
def test_zero_behind_the_mask_whatever_lies_there(rule):
    seen = np.array([[True, False, False], [False, False, True]])
    mask = jnp.asarray(seen)
    for rubbish in (np.nan, np.inf, -np.inf):
        x = jnp.asarray(np.where(seen, 0.5, rubbish), jnp.float32)
        advantage = jnp.array([[1.0, rubbish, -1.0], [-1.0, rubbish, 1.0]])

        def f(log_ratio, logp, advantage=advantage):
            objective, clipped = rule(log_ratio, advantage, logp, mask)
            return objective.sum(), (objective, clipped)

        results = jax.value_and_grad(f, argnums=(0, 1), has_aux=True)(x, x)
        (value, (objective, clipped)), gradients = jax.tree.map(np.asarray, results)
        assert np.isfinite(value)
        for gradient in gradients:
            assert np.isfinite(gradient).all()
            np.testing.assert_array_equal(gradient[~seen], 0)
        np.testing.assert_array_equal(objective[~seen], 0)
        assert not clipped[~seen].any()


@pytest.mark.parametrize("rule", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_a_ratio_that_would_overflow_stays_finite(rule, sign):
    mask = jnp.ones((2, 3), bool)
    log_ratio = jnp.array([[200.0, -200.0, 0.0], [0.0, -200.0, 200.0]], jnp.float32)
    advantage = jnp.full((2, 1), sign)
    value, gradient = jax.value_and_grad(lambda x: rule(x, advantage, x, mask)[0].sum())(log_ratio)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("rule", EVERY.values(), ids=EVERY)
def test_a_batch_of_nothing_is_nothing(rule):
    x, advantage, mask = (
        jnp.full((2, 3), jnp.nan),
        jnp.full((2, 1), jnp.nan),
        jnp.zeros((2, 3), bool),
    )

    def f(x):
        objective, clipped = rule(x, advantage, x, mask)
        return objective.sum(), clipped

    (value, clipped), gradient = jax.value_and_grad(f, has_aux=True)(x)
    assert value == 0
    np.testing.assert_array_equal(gradient, 0)
    assert not np.asarray(clipped).any()


@pytest.mark.parametrize("rule", EVERY.values(), ids=EVERY)
def test_the_dtype_is_that_of_the_input(rule):
    x, mask = np.ones((2, 3), np.float32), np.ones((2, 3), bool)
    with jax.enable_x64(True):
        objective, clipped = jax.eval_shape(rule, x, x[:, :1], x, mask)
    assert (objective.dtype, clipped.dtype) == (jnp.float32, jnp.bool)


@pytest.mark.parametrize("rule", EVERY.values(), ids=EVERY)
def test_a_nan_in_front_of_the_mask_stays_visible(rule):
    x = jnp.full((2, 3), jnp.nan)
    objective, _ = rule(x, jnp.ones((2, 1)), x, jnp.ones((2, 3), bool))
    assert np.isnan(objective).all()


def test_an_advantage_a_row_is_an_advantage_for_each_of_its_tokens():
    log_ratio = jnp.array([[0.5, -0.5, 0.1], [0.5, -0.5, 0.1]])
    row = jnp.array([[1.0], [-2.0]])
    mask = jnp.ones((2, 3), bool)
    for rule in EVERY.values():
        for a, b in zip(
            rule(log_ratio, row, log_ratio, mask),
            rule(log_ratio, jnp.broadcast_to(row, (2, 3)), log_ratio, mask),
            strict=True,
        ):
            np.testing.assert_array_equal(a, b)


def test_constants_may_be_swept_in_one_jit():
    log_ratio = jnp.log(jnp.array([[1.25, 1.3, 0.5]]))
    advantage, mask = jnp.ones((1, 1)), jnp.ones((1, 3), bool)

    def f(low, high):
        return clip.bounded(log_ratio, advantage, log_ratio, mask, low=low, high=high)[0]

    swept = jax.jit(jax.vmap(f))(jnp.array([0.2, 0.2]), jnp.array([0.2, 0.28]))
    np.testing.assert_allclose(swept[:, 0], [[1.2, 1.2, 0.5], [1.25, 1.28, 0.5]], rtol=1e-6)
