"""Attention against a plain transcription in float64; blocks, kernels, gradients, memory."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import attention_kernels
from grpo_jax.models.attention import Attention, blockwise

P, G, S, T, K, R, h = 2, 3, 5, 12, 2, 3, 4
B = P * G
PROMPT_MASK = np.arange(S) >= np.array([0, 3])[:, None]


def arrays(dtype=jnp.float32, slots=T):
    rng = np.random.default_rng(0)
    shapes = [(B, slots, K, R, h), *[(B, slots, K, h)] * 2, *[(P, S, K, h)] * 2]
    return [jnp.asarray(rng.normal(size=shape), dtype) for shape in shapes]


def softmax_attention(q, k, v, seen):
    """q [n,K,R,h], k and v [m,K,h], seen [n,m], float64."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    score = np.where(seen[:, None, None], np.einsum("nkrh,mkh->nkrm", q, k), -np.inf)
    weight = np.exp(score - score.max(-1, keepdims=True))
    return np.einsum("nkrm,mkh->nkrh", weight / weight.sum(-1, keepdims=True), v)


def rows_by_hand(q, k, v, mask):
    causal = np.tril(np.ones((q.shape[1],) * 2, bool))
    return np.stack(
        [softmax_attention(*x, causal & m) for *x, m in zip(q, k, v, mask, strict=True)]
    )


def answers_by_hand(q, k, v, prompt_k, prompt_v, prompt_mask):
    out = []
    for row in range(len(q)):
        prompt = row // G
        keys = np.concatenate([prompt_k[prompt], k[row]])
        values = np.concatenate([prompt_v[prompt], v[row]])
        own = np.tril(np.ones((T, T), bool))
        seen = np.concatenate([np.broadcast_to(prompt_mask[prompt], (T, S)), own], 1)
        out.append(softmax_attention(q[row], keys, values, seen))
    return np.stack(out)


@pytest.mark.parametrize("block", [1, 3, 5, 12, 100])
def test_answers_see_their_prompt_and_themselves(block):
    got = blockwise(block).answers(*arrays(), PROMPT_MASK)
    np.testing.assert_allclose(got, answers_by_hand(*arrays(), PROMPT_MASK), atol=1e-5)


def left_and_right_padded():
    mask = np.ones((B, T), bool)
    mask[0, :4] = False
    mask[1, 9:] = False
    mask[2, :2], mask[2, 7:] = False, False
    mask[3, 1:] = False
    return mask


@pytest.mark.parametrize("block", [1, 4, 100])
def test_rows_are_causal_and_skip_padding(block):
    q, k, v, _, _ = arrays()
    mask = left_and_right_padded()
    with np.errstate(invalid="ignore"):  # a query in the padding sees nothing
        want = rows_by_hand(q, k, v, mask)
    got = np.asarray(blockwise(block).rows(q, k, v, jnp.asarray(mask)))
    np.testing.assert_allclose(got[mask], want[mask], atol=1e-5)
    assert np.isfinite(got).all()


def gradient_of(attend, arguments, dtype=jnp.float32):
    weight = jnp.cos(jnp.arange(arguments[0].size, dtype=jnp.float32)).reshape(arguments[0].shape)

    def value(*arguments):
        return (attend(*arguments).astype(jnp.float32) * weight).sum()

    return jax.jit(jax.grad(value, argnums=tuple(range(len(arguments)))))(*arguments)


def plain(q, k, v, prompt_k, prompt_v):
    """Attention of the answers with JAX's own derivative."""
    prompt_k, prompt_v = (a.repeat(G, 0) for a in (prompt_k, prompt_v))
    k, v = jnp.concatenate([prompt_k, k], 1), jnp.concatenate([prompt_v, v], 1)
    seen = jnp.concatenate(
        [
            jnp.broadcast_to(jnp.asarray(PROMPT_MASK).repeat(G, 0)[:, None], (B, T, S)),
            jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), (B, T, T)),
        ],
        -1,
    )
    score = jnp.where(seen[:, None, None], jnp.einsum("btkrh,bskh->bkrts", q, k), -1e30)
    return jnp.einsum("bkrts,bskh->btkrh", jax.nn.softmax(score, -1), v)


@pytest.mark.parametrize("block", [2, 5, 100])
def test_gradients_are_those_of_autodiff(block):
    got = gradient_of(partial(blockwise(block).answers, prompt_mask=PROMPT_MASK), arrays())
    want = gradient_of(plain, arrays())
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)


def test_bfloat16_is_near_float32():
    exact = gradient_of(partial(blockwise().answers, prompt_mask=PROMPT_MASK), arrays())
    got = gradient_of(
        partial(blockwise().answers, prompt_mask=PROMPT_MASK), arrays(jnp.bfloat16), jnp.bfloat16
    )
    for a, b in zip(got, exact, strict=True):
        assert a.dtype == jnp.bfloat16
        assert abs(np.asarray(a, np.float32) - b).max() < 0.03 * abs(b).max()


def temp_bytes(slots, block):
    attend = partial(blockwise(block).rows, mask=jnp.ones((B, slots), bool))
    q, k, v, _, _ = arrays(slots=slots)
    value = jax.jit(jax.grad(lambda *x: attend(*x).sum(), argnums=(0, 1, 2)))
    return value.lower(q, k, v).compile().memory_analysis().temp_size_in_bytes


def test_memory_grows_linearly_with_the_length():
    """And by the square, with all scores at once."""
    assert temp_bytes(1024, 64) < 4.4 * temp_bytes(256, 64)
    assert temp_bytes(1024, 1024) > 8 * temp_bytes(256, 256)


# ---------------------------------------------------------------------------------- kernels


KERNELS = {
    # cuDNN's has the interface of XLA's own, which runs anywhere
    "cudnn": partial(attention_kernels._cudnn, implementation="xla"),
    "splash": partial(attention_kernels._splash, interpret=True),
}


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_gives_what_the_blocks_give(name):
    q, k, v, _, _ = arrays()
    mask = jnp.asarray(left_and_right_padded())
    attend = partial(attention_kernels._shifted, KERNELS[name], mask=mask)
    want = blockwise().rows(q, k, v, mask)
    np.testing.assert_allclose(np.asarray(attend(q, k, v))[mask], np.asarray(want)[mask], atol=1e-4)
    counted = partial(_only, attend, mask)
    expected = gradient_of(partial(_only, partial(blockwise().rows, mask=mask), mask), (q, k, v))
    for a, b in zip(gradient_of(counted, (q, k, v)), expected, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-4)


def _only(attend, mask, q, k, v):
    return jnp.where(mask[..., None, None, None], attend(q, k, v), 0)


def test_the_tpu_kernel_lowers_for_a_tpu():
    q, k, v, _, _ = arrays(jnp.bfloat16)
    attend = attention_kernels.choose("splash", 1).rows
    lowered = (
        jax.jit(attend).trace(q, k, v, jnp.ones((B, T), bool)).lower(lowering_platforms=("tpu",))
    )
    assert "tpu_custom_call" in lowered.as_text()


def test_names_of_kernels():
    assert isinstance(attention_kernels.choose("cudnn", 8), Attention)
    assert attention_kernels.choose("cudnn", 8).answers is None
    with pytest.raises(ValueError, match=r"model\.attention='flash': there are xla, cudnn, splash"):
        attention_kernels.choose("flash", 8)
