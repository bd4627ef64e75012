"""Low-rank adapters: the start that changes nothing, what they add, their gradients and size."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from grpo_jax.models import llama, lora
from grpo_jax.models.config import Llama3Scaling, LlamaConfig
from grpo_jax.models.lora import TARGETS, LoraSettings
from tests.models.test_llama import decode_all

CONFIG = LlamaConfig(11, 8, 2, 4, 2, 6, 10)
ALL = LoraSettings(3, 6.0, TARGETS)
MODEL = llama.build(CONFIG, lora_scale=ALL.scale)
TOKENS = jnp.array([[0, 0, 3, 4, 5], [6, 7, 8, 9, 10]])
MASK = jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], bool)
SHAPES = {
    "q": ("attention", (2, 8, 3), (2, 3, 2, 2, 6)),
    "k": ("attention", (2, 8, 3), (2, 3, 2, 6)),
    "v": ("attention", (2, 8, 3), (2, 3, 2, 6)),
    "o": ("attention", (2, 2, 2, 6, 3), (2, 3, 8)),
    "gate": ("mlp", (2, 8, 3), (2, 3, 10)),
    "up": ("mlp", (2, 8, 3), (2, 3, 10)),
    "down": ("mlp", (2, 10, 3), (2, 3, 8)),
}


def random_like(shapes, seed, size):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: jnp.asarray(size * rng.standard_normal(x.shape, np.float32)), shapes
    )


@pytest.fixture(scope="module")
def base():
    return random_like(jax.eval_shape(partial(llama.init, CONFIG), jax.random.key(0)), 0, 0.5)


@pytest.fixture(scope="module")
def fresh():
    return jax.jit(partial(lora.init, CONFIG, ALL))(jax.random.key(1))


@pytest.fixture(scope="module")
def adapters(fresh):
    """Adapters in the middle of training: no matrix is zero."""
    return random_like(fresh, 1, 0.3)


def only(adapters, target):
    part = SHAPES[target][0]
    return {"layers": {part: {"lora": {target: adapters["layers"][part]["lora"][target]}}}}


hidden = jax.jit(lambda params: MODEL.hidden(params, TOKENS, MASK))
merge = jax.jit(lambda params: lora.merge(CONFIG, params, ALL.scale))


def loss(params):
    return (MODEL.hidden(params, TOKENS, MASK) ** 3).sum()


# as in training: the adapters alone have gradients
gradient = jax.jit(jax.grad(lambda adapters, base: loss(lora.join(base, adapters))))


def test_fresh_adapters_change_no_bit_and_have_a_gradient(base, fresh):
    np.testing.assert_array_equal(hidden(lora.join(base, fresh)), hidden(base))
    got = gradient(fresh, base)
    for target, (part, *_) in SHAPES.items():
        pair = got["layers"][part]["lora"][target]
        assert abs(pair["b"]).max() > 0
        assert abs(pair["a"]).max() == 0  # as long as b is zero


def test_fresh_adapters_change_no_bit_in_bfloat16(base, fresh):
    model = llama.build(CONFIG, dtype="bfloat16", lora_scale=ALL.scale)
    apply = jax.jit(model.hidden)
    got, want = (apply(params, TOKENS, MASK) for params in (lora.join(base, fresh), base))
    assert want.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, want)


def test_adapters_equal_merged_weights(base, adapters):
    joined = lora.join(base, adapters)
    merged = merge(joined)
    assert jax.tree.structure(merged) == jax.tree.structure(base)
    assert abs(hidden(joined) - hidden(base)).max() > 0.1
    np.testing.assert_allclose(hidden(joined), hidden(merged), atol=2e-5, rtol=0)


@pytest.mark.parametrize("unrolled", [True, False])
def test_prefill_and_decode_apply_them_too(base, adapters, unrolled):
    options = {"unroll_layers": 8 if unrolled else 0, "turn_weights": unrolled}
    model = llama.build(CONFIG, lora_scale=ALL.scale, **options)
    joined = lora.join(base, adapters)
    # the last two tokens of TOKENS are taken as the completion
    states = decode_all(model, joined, TOKENS[:, :3], MASK[:, :3], TOKENS[:, 3:])
    want = hidden(merge(joined))[:, 2:]
    np.testing.assert_allclose(states, want, atol=2e-5, rtol=0)


def test_the_gradient_is_that_through_the_merged_weights(base, adapters):
    @jax.jit
    @jax.grad
    def through(adapters):
        return loss(lora.merge(CONFIG, lora.join(base, adapters), ALL.scale))

    want = through(adapters)
    got = gradient(adapters, base)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * abs(y).max(), rtol=0)


@pytest.mark.parametrize("target", TARGETS)
def test_one_target_alone(base, adapters, target):
    """All others' matrices are zero: what is left is what merging this one gives."""
    zero = jax.tree.map(jnp.zeros_like, adapters)
    part = SHAPES[target][0]
    zero["layers"][part]["lora"] |= {target: adapters["layers"][part]["lora"][target]}
    states = hidden(lora.join(base, zero))
    assert abs(states - hidden(base)).max() > 1e-2
    merged = merge(lora.join(base, only(adapters, target)))
    np.testing.assert_allclose(states, hidden(merged), atol=2e-5, rtol=0)


