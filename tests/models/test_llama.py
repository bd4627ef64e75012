"""The model against transformers' own logits, and against itself (padding, cache, remat).

The reference numbers are the output of tests/data/make_llama_reference.py.
"""

import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from grpo_jax.generate import generate
from grpo_jax.models import hf, llama, rope
from grpo_jax.models.config import Llama3Scaling, LlamaConfig
from grpo_jax.models.linear import Turned
from grpo_jax.types import SamplingParams

DATA = Path(__file__).parents[1] / "data" / "llama"
KINDS = (
    "tied",
    "untied",
    "llama3",
    "wide_heads",
    "llama2",
    "smollm2",
    "qwen2",
    "qwen2_untied",
    "qwen3",
)
ROOT = Path(__file__).parents[2]


def load(kind):
    config, params = hf.load(DATA / kind)
    return llama.build(config), params, load_file(DATA / kind / "reference.safetensors")


def logits(model, params, tokens, mask):
    def apply(params):
        return model.hidden(params, jnp.asarray(tokens), jnp.asarray(mask)) @ model.head(params).T

    return np.asarray(jax.jit(apply)(params))


@pytest.mark.parametrize("kind", KINDS)
def test_logits_equal_transformers(kind):
    model, params, want = load(kind)
    got = logits(model, params, want["tokens"], want["mask"])
    np.testing.assert_allclose(got[want["mask"]], want["logits"][want["mask"]], atol=1e-4, rtol=0)


def test_a_padded_row_equals_the_row_alone():
    model, params, want = load("tied")
    got = logits(model, params, want["tokens"], want["mask"])
    for tokens, mask, row in zip(want["tokens"], want["mask"], got, strict=True):
        alone = logits(model, params, tokens[mask][None], np.ones((1, mask.sum()), bool))[0]
        np.testing.assert_allclose(row[mask], alone, atol=1e-4, rtol=0)
        assert (row[mask].argmax(-1) == alone.argmax(-1)).all()


def test_a_row_of_padding_alone_stays_finite():
    model, params, want = load("tied")
    mask = want["mask"].copy()
    mask[0] = False
    assert np.isfinite(logits(model, params, want["tokens"], mask)).all()


def decode_all(model, params, prompt, prompt_mask, completion):
    """Teacher-forced hidden states [B, 1 + T, D] from prefill and decode; B/P rows a prompt."""
    group = len(completion) // len(prompt)
    hidden, prompt_cache = jax.jit(model.prefill)(params, prompt, prompt_mask)
    states = [jnp.repeat(hidden, group, 0)]
    position = jnp.repeat(prompt_mask.sum(-1), group)
    cache = model.empty_cache(len(completion), completion.shape[1])
    step, layers = jax.jit(model.decode), model.unstack(params)
    for t in range(completion.shape[1]):
        token = completion[:, t]
        hidden, cache = step(
            *(layers, token, position + t, prompt_cache, prompt_mask, cache),
            *(jnp.int32(t), (jnp.arange(completion.shape[1]) <= t)[None]),
        )
        states.append(hidden)
    return jnp.stack(states, 1)


@pytest.mark.parametrize(
    ("kind", "unrolled", "turned"),
    [
        ("tied", True, False),
        ("llama3", False, True),
        ("qwen2", False, False),
        ("qwen3", True, True),
    ],
)
def test_cached_decode_equals_the_full_forward(kind, unrolled, turned):
    config, params = hf.load(DATA / kind)
    model = llama.build(config, unroll_layers=8 if unrolled else 0, turn_weights=turned)
    rng = np.random.default_rng(0)
    S, T, group = 6, 5, 2
    prompt = jnp.asarray(rng.integers(0, 64, (3, S)))
    prompt_mask = jnp.arange(S) >= jnp.array([0, 3, 5])[:, None]
    completion = jnp.asarray(rng.integers(0, 64, (3 * group, T)))
    got = decode_all(model, params, prompt, prompt_mask, completion)
    tokens = jnp.concatenate([jnp.repeat(prompt, group, 0), completion], 1)
    mask = jnp.pad(jnp.repeat(prompt_mask, group, 0), ((0, 0), (0, T)), constant_values=True)
    want = jax.jit(model.hidden)(params, tokens, mask)[:, S - 1 :]
    head = model.head(params)
    np.testing.assert_allclose(got @ head.T, want @ head.T, atol=1e-4, rtol=0)


