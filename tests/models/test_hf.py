"""Hugging Face folders in and out: tensor placement, tied heads, round trips."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from grpo_jax.models import hf
from grpo_jax.models.config import LlamaConfig
from grpo_jax.models.hf_config import to_hf
from tests.models.test_llama import DATA, KINDS

TINY = LlamaConfig(5, 6, 2, 4, 2, 2, 3, tie_embeddings=False)
QWEN2 = LlamaConfig(5, 6, 2, 4, 2, 2, 3, qkv_bias=True, family="qwen2")
QWEN3 = LlamaConfig(5, 6, 2, 4, 2, 2, 3, qk_norm=True, family="qwen3")


def numbered(config):
    """Hugging Face tensors whose every element differs from all others."""
    count, result = 0, {}
    for name, place in hf._places(config).items():
        size = int(np.prod(place.shape))
        result[name] = np.arange(count, count + size, dtype=np.float32).reshape(place.shape)
        count += size
    return result


def write(folder, config, tensors):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(to_hf(config)))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_every_tensor_goes_to_its_place(tmp_path):
    files = numbered(TINY)
    config, params = hf.load(write(tmp_path, TINY, files))
    assert config == TINY
    layers, h, R = params["layers"], 2, 2
    for l in range(2):
        name = f"model.layers.{l}."
        qkv = layers["attention"]["qkv"][l]  # [D, K, R+2, h]
        q, k, v = (files[f"{name}self_attn.{x}_proj.weight"] for x in "qkv")
        out = files[f"{name}self_attn.o_proj.weight"]
        for kv in range(2):
            for r in range(R):
                rows = slice((kv * R + r) * h, (kv * R + r + 1) * h)
                np.testing.assert_array_equal(qkv[:, kv, r], q[rows].T)
                np.testing.assert_array_equal(layers["attention"]["out"][l, kv, r], out[:, rows].T)
            np.testing.assert_array_equal(qkv[:, kv, R], k[kv * h : (kv + 1) * h].T)
            np.testing.assert_array_equal(qkv[:, kv, R + 1], v[kv * h : (kv + 1) * h].T)
        gate_up = layers["mlp"]["gate_up"][l]
        np.testing.assert_array_equal(gate_up[:, 0], files[f"{name}mlp.gate_proj.weight"].T)
        np.testing.assert_array_equal(gate_up[:, 1], files[f"{name}mlp.up_proj.weight"].T)
        np.testing.assert_array_equal(
            layers["mlp"]["down"][l], files[f"{name}mlp.down_proj.weight"].T
        )
        norms = layers["attention_norm"]["scale"][l], layers["mlp_norm"]["scale"][l]
        np.testing.assert_array_equal(norms[0], files[f"{name}input_layernorm.weight"])
        np.testing.assert_array_equal(norms[1], files[f"{name}post_attention_layernorm.weight"])
    np.testing.assert_array_equal(params["embed"]["embedding"], files["model.embed_tokens.weight"])
    np.testing.assert_array_equal(params["head"]["embedding"], files["lm_head.weight"])
    np.testing.assert_array_equal(params["norm"]["scale"], files["model.norm.weight"])


def test_the_traits_of_the_qwens_go_to_their_places(tmp_path):
    files = numbered(QWEN2)
    _, params = hf.load(write(tmp_path / "2", QWEN2, files))
    bias = params["layers"]["attention"]["qkv_bias"]  # [L, K, R+2, h]
    q, k, v = (files[f"model.layers.1.self_attn.{x}_proj.bias"].reshape(-1, 2) for x in "qkv")
    for kv in range(2):
        np.testing.assert_array_equal(bias[1, kv], [q[2 * kv], q[2 * kv + 1], k[kv], v[kv]])
    files = numbered(QWEN3)
    _, params = hf.load(write(tmp_path / "3", QWEN3, files))
    for name in ("q_norm", "k_norm"):
        scale = params["layers"]["attention"][name]["scale"]
        np.testing.assert_array_equal(scale[1], files[f"model.layers.1.self_attn.{name}.weight"])


def test_another_familys_tensors_are_named(tmp_path):
    norm = "model.layers.0.self_attn.q_norm.weight"
    cases = [
        (QWEN2, TINY, r"missing model\.layers\.0\.self_attn\.k_proj\.bias"),
        (TINY, QWEN2, r"unexpected model\.layers\.0\.self_attn\.k_proj\.bias"),
        (QWEN3, QWEN2, norm),
    ]
    for i, (config, other, named) in enumerate(cases):
        with pytest.raises(ValueError, match=named):
            hf.load(write(tmp_path / str(i), config, numbered(other)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_of_transformers_survives_bit_for_bit(kind, tmp_path):
    """Load transformers' file, save it: the same names, shapes and bits."""
    want = load_file(DATA / kind / "model.safetensors")
    dtype = "float32" if kind == "llama2" else "bfloat16"
    config, params = hf.load(DATA / kind, dtype)
    hf.save(tmp_path, config, params, dtype)
    got = load_file(tmp_path / "model.safetensors")
    assert got.keys() == want.keys()
    for name in want:
        assert got[name].dtype == want[name].dtype == jnp.dtype(dtype)
        np.testing.assert_array_equal(got[name].view(np.uint16), want[name].view(np.uint16))
    assert hf.read_config(tmp_path) == config == hf.read_config(DATA / kind)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.torch
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_computes_the_same_from_what_is_saved(kind, tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    config, params = hf.load(DATA / kind)
    hf.save(tmp_path, config, params)
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    want = load_file(DATA / kind / "reference.safetensors")
    tokens, mask = torch.tensor(want["tokens"]).long(), torch.tensor(want["mask"]).long()
    position = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        got = model(tokens, attention_mask=mask, position_ids=position).logits.numpy()
    np.testing.assert_allclose(got[want["mask"]], want["logits"][want["mask"]], atol=1e-4, rtol=0)


def test_float32_parameters_survive_bit_for_bit(tmp_path):
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda s: jnp.asarray(rng.standard_normal(s.shape, np.float32)), hf._shapes(TINY)
    )
    hf.save(tmp_path, TINY, params, extra={"bos_token_id": 1, "hidden_size": 99})
    config, back = hf.load(tmp_path)
    assert config == TINY
    assert json.loads((tmp_path / "config.json").read_text())["bos_token_id"] == 1
    assert jax.tree.structure(back) == jax.tree.structure(params)
    jax.tree.map(np.testing.assert_array_equal, back, params)