@pytest.mark.parametrize("target", ["o", "up"])
def test_a_model_with_one_target_has_no_others(base, adapters, target):
    joined = lora.join(base, only(adapters, target))
    want = hidden(merge(joined))
    np.testing.assert_allclose(hidden(joined), want, atol=2e-5, rtol=0)


@pytest.mark.parametrize("target", TARGETS)
def test_a_target_has_its_own_leaves_alone(target):
    make = partial(lora.init, CONFIG, LoraSettings(3, 6.0, (target,)))
    part, a, b = SHAPES[target]
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(make, jax.random.key(1)))
    assert shapes == {"layers": {part: {"lora": {target: {"a": a, "b": b}}}}}


def test_a_product_by_hand():
    """Merged weights of one layer against the definition, element by element."""
    params = {
        "layers": {
            "attention": {"qkv": np.zeros((1, 8, 2, 4, 6), np.float32)},
            "mlp": {"down": np.ones((1, 10, 8), np.float32)},
        }
    }
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((1, 8, 3)), rng.standard_normal((1, 3, 2, 2, 6))
    down = rng.standard_normal((1, 10, 3)), rng.standard_normal((1, 3, 8))
    adapters = {
        "layers": {
            "attention": {"lora": {"q": {"a": a, "b": b}}},
            "mlp": {"lora": {"down": dict(zip("ab", down, strict=True))}},
        }
    }
    merged = lora.merge(CONFIG, lora.join(params, adapters), 0.5)["layers"]
    qkv = np.asarray(merged["attention"]["qkv"])
    for kv, r, i in [(0, 0, 0), (1, 0, 5), (0, 1, 3)]:
        np.testing.assert_allclose(qkv[0, :, kv, r, i], 0.5 * a[0] @ b[0, :, kv, r, i], rtol=1e-5)
    np.testing.assert_array_equal(qkv[..., 2:, :], 0.0)
    want = 1 + 0.5 * down[0] @ down[1]
    np.testing.assert_allclose(merged["mlp"]["down"], want, rtol=1e-5)


def test_a_narrow_base_is_merged_in_float32(base, adapters):
    narrow = jax.tree.map(lambda x: np.asarray(x).astype(jnp.bfloat16), base)
    joined = lora.join(narrow, only(adapters, "up"))
    merged = jax.tree.map(np.asarray, jax.jit(partial(lora.merge, CONFIG))(joined, 1e-3)["layers"])
    assert merged["mlp"]["gate_up"].dtype == jnp.float32
    assert merged["mlp"]["down"].dtype == jnp.bfloat16
    moved = merged["mlp"]["gate_up"] - narrow["layers"]["mlp"]["gate_up"].astype(np.float32)
    assert 0 < abs(moved).max() < 2e-2  # less than bfloat16 could have kept
    assert (abs(moved[:, :, 1]) > 0).mean() > 0.99