def test_the_layers_keep_activations_for_the_backward_pass_and_no_weights():
    """What a scan over layers stacks: what came in, both norms' rows, q, k, v, the attention (in
    two layouts, and its log-normalisers), the sum, gate and up, their product. A weight among it
    would be a copy of every layer's."""
    B, T, config = 5, 7, LlamaConfig(64, 24, 3, 4, 2, 6, 40)
    model = llama.build(config)
    tokens, mask = jnp.zeros((B, T), int), jnp.ones((B, T), bool)

    def loss(params):
        return model.hidden(params, tokens, mask).sum()

    params = jax.eval_shape(model.init, jax.random.key(0))
    (scan, *_) = scans(jax.make_jaxpr(jax.grad(loss))(params).jaxpr)
    kept = [v.aval.shape[1:] for v in scan.outvars[scan.params["num_carry"] :]]
    assert len(kept) == 12 and all(shape[0] == B for shape in kept), kept


def scans(jaxpr):
    for equation in jaxpr.eqns:
        if equation.primitive.name == "scan" and equation.params["length"] == 3:
            yield equation
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from scans(inner)


WIDE = LlamaConfig(64, 512, 2, 4, 2, 32, 768)


def rolled_out(dtype, **options):
    """The sampler's program, and what it gives for random parameters."""
    model = llama.build(WIDE, dtype=dtype, **options)
    program = partial(generate, model, sampling_params=SamplingParams(6), eos_ids=(64,))
    prompts = jnp.arange(3, 11).reshape(2, 4), jnp.ones((2, 4), bool)
    given = model.init(jax.random.key(0)), *prompts, jnp.arange(8), jax.random.key(1)
    compiled = jax.jit(program).lower(*given).compile()
    return compiled.as_text(), compiled(*given)


@pytest.mark.parametrize(("dtype", "bound"), [("float32", 1e-5), ("bfloat16", 0.05)])
def test_turned_weights_sample_the_same(dtype, bound):
    turned, plain = (rolled_out(dtype, turn_weights=turn)[1] for turn in (True, False))
    np.testing.assert_array_equal(turned[0], plain[0])
    np.testing.assert_allclose(turned[1], plain[1], atol=bound)


def test_wide_models_weights_are_turned_on_a_cpu():
    """What the loop reads lies [out, in] (gate and up: 1536 x 512), has no float32 copy, and is the
    left factor of its product with 8 rows."""
    turned, plain = (rolled_out("bfloat16", turn_weights=turn)[0] for turn in ("auto", False))
    assert "bf16[1536,512]" in turned and "f32[1536,512]" not in turned
    assert "f32[1536,8]" in turned
    assert "[1536,512]" not in plain and "[1536,8]" not in plain
    small = replace(WIDE, hidden_size=256)
    for config, backend, wanted in (
        (WIDE, "cpu", True),
        (small, "cpu", False),
        (WIDE, "gpu", False),
    ):
        layers = jax.eval_shape(
            llama.build(config, backend=backend).unstack,
            jax.eval_shape(partial(llama.init, config), jax.random.key(0)),
        )
        assert isinstance(layers["layers"][0]["mlp"]["down"], Turned) == wanted


