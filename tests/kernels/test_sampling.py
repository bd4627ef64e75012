"""Sampling: the distribution drawn from, its log-probs, its edges, and the noise by row id."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from grpo_jax.kernels.sampling import _first_above, greedy, row_uniform, sample

noise_jit = jax.jit(row_uniform)
sample_jit = jax.jit(sample, static_argnames=("top_k", "top_p"))


def stratified(count):
    """Evenly spaced uniforms: token i then comes up within 2 of count * p_i times."""
    return (jnp.arange(count, dtype=jnp.float32) + 0.5) / count


def draw(logits, uniform, **options):
    """Tokens and log-probs for one logits vector and many uniforms."""
    rows = jnp.broadcast_to(logits, (len(uniform), len(logits)))
    return sample_jit(uniform, rows, **{"temperature": 1.0, **options})


def histogram(token, vocabulary):
    return np.bincount(np.asarray(token), minlength=vocabulary)


# --- distribution -------------------------------------------------------------------------------


@pytest.mark.parametrize("vocabulary", [1, 3, 83, 512])
def test_frequencies_match_softmax_exactly_on_even_uniforms(vocabulary):
    logits = 1.5 * jax.random.normal(jax.random.key(vocabulary), (vocabulary,))
    token, _ = draw(logits, stratified(1 << 13), temperature=0.9)
    expected = (1 << 13) * np.asarray(jax.nn.softmax(logits / 0.9))
    assert np.abs(histogram(token, vocabulary) - expected).max() < 2.0
    assert (np.diff(np.asarray(token)) >= 0).all()  # an inverse CDF is monotone in its uniform


@pytest.mark.parametrize("vocabulary", [3, 83])
def test_chi_square_small_vocabulary(vocabulary):
    logits = jax.random.normal(jax.random.key(1), (vocabulary,))
    uniform = noise_jit(jax.random.key(2), jnp.arange(40_000), 0)
    token, _ = draw(logits, uniform, temperature=1.3)
    expected = 40_000 * np.asarray(jax.nn.softmax(logits / 1.3), np.float64)
    observed = histogram(token, vocabulary)
    assert expected.min() > 5
    assert stats.chisquare(observed, expected * 40_000 / expected.sum()).pvalue > 1e-3


def test_chi_square_large_vocabulary():
    """V = 49152 in 64 bins that cut across the blocks (id modulo 64), and in 40 ranges of ids."""
    vocabulary, batch = 49152, 128
    logits = 2.0 * jax.random.normal(jax.random.key(3), (vocabulary,))
    rows = jnp.broadcast_to(logits, (batch, vocabulary))
    uniform = noise_jit(jax.random.key(4), jnp.arange(32 * batch), 0)
    token = np.concatenate(
        [sample_jit(part, rows, temperature=1.0)[0] for part in uniform.reshape(-1, batch)]
    )
    p = np.asarray(jax.nn.softmax(logits), np.float64)
    for label in (np.arange(vocabulary) % 64, np.arange(vocabulary) * 40 // vocabulary):
        expected = np.bincount(label, p)
        observed = np.bincount(label[token], minlength=len(expected))
        expected *= observed.sum() / expected.sum()
        assert stats.chisquare(observed, expected).pvalue > 1e-3


@pytest.mark.parametrize("options", [{}, {"top_k": 20}, {"top_p": 0.7}])
def test_logp_is_of_the_distribution_drawn_from(options):
    logits = 2.0 * jax.random.normal(jax.random.key(6), (83,))
    token, logp = draw(logits, stratified(1 << 13), temperature=0.7, **options)
    count = histogram(token, 83)
    assert token.dtype == jnp.int32 and logp.dtype == jnp.float32
    seen = dict(zip(np.asarray(token).tolist(), np.asarray(logp).tolist(), strict=True))
    for one, value in seen.items():
        assert abs(count[one] - (1 << 13) * np.exp(value)) < 2.0
    kept = sum(np.exp(v) for v in seen.values())
    assert kept == pytest.approx(1.0, abs=2e-3)  # unseen tokens weigh less than 1/8192 each


def test_without_truncation_logp_equals_log_softmax():
    logits = jax.random.normal(jax.random.key(7), (512, 83)) * 3
    token, logp = sample_jit(stratified(512), logits, temperature=0.8)
    plain = jax.nn.log_softmax(logits / 0.8)[jnp.arange(512), token]
    np.testing.assert_allclose(logp, plain, atol=1e-5)


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (1.0, [-0.40760595, -1.40760589, -2.40760589]),
        (0.6, [-0.20257315, -1.86923981, -3.53590631]),
    ],
)
def test_temperature_divides_the_logits(temperature, expected):
    token, logp = draw(jnp.array([2.0, 1.0, 0.0]), stratified(512), temperature=temperature)
    assert set(np.asarray(token)) == {0, 1, 2}
    np.testing.assert_allclose(logp, np.array(expected)[token], atol=1e-6)


def test_bfloat16_logits_are_used_in_float32():
    logits = jax.random.normal(jax.random.key(8), (512, 83)).astype(jnp.bfloat16)
    narrow = sample_jit(stratified(512), logits, temperature=0.6)
    wide = sample_jit(stratified(512), logits.astype(jnp.float32), temperature=0.6)
    np.testing.assert_array_equal(narrow[0], wide[0])
    np.testing.assert_array_equal(narrow[1], wide[1])
    assert narrow[1].dtype == jnp.float32


# --- truncation ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("p", "top_p", "kept"),
    [
        ([0.5, 0.41, 0.09], 0.9, {0, 1}),
        ([0.4, 0.3, 0.2, 0.1], 0.8, {0, 1, 2}),
        ([0.1, 0.2, 0.3, 0.4], 0.8, {1, 2, 3}),  # the order of the ids does not matter
        ([0.25, 0.25, 0.25, 0.25], 0.5, {0, 1}),  # exactly reached: the mass before is not < p
        ([0.9, 0.1], 0.01, {0}),  # the most probable token always stays
    ],
)
def test_top_p_keeps_a_token_while_the_mass_before_it_is_smaller(p, top_p, kept):
    token, logp = draw(jnp.log(jnp.array(p)), stratified(512), top_p=top_p)
    assert set(np.asarray(token)) == kept
    mass = sum(p[i] for i in kept)
    np.testing.assert_allclose(np.exp(logp), np.array(p)[token] / mass, atol=1e-6)


def test_top_p_renormalises_by_the_kept_mass():
    """The trainer's log-prob knows no truncation: every ratio is then the kept mass, 0.9."""
    logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
    token, logp = draw(logits, stratified(512), top_p=0.8)
    np.testing.assert_allclose(np.exp(logits[token] - logp), 0.9, atol=1e-6)