def test_joining_copies_nothing_and_loses_nothing(base, adapters):
    before = jax.tree.structure(base)
    joined = lora.join(base, adapters)
    assert jax.tree.structure(base) == before
    assert joined["layers"]["mlp"]["down"] is base["layers"]["mlp"]["down"]
    pair = adapters["layers"]["mlp"]["lora"]["up"]
    assert joined["layers"]["mlp"]["lora"]["up"]["a"] is pair["a"]
    assert lora.count(joined) == lora.count(base) + lora.count(adapters)
    assert lora.ranks(joined["layers"]) == dict.fromkeys(TARGETS, 3)
    with pytest.raises(ValueError, match="down"):
        lora.join(base, {"layers": {"mlp": {"down": 1}}})
    assert lora.merge(CONFIG, base, 2.0) is base


def test_the_start_is_that_of_peft(fresh):
    """Uniform within 1/sqrt(fan-in), of standard deviation 1/sqrt(3 fan-in); b is zero."""
    for target, fan_in in {"q": 8, "o": 24, "down": 10}.items():
        pair = fresh["layers"][SHAPES[target][0]]["lora"][target]
        assert pair["a"].dtype == pair["b"].dtype == jnp.float32
        assert 0.8 * fan_in**-0.5 < abs(pair["a"]).max() <= fan_in**-0.5
        np.testing.assert_allclose(pair["a"].std(), (3 * fan_in) ** -0.5, rtol=0.2)
        assert not pair["b"].any()
    mlp = fresh["layers"]["mlp"]["lora"]
    assert not np.array_equal(mlp["up"]["a"][0], mlp["up"]["a"][1])
    assert not np.array_equal(mlp["up"]["a"], mlp["gate"]["a"])
    # a target starts from the same numbers with and without others beside it
    start = jax.jit(partial(lora.init, CONFIG, LoraSettings(3, 6.0, ("up",))))
    alone = start(jax.random.key(1))
    np.testing.assert_array_equal(alone["layers"]["mlp"]["lora"]["up"]["a"], mlp["up"]["a"])


def test_llama_32_3b_at_rank_32_has_the_articles_numbers():
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=3072,
        num_layers=28,
        num_heads=24,
        num_kv_heads=8,
        head_dim=128,
        intermediate_size=8192,
        rope_theta=5e5,
        rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192),
        tie_embeddings=True,
    )
    key = jax.random.key(0)
    settings = LoraSettings(32, 64.0, TARGETS)
    base = jax.eval_shape(partial(llama.init, config), key)
    adapters = jax.eval_shape(partial(lora.init, config, settings), key)
    assert lora.count(adapters) == 48_627_712
    assert lora.count(lora.join(base, adapters)) == 3_261_377_536


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"rank": -1}, "rank=-1"),
        ({"targets": ("q", "embed")}, "embed"),
        ({"targets": ()}, "targets is empty"),
        ({"targets": ("q", "up", "q")}, "q more than once"),
        ({"alpha": 0.0}, r"alpha=0\.0"),
        ({"alpha": -8.0}, r"alpha=-8\.0"),
        ({"alpha": float("nan")}, "alpha=nan"),
        ({"alpha": float("inf")}, "alpha=inf"),
    ],
)
def test_settings_that_no_adapter_can_have(changes, named):
    with pytest.raises(ValueError, match=named):
        LoraSettings(**{"rank": 4, "alpha": 8.0, "targets": ("q",)} | changes)


def test_rank_0_is_off():
    off = LoraSettings(0, 16.0, ())
    assert (off.active, off.scale) == (False, 1.0)
    assert lora.init(CONFIG, off, jax.random.key(0)) == {}
    assert (ALL.active, ALL.scale) == (True, 2.0)