def test_the_dtype_is_that_asked_for(tmp_path):
    _, params = hf.load(DATA / "tied", "float32")
    _, narrow = hf.load(DATA / "tied", "bfloat16")
    assert {x.dtype for x in jax.tree.leaves(params)} == {np.dtype(np.float32)}
    assert {x.dtype for x in jax.tree.leaves(narrow)} == {jnp.dtype("bfloat16")}
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b.astype(a.dtype)), params, narrow)


def test_a_sharded_folder_loads_as_the_single_file(tmp_path):
    files = numbered(TINY)
    single = write(tmp_path / "single", TINY, files)
    folder = write(tmp_path / "sharded", TINY, files)
    (folder / "model.safetensors").unlink()
    shards = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    where = {name: shards[i % 2] for i, name in enumerate(files)}
    for shard in shards:
        save_file({n: t for n, t in files.items() if where[n] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    jax.tree.map(np.testing.assert_array_equal, hf.load(folder)[1], hf.load(single)[1])
    (folder / shards[1]).unlink()
    with pytest.raises(FileNotFoundError, match=shards[1]):
        hf.load(folder)


def test_absent_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        hf.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(to_hf(TINY)))
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors"):
        hf.load(tmp_path)


# -------------------------------------------------------------------------- wrong and tied files


def tied(value):
    return LlamaConfig(5, 6, 2, 4, 2, 2, 3, tie_embeddings=value)


def test_a_tied_model_has_no_head(tmp_path):
    _, params = hf.load(write(tmp_path, tied(True), numbered(tied(True))))
    assert "head" not in params


def test_an_untied_model_needs_its_head(tmp_path):
    folder = write(tmp_path, tied(False), numbered(tied(True)))
    with pytest.raises(ValueError, match=r"missing lm_head\.weight.*tie_word_embeddings"):
        hf.load(folder)


def test_a_tied_model_may_store_its_embedding_twice_but_no_other_head(tmp_path):
    files = numbered(tied(True))
    files["lm_head.weight"] = files["model.embed_tokens.weight"].copy()
    _, params = hf.load(write(tmp_path, tied(True), files))
    assert "head" not in params
    files["lm_head.weight"][0, 0] += 1
    with pytest.raises(ValueError, match=r"lm_head\.weight is not the embedding"):
        hf.load(write(tmp_path, tied(True), files))


def test_tensors_that_do_not_fit_are_named(tmp_path):
    files = numbered(TINY)
    q = "model.layers.1.self_attn.q_proj.weight"
    cases = [
        ({k: v for k, v in files.items() if k != q}, f"missing {q}"),
        (files | {"model.layers.0.self_attn.q_proj.bias": np.zeros(8)}, "q_proj.bias"),
        (files | {"model.layers.2.mlp.up_proj.weight": np.zeros((3, 6))}, "layers.2"),
        (files | {q: np.zeros((8, 5), np.float32)}, f"{q} has shape"),
        (files | {q: np.zeros((8, 6), np.int8)}, f"{q} is int8"),
    ]
    for i, (tensors, message) in enumerate(cases):
        with pytest.raises(ValueError, match=message):
            hf.load(write(tmp_path / str(i), TINY, tensors))


def test_the_rope_buffers_of_old_files_are_no_surplus(tmp_path):
    files = numbered(TINY)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(1, np.float32)}
    _, want = hf.load(write(tmp_path / "a", TINY, files))
    _, got = hf.load(write(tmp_path / "b", TINY, files | extra))
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_parameters_of_another_shape_are_not_saved(tmp_path):
    _, params = hf.load(write(tmp_path / "a", TINY, numbered(TINY)))
    with pytest.raises(ValueError, match="not those of"):
        hf.save(tmp_path / "b", tied(True), params)
    assert not (tmp_path / "b" / "model.safetensors").exists()