def test_top_k_keeps_k_tokens_and_the_lower_id_of_a_tie():
    logits = jnp.array([0.0, 1.0, 3.0, 1.0, -1.0])
    assert set(np.asarray(draw(logits, stratified(512), top_k=1)[0])) == {2}
    assert set(np.asarray(draw(logits, stratified(512), top_k=2)[0])) == {1, 2}
    assert set(np.asarray(draw(logits, stratified(512), top_k=99)[0])) == {0, 1, 2, 3, 4}


def test_top_p_counts_mass_after_top_k():
    """p = .4 .3 .2 .1: the two largest are .571 and .429, so top_p = .5 keeps the first only."""
    logits = jnp.log(jnp.array([0.4, 0.3, 0.2, 0.1]))
    assert set(np.asarray(draw(logits, stratified(512), top_p=0.5)[0])) == {0, 1}
    assert set(np.asarray(draw(logits, stratified(512), top_k=2, top_p=0.5)[0])) == {0}


def test_no_sort_without_truncation():
    def primitives(**options):
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4,), (4, 512))]
        # the lowered text spells out every operation, nested ones too
        text = sample_jit.lower(*shapes, temperature=1.0, **options).as_text()
        return set(re.findall(r"(?:stablehlo|chlo)\.(\w+)", text))

    assert not {"sort", "top_k"} & primitives()
    assert {"sort", "top_k"} & primitives(top_k=5)


