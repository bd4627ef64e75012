"""KL over the whole vocabulary from hidden states: equal to the dense sum, without its memory."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.kernels.logprobs import token_kl
from tests.kernels.test_logprobs import largest_array

kl_jit = jax.jit(token_kl, static_argnames="chunk")

# (V, chunk): dividing, not dividing, the whole vocabulary in one chunk, one entry a chunk
SIZES = [(512, 128), (83, 16), (83, 50), (83, 100), (7, 1)]


def problem(vocabulary, rows=11, width=16, dtype=jnp.float32):
    """Hidden [N, D] and head [V, D] of the policy, then of a reference of another width."""
    keys = jax.random.split(jax.random.key(vocabulary), 4)
    shapes = ((rows, width), (vocabulary, width), (rows, width + 3), (vocabulary, width + 3))
    scales = (1.0, 0.5, 1.0, 0.5)
    return tuple(
        (scale * jax.random.normal(key, shape)).astype(dtype)
        for key, shape, scale in zip(keys, shapes, scales, strict=True)
    )


def dense(hidden, head, ref_hidden, ref_head, temperature):
    """The plain way, with all N x V logits of both in float32."""
    logp, ref = (
        jax.nn.log_softmax(jnp.dot(h, w.T, preferred_element_type=jnp.float32) / t, axis=-1)
        for h, w, t in (
            (hidden, head, temperature),
            (ref_hidden, ref_head, jax.lax.stop_gradient(temperature)),
        )
    )
    return jnp.sum(jnp.exp(logp) * (logp - ref), axis=-1)


def weighted(function, rows):
    """One scalar that weighs each row differently."""
    return lambda *arguments: jnp.sum(jnp.linspace(-1.0, 1.0, rows) * function(*arguments))


@pytest.mark.parametrize(("vocabulary", "chunk"), SIZES)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_equal_the_dense_sum(vocabulary, chunk, temperature):
    arguments = problem(vocabulary)
    got = kl_jit(*arguments, temperature=temperature, chunk=chunk)
    assert got.dtype == jnp.float32 and got.shape == (11,)
    np.testing.assert_allclose(got, dense(*arguments, temperature), rtol=2e-5)
    assert (got > 0.1).all()


@pytest.mark.parametrize(("vocabulary", "chunk"), SIZES)
def test_gradients_equal_those_of_the_dense_sum(vocabulary, chunk):
    hidden, head, *ref = problem(vocabulary)

    def mine(hidden, head, temperature):
        return token_kl(hidden, head, *ref, temperature=temperature, chunk=chunk)

    def plain(hidden, head, temperature):
        return dense(hidden, head, *ref, temperature)

    arguments = (hidden, head, jnp.float32(0.8))
    got, want = (
        jax.jit(jax.grad(weighted(function, 11), argnums=(0, 1, 2)))(*arguments)
        for function in (mine, plain)
    )
    for a, b in zip(got[:2], want[:2], strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    np.testing.assert_allclose(got[2], want[2], rtol=1e-4)


@pytest.mark.parametrize("chunk", [16, 100])
def test_the_reference_has_no_gradient(chunk):
    arguments = problem(83)

    def total(*arguments):
        return token_kl(*arguments, temperature=0.7, chunk=chunk).sum()

    *own, ref_hidden, ref_head = jax.grad(total, argnums=(0, 1, 2, 3))(*arguments)
    assert all(np.abs(g).max() > 0.01 for g in own)
    assert not ref_hidden.any() and not ref_head.any()


def test_two_tokens_by_hand():
    """Policy (3/4, 1/4), reference (1/2, 1/2): 3/4 ln(3/2) + 1/4 ln(1/2); and the other way."""
    one = jnp.ones((1, 1))
    skewed, even = jnp.log(jnp.array([[3.0], [1.0]])), jnp.zeros((2, 1))
    for heads, expected in (
        ((skewed, even), 0.75 * np.log(1.5) + 0.25 * np.log(0.5)),
        ((even, skewed), 0.5 * np.log(2 / 3) + 0.5 * np.log(2.0)),
    ):
        for chunk in (1, 2):
            got = kl_jit(one, heads[0], one, heads[1], temperature=1.0, chunk=chunk)
            np.testing.assert_allclose(got, [expected], rtol=1e-6)


@pytest.mark.parametrize("chunk", [16, 100])
def test_equal_models_have_no_distance_and_no_gradient(chunk):
    hidden, head, *_ = problem(83)

    def run(hidden, head):
        return token_kl(hidden, head, *ref, temperature=1.0, chunk=chunk)

    ref = (hidden, head)
    np.testing.assert_allclose(jax.jit(run)(hidden, head), 0, atol=5e-7)
    for gradient in jax.grad(weighted(run, 11), argnums=(0, 1))(hidden, head):
        np.testing.assert_allclose(gradient, 0, atol=1e-6)


@pytest.mark.parametrize("direction", [1, -1])
def test_large_logits_stay_finite_and_exact(direction):
    """Logits of some 1e4, rising or falling over the chunks, against a flat reference and back."""
    steep = direction * jnp.arange(83, dtype=jnp.float32)[:, None] * 200.0
    flat, one = jnp.zeros((83, 1)), jnp.ones((2, 1))

    def run(hidden, head, ref_head):
        return token_kl(hidden, head, one, ref_head, temperature=1.0, chunk=9)

    np.testing.assert_allclose(run(one, steep, flat), np.log(83), rtol=1e-6)
    # the reference is sure of one token, the policy of none: minus the mean log-prob, 200 * 41
    np.testing.assert_allclose(run(one, flat, steep), 8200 - np.log(83), rtol=1e-6)
    for heads in ((steep, flat), (flat, steep)):
        for gradient in jax.jit(jax.grad(weighted(run, 2), argnums=(0, 1)))(one, *heads):
            assert np.isfinite(gradient).all()


def test_common_offsets_cost_no_digits():
    """Shifting all logits of either model by 4096 (exact in float32 here) changes nothing."""
    keys = jax.random.split(jax.random.key(5))
    base, ref = (jnp.round(16 * jax.random.normal(key, (83,))) / 16 for key in keys)
    hidden = jnp.ones((1, 2))

    def run(offset, ref_offset):
        heads = (
            jnp.stack([logits, jnp.full(83, c)], 1)
            for logits, c in ((base, offset), (ref, ref_offset))
        )
        return token_kl(hidden, next(heads), hidden, next(heads), temperature=1.0, chunk=20)

    for offsets in ((4096.0, 0.0), (0.0, -4096.0), (4096.0, 4096.0)):
        np.testing.assert_allclose(run(*offsets), run(0.0, 0.0), atol=1e-6)


def test_bfloat16_inputs_accumulate_in_float32():
    arguments = problem(83, width=64, dtype=jnp.bfloat16)
    wide = dense(*(a.astype(jnp.float32) for a in arguments), 1.0)
    got = kl_jit(*arguments, temperature=1.0, chunk=16)
    assert got.dtype == jnp.float32
    np.testing.assert_allclose(got, wide, rtol=1e-5)

    def run(hidden, head):
        return token_kl(hidden, head, *arguments[2:], temperature=1.0, chunk=16)

    gradients = jax.jit(jax.grad(weighted(run, 11), argnums=(0, 1)))(*arguments[:2])
    assert [g.dtype for g in gradients] == [jnp.bfloat16, jnp.bfloat16]


def test_refuses_impossible_arguments():
    hidden, head, ref_hidden, ref_head = problem(7)
    with pytest.raises(ValueError, match="chunk"):
        token_kl(hidden, head, ref_hidden, ref_head, temperature=1.0, chunk=0)
    with pytest.raises(ValueError, match="temperature"):
        token_kl(hidden, head, ref_hidden, ref_head, temperature=-1.0, chunk=4)
    with pytest.raises(ValueError, match="7 tokens, the reference 6"):
        token_kl(hidden, head, ref_hidden, ref_head[:6], temperature=1.0, chunk=4)


# --- memory -------------------------------------------------------------------------------------


def gradient_program(vocabulary, chunk, rows=256, width=8):
    """(gradient function, its abstract arguments), temperature traced; chunk None: dense."""

    def run(*arguments):
        if chunk is None:
            return dense(*arguments)
        return token_kl(*arguments[:-1], temperature=arguments[-1], chunk=chunk)

    pair = ((rows, width), (vocabulary, width))
    shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (*pair, *pair, ())]
    return jax.grad(weighted(run, rows), argnums=(0, 1, 4)), shapes


@pytest.mark.parametrize(("vocabulary", "chunk"), [(4096, 512), (1009, 100)])
def test_no_array_of_rows_times_vocabulary_is_traced(vocabulary, chunk):
    """Neither one N x V array nor a stack of chunks of that size, forward or backward."""
    program, shapes = gradient_program(vocabulary, chunk)
    largest = largest_array(jax.make_jaxpr(program)(*shapes).jaxpr)
    assert 256 * -(-vocabulary // -(-vocabulary // chunk)) <= largest < 256 * vocabulary / 4

    plain, shapes = gradient_program(vocabulary, None)
    assert largest_array(jax.make_jaxpr(plain)(*shapes).jaxpr) >= 256 * vocabulary


def test_temporary_memory_does_not_grow_with_the_vocabulary():
    """Bytes that XLA says it needs for the gradient at N=256: flat in V."""

    def temporary(vocabulary, chunk):
        program, shapes = gradient_program(vocabulary, chunk)
        return jax.jit(program).lower(*shapes).compile().memory_analysis().temp_size_in_bytes

    logits = {v: 256 * v * 4 for v in (2048, 16384)}  # bytes of one N x V float32 array
    small, large = temporary(2048, 512), temporary(16384, 512)
    assert large - small < 0.1 * (logits[16384] - logits[2048])
    assert large < 0.5 * logits[16384] <= temporary(16384, None)
