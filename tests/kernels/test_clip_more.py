"""Clip rules beyond PPO's: hand-computed values, and the papers' formulas in float64 numpy.

Masks, overflow, dtypes and NaN are tested for all rules at once in `test_clip.py`.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels import aggregation, clip, correction, ratio
from grpo_jax.rules import asks
from tests.kernels.test_clip import at

VESPO = {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0}
close = partial(np.testing.assert_allclose, rtol=1e-9, atol=1e-12)


@pytest.fixture
def batch():
    """log_ratio, advantage [B, 1], logp, mask; float64, with ratios from 0.05 to 20."""
    rng = np.random.default_rng(3)
    mask = np.arange(7) < np.array([7, 3, 1, 5, 0, 6, 2, 7])[:, None]
    logp = -rng.exponential(1.0, (8, 7)) - 0.01
    log_ratio = np.maximum(rng.normal(0, 1, (8, 7)), logp)  # the old log-prob is at most 0
    with jax.enable_x64(True):
        yield log_ratio, rng.normal(size=(8, 1)), logp, mask


def run(rule, log_ratio, advantage, logp, mask, **more):
    """Objective, clipped, and d sum(objective) / d logp at a held old log-prob; numpy."""
    x = jnp.asarray(logp)
    old = x - jnp.asarray(log_ratio)

    def f(x):
        objective, clipped = rule(x - old, jnp.asarray(advantage), x, jnp.asarray(mask), **more)
        return objective.sum(), (objective, clipped)

    gradient, (objective, clipped) = jax.grad(f, has_aux=True)(x)
    return np.asarray(objective), np.asarray(clipped), np.asarray(gradient)


# cispo_cap


@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_cispo_cap_is_an_absolute_cap(advantage):
    rule = partial(clip.cispo_cap, cap=5.0)
    value, clipped, gradient = at(rule, 30, advantage, logp=-2.0)
    assert (value, gradient) == pytest.approx((-10 * advantage, 5 * advantage), rel=1e-6)
    assert clipped == (advantage > 0)
    assert at(rule, 4.9, advantage)[2] == pytest.approx(4.9 * advantage, rel=1e-6)
    assert not at(rule, 4.9, advantage)[1]


def test_cispo_cap_is_cispo_with_one_less_and_no_floor(batch):
    for a, b in zip(
        run(partial(clip.cispo_cap, cap=1.5), *batch),
        run(partial(clip.cispo, low=1.0, high=0.5), *batch),
        strict=True,
    ):
        close(a, b)


# delta


@pytest.mark.parametrize(
    ("rho", "advantage", "value", "clipped", "gradient"),
    [
        (10, -1, -4, False, 0),
        (3.9, -1, -3.9, False, -3.9),
        (0.5, -1, -0.8, True, 0),
        (10, 1, 1.2, True, 0),
        (0.5, 1, 0.5, False, 0.5),
    ],
)
def test_delta_bounds_the_loss_of_a_bad_token(rho, advantage, value, clipped, gradient):
    rule = partial(clip.delta, low=0.2, high=0.2, delta=4.0)
    measured = at(rule, rho, advantage)
    assert measured[1] == clipped
    assert (measured[0], measured[2]) == pytest.approx((value, gradient), rel=1e-5)


@pytest.mark.parametrize(
    ("rho", "advantage", "value", "gradient"),
    [(1.3, 1, 1.1, 0), (1.05, 1, 1.05, 1.05), (1.15, -1, -1.15, -1.15), (1.3, -1, -1.2, 0)],
)
def test_delta_within_the_region_caps_the_good_and_gives_way_for_the_bad(
    rho, advantage, value, gradient
):
    rule = partial(clip.delta, low=0.2, high=0.2, delta=1.1)
    measured = at(rule, rho, advantage)
    assert (measured[0], measured[2]) == pytest.approx((value, gradient), rel=1e-5)


@pytest.mark.parametrize("delta", [0.7, 1.1, 1.2, 4.0])
def test_delta_as_printed(batch, delta):
    log_ratio, advantage, _, mask = batch
    rho = np.exp(log_ratio)
    printed = np.minimum(np.minimum(rho, delta) * advantage, np.clip(rho, 0.8, 1.2) * advantage)
    objective, clipped, gradient = run(partial(clip.delta, low=0.2, high=0.2, delta=delta), *batch)
    close(objective, np.where(mask, printed, 0))
    whole = np.where(mask, rho * advantage, 0)
    assert np.isclose(gradient, 0).sum() > (~mask).sum()
    close(gradient, np.where(np.isclose(objective, whole), whole, 0))
    np.testing.assert_array_equal(clipped, run(partial(clip.bounded, low=0.2, high=0.2), *batch)[1])


def test_delta_beyond_the_region_is_the_dual_clip(batch):
    for a, b in zip(
        run(partial(clip.delta, low=0.2, high=0.28, delta=4.0), *batch),
        run(partial(clip.dual, low=0.2, high=0.28, cap=4.0), *batch),
        strict=True,
    ):
        close(a, b)


# sapo


def test_sapo_at_ratio_one_has_the_slope_of_the_ratio_and_another_value():
    rule = partial(clip.sapo, tau_positive=1.0, tau_negative=2.0)
    assert at(rule, 1, 0.5) == pytest.approx((1.0, False, 0.5))
    assert at(rule, 1, -0.5) == pytest.approx((-0.5, False, -0.5))


def test_sapo_as_printed(batch):
    log_ratio, advantage, _, mask = batch
    rho = np.exp(log_ratio)
    tau = np.where(advantage > 0, 1.0, 1.05)
    gate = 1 / (1 + np.exp(-tau * (rho - 1)))
    objective, clipped, gradient = run(
        partial(clip.sapo, tau_positive=1.0, tau_negative=1.05), *batch
    )
    close(objective, np.where(mask, 4 / tau * gate * advantage, 0))
    close(gradient, np.where(mask, 4 * gate * (1 - gate) * rho * advantage, 0))
    assert not clipped.any()


# gmpo


def test_gmpo_clips_the_log_ratio_of_a_token_on_one_side():
    rule = partial(clip.gmpo, low=0.3, high=0.4)
    log_ratio, mask = np.array([[1.0, 0.2, -1.0, 9.0]]), np.array([[1, 1, 1, 0]], bool)
    with jax.enable_x64(True):
        objective, clipped, gradient = run(rule, log_ratio, np.array([[2.0]]), log_ratio, mask)
        row = 2 * np.exp((0.4 + 0.2 - 1) / 3)
        close(objective, [[row, row, row, 0]])
        np.testing.assert_array_equal(clipped, [[1, 0, 0, 0]])
        close(gradient, [[0, row, row, 0]])  # 3 tokens carry the row, each with a third of it
        objective, clipped, gradient = run(rule, log_ratio, np.array([[-1.0]]), log_ratio, mask)
        row = -np.exp((1 + 0.2 - 0.3) / 3)
        close(objective, [[row, row, row, 0]])
        np.testing.assert_array_equal(clipped, [[0, 0, 1, 0]])
        close(gradient, [[row, row, 0, 0]])


def test_gmpo_is_a_mean_over_rows_of_geometric_means(batch):
    log_ratio, advantage, _, mask = batch
    objective, _, _ = run(partial(clip.gmpo, low=0.4, high=0.4), *batch)
    weight = aggregation.sequence_mean(jnp.asarray(mask), jnp.zeros(8, jnp.int32))
    total = 0.0
    for row, kept, (a,) in zip(log_ratio, mask, advantage, strict=True):
        if kept.any():
            inner = np.minimum(row, 0.4) if a > 0 else np.maximum(row, -0.4)
            total += a * np.prod(np.exp(inner[kept])) ** (1 / kept.sum())
    close((weight * objective).sum(), total / 8)


def test_gmpo_takes_the_mean_of_the_advantages_of_a_row():
    rule = partial(clip.gmpo, low=0.4, high=0.4)
    x, mask = jnp.array([[0.5, 0.1, 0.0]]), jnp.array([[True, True, False]])
    by_token = rule(x, jnp.array([[3.0, -1.0, jnp.nan]]), x, mask)
    by_row = rule(x, jnp.array([[1.0]]), x, mask)
    for a, b in zip(by_token, by_row, strict=True):
        np.testing.assert_array_equal(a, b)


# vespo


def weighted(level, weight, *, rho=1.0, advantage=1.0):
    """d objective / d logp of the tokens of one row whose whole ratio is `rho`: phi A."""
    weight = np.array([weight])
    rule = partial(clip.vespo, correction=jnp.asarray(weight), correction_level=level, **VESPO)
    shape = weight.shape
    return run(
        rule,
        np.full(shape, np.log(rho)),
        np.array([[advantage]]),
        np.full(shape, -1.0),
        np.ones(shape, bool),
    )[2][0]


def test_vespo_weighs_a_row_by_phi_of_its_ratio():
    with jax.enable_x64(True):
        close(weighted("token", [1.0, 1.0]), [1, 1])
        close(weighted("token", [1.0], rho=2.0), [4 * np.exp(-3)])
        close(weighted("token", [1.0], rho=2.0, advantage=-1.0), [-8 * np.exp(-2)])
        close(weighted("token", [1.0], rho=2 / 3), [(2 / 3) ** 2 * np.e])  # its largest


def test_vespo_folds_the_correction_into_the_ratio():
    with jax.enable_x64(True):
        two = weighted("token", [1.0], rho=2.0)
        close(weighted("token", [4.0, 0.5]), np.repeat(two, 2))  # their product
        close(weighted("sequence", [2.0, 2.0]), np.repeat(two, 2))  # the row's, once
        close(weighted("token", [0.5, 1.0], rho=4.0), np.repeat(two, 2))
        assert (weighted("token", [0.0, 1.0]) < 1e-14).all()  # a masked token takes the row along


def test_vespo_far_off_is_finite():
    with jax.enable_x64(True):
        assert weighted("token", [1.0], rho=1e30) == 0
        floor = 1e-16 * np.exp(3 * (1 - 1e-8))
        np.testing.assert_allclose(weighted("token", [1.0], rho=1e-30), floor, rtol=1e-9)
        close(weighted("token", [1e-30, 1e8]), [1.0, 1.0])  # each weight is held, then the sum


def test_vespo_as_printed(batch):
    log_ratio, advantage, logp, mask = batch
    rng = np.random.default_rng(1)
    sampler = logp - log_ratio - rng.normal(0, 0.3, logp.shape)
    row = ratio.sequence_sum(jnp.asarray(log_ratio), jnp.zeros(logp.shape), jnp.asarray(mask))
    weights = correction.token_truncate(
        jnp.asarray(logp - log_ratio), jnp.asarray(sampler), jnp.asarray(mask), cap=1.2
    )
    objective, clipped = clip.vespo(
        row,
        jnp.asarray(advantage),
        jnp.asarray(logp),
        jnp.asarray(mask),
        correction=weights,
        correction_level="token",
        **VESPO,
    )
    held = np.minimum(np.exp(logp - log_ratio - sampler), 1.2)
    w = np.prod(np.where(mask, np.exp(log_ratio) * held, 1), 1, keepdims=True)
    k, rate = np.where(advantage >= 0, 2, 3), np.where(advantage >= 0, 3, 2)
    close(objective, np.where(mask, w**k * np.exp(rate * (1 - w)) * advantage * logp, 0))
    assert not clipped.any()


def test_vespo_asks_for_the_correction_and_refuses_another_level():
    bound = partial(clip.vespo, correction_level="token", **VESPO)
    assert asks(bound, "correction")
    assert not asks(bound, "key")
    with pytest.raises(ValueError, match="'token' or 'sequence', not 'row'"):
        weighted("row", [1.0])


# dppo


def probabilities(rule, p, q, advantage, **constants):
    """clipped and d objective / d logp of a token of probability p that had q."""
    rule = partial(rule, **constants)
    one = np.ones((1, 1))
    logp = one * np.log(p)
    with jax.enable_x64(True):
        objective, clipped, gradient = run(
            rule, logp - np.log(q), one * advantage, logp, one.astype(bool)
        )
    assert objective[0, 0] == pytest.approx(gradient[0, 0] * np.log(p), rel=1e-9)
    return bool(clipped[0, 0]), float(gradient[0, 0])


@pytest.mark.parametrize(
    ("p", "q", "advantage", "clipped", "gradient"),
    [
        (0.5, 0.2, 1, True, 0),  # + 0.3
        (0.5, 0.2, -1, False, -2.5),  # comes back where it should not have gone
        (0.2, 0.5, -1, True, 0),
        (0.2, 0.5, 1, False, 0.4),
        (0.35, 0.2, 1, False, 1.75),  # a ratio of 1.75, but not far
        (1e-3, 1e-4, 1, False, 10),
        (1e-2, 1e-4, 1, False, 20),  # the cap
        (0.5, 0.2, 0, False, 0),
    ],
)
def test_dppo_tv_looks_at_the_probability_and_not_at_the_ratio(p, q, advantage, clipped, gradient):
    measured = probabilities(clip.dppo_tv, p, q, advantage, low=0.2, high=0.2, cap=20.0)
    assert measured == (clipped, pytest.approx(gradient, rel=1e-9))


def test_dppo_tv_has_a_bound_for_each_side():
    bounds = {"low": 0.1, "high": 0.4, "cap": 20.0}
    assert not probabilities(clip.dppo_tv, 0.5, 0.2, 1, **bounds)[0]
    assert probabilities(clip.dppo_tv, 0.65, 0.2, 1, **bounds)[0]
    assert probabilities(clip.dppo_tv, 0.35, 0.5, -1, **bounds)[0]
    assert not probabilities(clip.dppo_tv, 0.45, 0.5, -1, **bounds)[0]


@pytest.mark.parametrize(("p", "q", "advantage"), [(0.6, 0.2, 1), (0.2, 0.6, -1)])
def test_dppo_kl_looks_at_the_binary_kl(p, q, advantage):
    kl = q * np.log(q / p) + (1 - q) * np.log((1 - q) / (1 - p))
    far, near = {"low": 9.0, "high": 9.0, "cap": 20.0}, "high" if advantage > 0 else "low"
    dropped = partial(probabilities, clip.dppo_kl)
    assert dropped(p, q, advantage, **(far | {near: kl * 0.999})) == (True, 0)
    kept = dropped(p, q, advantage, **(far | {near: kl * 1.001}))
    assert kept == (False, pytest.approx(advantage * p / q))
    other = dict.fromkeys(("low", "high"), 0.0) | {"cap": 20.0}
    assert not dropped(p, q, -advantage, **other)[0]  # on its way back


def test_dppo_survives_certainty():
    for rule in (clip.dppo_tv, clip.dppo_kl):
        for logp, log_ratio in ((0.0, 0.0), (0.0, 30.0), (-30.0, -30.0), (1e-6, 0.0)):
            x = np.full((1, 1), logp, np.float32)
            for value in run(
                partial(rule, low=0.2, high=0.2, cap=20.0),
                np.full((1, 1), log_ratio, np.float32),
                np.ones((1, 1), np.float32),
                x,
                np.ones((1, 1), bool),
            ):
                assert np.isfinite(value).all()


def test_dppo_kl_knows_a_probability_that_rounding_put_above_one():
    one = jnp.ones((1, 1))
    _, clipped = clip.dppo_kl(
        30 * one, one, 1e-6 * one, one.astype(bool), low=0.2, high=0.2, cap=20.0
    )
    assert clipped.all()


# what they share


@pytest.mark.parametrize(
    "rule",
    [
        partial(clip.cispo_cap, cap=5.0),
        partial(clip.delta, low=0.2, high=0.2, delta=4.0),
        partial(clip.sapo, tau_positive=1.0, tau_negative=1.05),
        partial(clip.gmpo, low=0.4, high=0.4),
        partial(clip.vespo, correction=jnp.ones((8, 7)), correction_level="token", **VESPO),
        partial(clip.dppo_tv, low=0.2, high=0.2, cap=20.0),
        partial(clip.dppo_kl, low=0.2, high=0.2, cap=20.0),
    ],
    ids=lambda rule: rule.func.__name__,
)
def test_on_policy_all_have_the_gradient_of_ppo(rule, batch):
    _, advantage, logp, mask = batch
    _, clipped, gradient = run(rule, np.zeros_like(logp), advantage, logp, mask)
    close(gradient, np.where(mask, advantage, 0))
    assert not clipped.any()


def test_constants_of_all_may_be_swept_in_one_jit(batch):
    log_ratio, advantage, logp, mask = (jnp.asarray(x) for x in batch)
    constants = {
        clip.cispo_cap: {"cap": 1.5},
        clip.delta: {"low": 0.2, "high": 0.2, "delta": 2.0},
        clip.sapo: {"tau_positive": 1.0, "tau_negative": 1.05},
        clip.gmpo: {"low": 0.4, "high": 0.4},
        partial(clip.vespo, correction=jnp.ones((8, 7)), correction_level="token"): VESPO,
        clip.dppo_tv: {"low": 0.2, "high": 0.2, "cap": 2.0},
        clip.dppo_kl: {"low": 0.2, "high": 0.2, "cap": 2.0},
    }
    for rule, knobs in constants.items():

        def f(knobs, rule=rule):
            return rule(log_ratio, advantage, logp, mask, **knobs)

        swept = jax.jit(jax.vmap(f))(jax.tree.map(lambda x: jnp.array([x, 1.3 * x]), knobs))
        for index, factor in enumerate((1, 1.3)):
            alone = f({name: factor * value for name, value in knobs.items()})
            for a, b in zip(swept, alone, strict=True):
                close(a[index], b)