# --- edges --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("vocabulary", "options"),
    [(83, {}), (512, {}), (49152, {}), (83, {"top_k": 10}), (83, {"top_p": 0.99})],
)
def test_impossible_tokens_are_never_drawn_at_the_ends(vocabulary, options):
    """Only three tokens are possible; uniforms at, around and beyond the ends of [0, 1)."""
    allowed = [vocabulary // 3, vocabulary // 3 + 1, vocabulary - 2]
    logits = jnp.full(vocabulary, -jnp.inf).at[jnp.array(allowed)].set(jnp.array([0.3, 0.0, -0.2]))
    edges = [0.0, 1e-30, 2**-23, 0.5, 1 - 2**-23, 1 - 2**-24, 1.0]
    token, logp = draw(logits, jnp.array(edges, jnp.float32), **options)
    assert set(np.asarray(token)) <= set(allowed)
    assert np.isfinite(logp).all()


def test_weights_that_underflow_are_never_drawn():
    logits = jnp.full(83, -200.0).at[40].set(0.0)
    token, logp = draw(logits, jnp.array([0.0, 0.5, 1.0]))
    assert (token == 40).all() and (logp == 0.0).all()


def test_every_token_of_a_uniform_vocabulary_is_reached():
    """V = 83 is padded to whole blocks: padding is never drawn, the last token is."""
    token, logp = draw(jnp.zeros(83), stratified(1 << 13))
    assert np.ptp(histogram(token, 83)) <= 2
    np.testing.assert_allclose(logp, -np.log(83), rtol=1e-6)


def test_first_above_survives_rounding():
    weights = jnp.array([[0.0, 1.0, 0.0, 2.0, 0.0]] * 6)
    target = jnp.array([-1e-7, 0.0, 0.999, 1.0, 3.0, 3.1])
    index, before = _first_above(weights, target)
    np.testing.assert_array_equal(index, [1, 1, 1, 3, 3, 3])
    np.testing.assert_array_equal(before, [0, 0, 0, 1, 1, 1])


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_row_without_a_distribution_is_nan_and_leaves_its_neighbours_alone(bad):
    logits = jnp.zeros((2, 83)).at[0].set(bad)
    token, logp = sample_jit(jnp.array([0.4, 0.4]), logits, temperature=1.0)
    assert np.isnan(logp[0]) and 0 <= token[0] < 83
    np.testing.assert_allclose(logp[1], -np.log(83), rtol=1e-6)


@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": -1.0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1}],
)
def test_refuses_impossible_constants(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        sample(jnp.zeros(1), jnp.zeros((1, 3)), **{"temperature": 1.0, **options})


def test_works_under_vmap_with_a_traced_temperature():
    logits = jax.random.normal(jax.random.key(9), (512, 83))
    temperatures = jnp.array([0.5, 1.0, 2.0])
    many = jax.jit(jax.vmap(lambda t: sample(stratified(512), logits, temperature=t)))(temperatures)
    for i, temperature in enumerate(temperatures):
        token, logp = sample_jit(stratified(512), logits, temperature=temperature)
        np.testing.assert_array_equal(many[0][i], token)
        np.testing.assert_allclose(many[1][i], logp, atol=1e-6)


def test_greedy_is_a_point_mass():
    token, logp = greedy(jnp.array([[0.0, 2.0, 2.0], [5.0, -jnp.inf, 1.0]], jnp.bfloat16))
    np.testing.assert_array_equal(token, [1, 0])
    np.testing.assert_array_equal(logp, [0.0, 0.0])
    assert token.dtype == jnp.int32 and logp.dtype == jnp.float32


# --- noise --------------------------------------------------------------------------------------


def test_noise_differs_by_row_step_and_key():
    key = jax.random.key(0)
    grid = np.stack([noise_jit(key, jnp.arange(64), step) for step in range(16)])
    assert grid.dtype == jnp.float32 and grid.min() >= 0 and grid.max() < 1
    assert len(np.unique(grid)) == grid.size  # rows distinct, steps distinct
    other = noise_jit(jax.random.key(1), jnp.arange(64), 0)
    assert not np.isin(other, grid).any()


def test_noise_of_a_row_depends_on_its_global_id_only():
    key = jax.random.key(0)
    whole = noise_jit(key, jnp.arange(12), 5)
    for ids in ([0, 1, 2, 3], [11, 4, 7, 5]):
        np.testing.assert_array_equal(noise_jit(key, jnp.array(ids), 5), whole[jnp.array(ids)])
    np.testing.assert_array_equal(row_uniform(key, jnp.arange(12), 5), whole)


def test_noise_is_uniform_over_rows_and_over_steps():
    key = jax.random.key(3)
    over_rows = noise_jit(key, jnp.arange(20_000), 7)
    over_steps = jax.vmap(lambda s: row_uniform(key, jnp.array([7]), s)[0])(jnp.arange(20_000))
    for values in (over_rows, over_steps):
        assert stats.kstest(np.asarray(values), "uniform").pvalue > 1e-3


def test_a_frozen_key_would_show():
    """Uniform logits over 1000 tokens, 8 rows, 2 steps: rows distinct, the two steps not equal."""
    logits = jnp.zeros((8, 1000))
    steps = [
        sample_jit(noise_jit(jax.random.key(0), jnp.arange(8), s), logits, temperature=1.0)[0]
        for s in range(2)
    ]
    assert len(set(np.asarray(steps[0]).tolist())) == 8
    assert (steps[0] != steps[1]).any()