def test_a_cpus_cache_is_float32_and_rounded_as_bfloat16():
    """Its numbers are those that a bfloat16 cache would have."""
    cpu, other = (llama.build(WIDE, dtype="bfloat16", backend=b) for b in ("cpu", "gpu"))
    params = cpu.init(jax.random.key(0))
    prompt, seen = jnp.array([[3, 4]]), jnp.ones((1, 2), bool)
    _, shared = cpu.prefill(params, prompt, seen)
    given = jnp.array([5, 6]), jnp.array([2, 2]), shared, seen
    now = jnp.int32(0), jnp.arange(3)[None] < 1
    (x, kept), (y, exact) = (
        jax.jit(model.decode)(model.unstack(params), *given, model.empty_cache(2, 3), *now)
        for model in (cpu, other)
    )
    for a, b in zip(jax.tree.leaves(kept), jax.tree.leaves(exact), strict=True):
        assert (a.dtype, b.dtype) == (jnp.float32, jnp.bfloat16)
        np.testing.assert_array_equal(a[..., :1, :1], jnp.float32(b)[..., :1, :1])
    np.testing.assert_allclose(jnp.float32(x), jnp.float32(y), atol=0.05)


@pytest.mark.parametrize("remat", [True, "dots"])
def test_remat_changes_neither_value_nor_gradient(remat):
    model, params, want = load("tied")
    again = llama.build(model.config, remat=remat)

    def loss(model, params):
        return (model.hidden(params, want["tokens"], want["mask"]) ** 2).mean()

    value, gradient = jax.jit(jax.value_and_grad(lambda p: loss(model, p)))(params)
    value2, gradient2 = jax.jit(jax.value_and_grad(lambda p: loss(again, p)))(params)
    np.testing.assert_allclose(value, value2, rtol=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient, gradient2)


@pytest.mark.parametrize("tied", [True, False])
def test_random_parameters_have_the_documented_tree(tied):
    config = LlamaConfig(7, 8, 3, 4, 2, 6, 10, tie_embeddings=tied)
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(partial(llama.init, config), jax.random.key(0)))
    want = {
        "embed": {"embedding": (7, 8)},
        "layers": {
            "attention_norm": {"scale": (3, 8)},
            "attention": {"qkv": (3, 8, 2, 4, 6), "out": (3, 2, 2, 6, 8)},
            "mlp_norm": {"scale": (3, 8)},
            "mlp": {"gate_up": (3, 8, 2, 10), "down": (3, 10, 8)},
        },
        "norm": {"scale": (8,)},
    }
    assert shapes == want | ({} if tied else {"head": {"embedding": (7, 8)}})


def test_what_a_qwen_has_besides():
    config = LlamaConfig(7, 8, 3, 4, 2, 6, 10, qkv_bias=True, qk_norm=True)
    shapes = jax.tree.map(jnp.shape, jax.eval_shape(partial(llama.init, config), jax.random.key(0)))
    assert shapes["layers"]["attention"] == {
        "qkv": (3, 8, 2, 4, 6),
        "qkv_bias": (3, 2, 4, 6),
        "q_norm": {"scale": (3, 6)},
        "k_norm": {"scale": (3, 6)},
        "out": (3, 2, 2, 6, 8),
    }


def rope_config(**changes):
    return LlamaConfig(8, 64, 1, 1, 1, **{"head_dim": 64, "intermediate_size": 8} | changes)


def test_llama3_scaling_of_the_inverse_frequencies():
    scaling = Llama3Scaling(32.0, 1.0, 4.0, 8192)
    plain = rope.inverse_frequencies(rope_config(rope_theta=5e5))
    scaled = rope.inverse_frequencies(rope_config(rope_theta=5e5, rope_scaling=scaling))
    ratio = plain / scaled
    np.testing.assert_array_equal(ratio[:15], 1.0)
    np.testing.assert_allclose(ratio[15:18], [1.65132925, 3.2922621, 9.66672898], rtol=1e-5)
    np.testing.assert_allclose(ratio[18:], 32.0, rtol=1e-6)
    want = [0.003211446, 0.0012905479, 9.4183067e-8]
    np.testing.assert_allclose(scaled[[14, 15, 31]], want, rtol=1e-6)


