"""Log-probs and entropy from hidden states: equal to log_softmax + gather, without its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxprs_in_params

from grpo_jax.kernels.logprobs import token_logprobs

logprobs_jit = jax.jit(token_logprobs, static_argnames="chunk")

# (V, chunk): dividing, not dividing, the whole vocabulary in one chunk, one entry a chunk
SIZES = [(512, 128), (83, 16), (83, 50), (83, 100), (7, 1)]


def problem(vocabulary, rows=11, width=16, scale=1.0, dtype=jnp.float32):
    """Hidden [N, D], head [V, D] and targets [N] that include the first and the last token."""
    keys = jax.random.split(jax.random.key(vocabulary), 3)
    hidden = (scale * jax.random.normal(keys[0], (rows, width))).astype(dtype)
    head = jax.random.normal(keys[1], (vocabulary, width)).astype(dtype)
    targets = jax.random.randint(keys[2], (rows,), 0, vocabulary)
    return hidden, head, targets.at[0].set(0).at[1].set(vocabulary - 1)


def reference(hidden, head, targets, temperature):
    """The plain way, with all N x V logits in float32."""
    logits = jnp.dot(hidden, head.T, preferred_element_type=jnp.float32) / temperature
    logp = jax.nn.log_softmax(logits, axis=-1)
    chosen = jnp.take_along_axis(logp, targets[:, None], axis=1)[:, 0]
    return chosen, -jnp.sum(jnp.exp(logp) * logp, axis=-1)


def weighted_sum(function, rows):
    """One scalar that weighs each row's log-prob and entropy differently."""
    weight = jnp.linspace(-1.0, 1.0, rows)

    def scalar(*arguments):
        logp, entropy = function(*arguments)
        return jnp.sum(weight * logp) + 0.3 * jnp.sum(weight[::-1] * entropy)

    return scalar


@pytest.mark.parametrize(("vocabulary", "chunk"), SIZES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_equal_log_softmax_and_gather(vocabulary, chunk, temperature):
    hidden, head, targets = problem(vocabulary)
    got = logprobs_jit(hidden, head, targets, temperature=temperature, chunk=chunk)
    for mine, plain in zip(got, reference(hidden, head, targets, temperature), strict=True):
        assert mine.dtype == jnp.float32 and mine.shape == (11,)
        np.testing.assert_allclose(mine, plain, atol=1e-5, rtol=1e-6)


@pytest.mark.parametrize(("vocabulary", "chunk"), SIZES)
def test_gradients_equal_log_softmax_and_gather(vocabulary, chunk):
    """Case M1: huggingface/trl#2709, #2683, #2773 (the values: the test above)."""
    hidden, head, targets = problem(vocabulary)

    def mine(hidden, head, temperature):
        return token_logprobs(hidden, head, targets, temperature=temperature, chunk=chunk)

    def plain(hidden, head, temperature):
        return reference(hidden, head, targets, temperature)

    arguments = (hidden, head, jnp.float32(0.8))
    got, want = (
        jax.jit(jax.grad(weighted_sum(function, 11), argnums=(0, 1, 2)))(*arguments)
        for function in (mine, plain)
    )
    for a, b in zip(got[:2], want[:2], strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    np.testing.assert_allclose(got[2], want[2], rtol=1e-4)


def test_temperature_divides_the_logits():
    """Logits [2, 1, 0] at temperature 1 and 0.6 (hidden 1, head = the logits), by hand."""
    hidden, head = jnp.ones((3, 1)), jnp.array([[2.0], [1.0], [0.0]])
    for temperature, expected in (
        (1.0, [-0.40760595, -1.40760589, -2.40760589]),
        (0.6, [-0.20257315, -1.86923981, -3.53590631]),
    ):
        for chunk in (2, 3):
            logp, entropy = logprobs_jit(
                hidden, head, jnp.arange(3), temperature=temperature, chunk=chunk
            )
            np.testing.assert_allclose(logp, expected, atol=1e-6)
            p = np.exp(expected)
            np.testing.assert_allclose(entropy, -np.sum(p * expected), atol=1e-6)


def test_uniform_logits_have_the_largest_entropy():
    logp, entropy = token_logprobs(
        jnp.zeros((2, 4)), jnp.ones((83, 4)), jnp.array([0, 82]), temperature=1.0, chunk=10
    )
    np.testing.assert_allclose(entropy, np.log(83), rtol=1e-6)
    np.testing.assert_allclose(logp, -np.log(83), rtol=1e-6)


@pytest.mark.parametrize("direction", [1, -1])
def test_large_logits_stay_finite_and_exact(direction):
    """Logits of some 1e4, rising or falling over the chunks: no overflow, no NaN in a gradient."""
    head = direction * jnp.arange(83, dtype=jnp.float32)[:, None] * 200.0
    hidden, targets = jnp.ones((2, 1)), jnp.array([0, 82])

    def run(hidden, head):
        return token_logprobs(hidden, head, targets, temperature=1.0, chunk=9)

    logp, entropy = run(hidden, head)
    best, worst = (1, 0) if direction == 1 else (0, 1)
    assert logp[best] == 0.0 and logp[worst] == -16400.0
    np.testing.assert_allclose(entropy, 0.0, atol=1e-6)
    for gradient in jax.jit(jax.grad(weighted_sum(run, 2), argnums=(0, 1)))(hidden, head):
        assert np.isfinite(gradient).all()


def test_a_common_offset_does_not_blur_the_entropy():
    """Shifting all logits by 4096 (exact in float32 here) changes nothing."""
    base = jnp.round(16 * jax.random.normal(jax.random.key(5), (83,))) / 16
    hidden, targets = jnp.ones((1, 2)), jnp.array([40])
    plain, shifted = (
        token_logprobs(
            hidden, jnp.stack([base, jnp.full(83, c)], 1), targets, temperature=1.0, chunk=20
        )
        for c in (0.0, 4096.0)
    )
    np.testing.assert_allclose(plain[0], shifted[0], atol=1e-6)
    np.testing.assert_allclose(plain[1], shifted[1], atol=1e-6)


def test_bfloat16_inputs_accumulate_in_float32():
    hidden, head, targets = problem(83, width=256, scale=0.1, dtype=jnp.bfloat16)
    wide = reference(hidden.astype(jnp.float32), head.astype(jnp.float32), targets, 1.0)
    got = logprobs_jit(hidden, head, targets, temperature=1.0, chunk=16)
    for mine, plain in zip(got, wide, strict=True):
        assert mine.dtype == jnp.float32
        np.testing.assert_allclose(mine, plain, atol=1e-5)

    def run(hidden, head):
        return token_logprobs(hidden, head, targets, temperature=1.0, chunk=16)

    gradients = jax.jit(jax.grad(weighted_sum(run, 11), argnums=(0, 1)))(hidden, head)
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.bfloat16]


def test_works_under_vmap():
    hidden, head, targets = problem(83)

    def run(hidden, targets, temperature):
        return logprobs_jit(hidden, head, targets, temperature=temperature, chunk=16)

    temperatures = jnp.array([0.5, 2.0])
    batched = jax.vmap(run, in_axes=(None, None, 0))(hidden, targets, temperatures)
    for i, temperature in enumerate(temperatures):
        for mine, alone in zip(batched, run(hidden, targets, temperature), strict=True):
            np.testing.assert_allclose(mine[i], alone, atol=1e-6)


def test_refuses_impossible_constants():
    hidden, head, targets = problem(7)
    with pytest.raises(ValueError, match="chunk"):
        token_logprobs(hidden, head, targets, temperature=1.0, chunk=0)
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(hidden, head, targets, temperature=0.0, chunk=4)


# --- memory -------------------------------------------------------------------------------------


def gradient_program(vocabulary, chunk, rows=256, width=8):
    """(gradient function, its abstract arguments), temperature traced."""
    targets = jnp.zeros(rows, jnp.int32)

    def run(hidden, head, temperature):
        if chunk is None:
            return reference(hidden, head, targets, temperature)
        return token_logprobs(hidden, head, targets, temperature=temperature, chunk=chunk)

    shapes = [
        jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, width), (vocabulary, width), ())
    ]
    return jax.grad(weighted_sum(run, rows), argnums=(0, 1)), shapes


def largest_array(jaxpr):
    """Number of elements of the largest array in a jaxpr and in all jaxprs nested in it."""
    sizes = [v.aval.size for e in jaxpr.eqns for v in e.outvars if hasattr(v.aval, "size")]
    for equation in jaxpr.eqns:
        for inner in jaxprs_in_params(equation.params):
            sizes.append(largest_array(inner))
    return max(sizes, default=0)


@pytest.mark.parametrize(("vocabulary", "chunk"), [(4096, 512), (1009, 100)])
def test_no_array_of_rows_times_vocabulary_is_traced(vocabulary, chunk):
    """Neither one N x V array nor a stack of chunks of that size, forward or backward."""
    program, shapes = gradient_program(vocabulary, chunk)
    largest = largest_array(jax.make_jaxpr(program)(*shapes).jaxpr)
    assert 256 * -(-vocabulary // -(-vocabulary // chunk)) <= largest < 256 * vocabulary / 4

    plain, shapes = gradient_program(vocabulary, None)
    assert largest_array(jax.make_jaxpr(plain)(*shapes).jaxpr) >= 256 * vocabulary


def test_temporary_memory_does_not_grow_with_the_vocabulary():
    """Case M1: OpenRLHF#718, Liger-Kernel#953.

    Bytes that XLA says it needs for the gradient at N=256: flat in V, falling with the chunk.
    """

    def temporary(vocabulary, chunk):
        program, shapes = gradient_program(vocabulary, chunk)
        return jax.jit(program).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    logits = {v: 256 * v * 4 for v in (2048, 16384)}  # bytes of one N x V float32 array
    small, large = temporary(2048, 512), temporary(16384, 512)
    assert large - small < 0.1 * (logits[16384] - logits[2048])
    assert large < temporary(16384, 2048)
    assert large < 0.5 * logits[16384] <= temporary(16384, None)