@pytest.mark.parametrize("rotate", [rope.rotate, rope.rotate_few])
def test_rope_pairs_channel_i_with_its_half(rotate):
    # position 1, frequencies 1 and 0.01; pairing neighbours would give -1.14263966 first
    angle = jnp.array([1.0, 0.01])
    got = rotate(jnp.array([1.0, 2.0, 3.0, 4.0]), jnp.cos(angle), jnp.sin(angle))
    np.testing.assert_allclose(got, [-1.98411065, 1.95990067, 2.4623779, 4.01979967], rtol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_ways_to_turn_a_vector_are_one(dtype):
    x = jax.random.normal(jax.random.key(0), (5, 2, 3, 8), dtype)
    position, config = jnp.array([0, 1, 7, 300, 2000]), rope_config(head_dim=8)
    many, few = (rope.rotation(config, position, few=few)(x) for few in (False, True))
    assert many.dtype == few.dtype == x.dtype
    np.testing.assert_allclose(*(jnp.float32(y) for y in (few, many)), rtol=2**-7, atol=1e-6)
    assert abs(jnp.float32(many - x)).max() > 1


def test_positions_count_the_tokens_before():
    mask = jnp.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], bool)
    assert rope.positions(mask).tolist() == [[0, 0, 0, 1, 2], [0, 1, 2, 3, 4]]


@pytest.fixture(scope="module")
def smollm2():
    folder = Path("~/.cache/grpo_jax/smollm2-135m-instruct").expanduser()
    subprocess.run([sys.executable, str(ROOT / "scripts" / "fetch_smollm2.py")], check=True)
    config, params = hf.load(folder)
    return llama.build(config), jax.device_put(params)


@pytest.mark.network
@pytest.mark.parametrize("index", [0, 1])
def test_smollm2_equals_transformers(smollm2, index):
    model, params = smollm2
    facts = json.loads((DATA / "smollm2.json").read_text())
    prompt = facts["prompts"][index]
    ids = np.array([prompt["ids"]])
    got = logits(model, params, ids, np.ones(ids.shape, bool))[0, -3:]
    want = np.array(prompt["logits"])
    print("max |difference|:", abs(got[:, facts["vocabulary"]] - want).max())
    np.testing.assert_allclose(got[:, facts["vocabulary"]], want, atol=1e-4, rtol=0)
    np.testing.assert_allclose(got.max(-1), prompt["max"], atol=1e-4, rtol=0)
    assert got.argmax(-1).tolist() == prompt["argmax"]


@pytest.mark.network
@pytest.mark.parametrize("index", [0, 1])
def test_smollm2_decodes_greedily_as_transformers(smollm2, index):
    model, params = smollm2
    prompt = json.loads((DATA / "smollm2.json").read_text())["prompts"][index]
    added = jnp.array([prompt["greedy"]])
    ids = jnp.array([[0, 0, *prompt["ids"]]])  # two slots of padding
    mask = jnp.arange(ids.shape[1])[None] >= 2
    states = decode_all(model, params, ids, mask, added)[:, :-1]
    assert (states @ model.head(params).T).argmax(-1).tolist() == added.tolist()


def test_layers_are_declared_once_and_share_no_parameters():
    """Inside a trace, which must not outlive it, as outside; adapters are another declaration."""
    config = LlamaConfig(16, 8, 2, 2, 1, 4, 16)
    params = llama.init(config, jax.random.key(0))
    llama._declared.cache_clear()
    with jax.checking_leaks():
        jax.jit(llama.build(config).hidden)(params, jnp.array([[3, 4]]), jnp.ones((1, 2), bool))
    layers = [jax.tree.map(lambda a, i=i: a[i], params["layers"]) for i in range(2)]
    one, other = (llama._block(config, 1.0, layer) for layer in layers)
    assert llama._declared.cache_info().misses == 2  # a layer, the last norm
    for block, layer in ((one, layers[0]), (other, layers[1])):
        np.testing.assert_array_equal(block.mlp.down[...], layer["mlp"]["down"])
    ranked = {"lora": {"q": {"a": jnp.ones((config.hidden_size, 3)), "b": jnp.ones((3, 4))}}}
    llama._block(config, 1.0, layers[0] | {"attention": layers[0]["attention"] | ranked})
    assert llama._declared.cache_info().misses == 3
