"""config.json <-> LlamaConfig: both layouts, the families, and what is refused by name."""

import json
from dataclasses import replace

import pytest

from grpo_jax.models import hf
from grpo_jax.models.config import Llama3Scaling, LlamaConfig
from grpo_jax.models.hf_config import from_hf, to_hf

# Llama 3.2 1B's config.json in the layout of the hub
OLD = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "tie_word_embeddings": True,
}
NEW = {k: v for k, v in OLD.items() if not k.startswith("rope_")} | {
    "rope_parameters": {"rope_theta": 500000.0, **OLD["rope_scaling"]}
}
PARSED = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    num_layers=16,
    num_heads=32,
    num_kv_heads=8,
    head_dim=64,
    intermediate_size=8192,
    rope_theta=500000.0,
    rope_scaling=Llama3Scaling(32.0, 1.0, 4.0, 8192),
    rms_norm_eps=1e-5,
    tie_embeddings=True,
)
TINY = LlamaConfig(5, 6, 2, 4, 2, 2, 3, tie_embeddings=False)
QWEN2 = LlamaConfig(5, 6, 2, 4, 2, 2, 3, qkv_bias=True, family="qwen2")
QWEN3 = LlamaConfig(5, 6, 2, 4, 2, 2, 3, qk_norm=True, family="qwen3")


def test_both_layouts_of_the_config_are_read():
    legacy = {k: v for k, v in OLD["rope_scaling"].items() if k != "rope_type"}
    legacy = OLD | {"rope_scaling": legacy | {"type": "llama3"}}
    assert from_hf(OLD) == from_hf(NEW) == from_hf(legacy) == PARSED


def test_unscaled_rope_in_both_layouts():
    old = OLD | {"rope_scaling": None}
    new = NEW | {"rope_parameters": {"rope_theta": 500000.0, "rope_type": "default"}}
    assert from_hf(old) == from_hf(new)
    assert from_hf(old).rope_theta == 500000.0
    assert from_hf(old).rope_scaling is None


def test_entries_that_old_files_leave_out_have_transformers_defaults():
    optional = ("num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rms_norm_eps")
    bare = {k: v for k, v in OLD.items() if k not in (*optional, "tie_word_embeddings")}
    config = from_hf(bare)
    assert (config.num_kv_heads, config.head_dim) == (32, 64)
    assert (config.rope_theta, config.rms_norm_eps) == (10000.0, 1e-6)
    assert config.tie_embeddings is False


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "MistralForCausalLM"),
        ({"architectures": ["LlamaForCausalLM", "Qwen2ForCausalLM"]}, "Qwen2ForCausalLM"),
        ({"architectures": None, "model_type": "gemma3_text"}, "gemma3_text"),
        ({"model_type": "qwen3"}, "'qwen3' does not go with architecture LlamaForCausalLM"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"use_sliding_window": True}, "use_sliding_window"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"architectures": None, "model_type": None}, "model_type None"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "linear"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 4.0}}, "low_freq_factor"),
        ({"rope_scaling": OLD["rope_scaling"] | {"beta_fast": 32.0}}, "beta_fast"),
        ({"rope_scaling": {"factor": 4.0}}, "'default' with factor"),
        ({"rope_scaling": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ({"rope_parameters": {"rope_theta": 10000.0}}, "rope_theta"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_key_value_heads": 5}, "num_kv_heads"),
    ],
)
def test_what_the_model_lacks_is_an_error_that_names_it(tmp_path, change, named):
    (tmp_path / "config.json").write_text(json.dumps(OLD | change))
    with pytest.raises(ValueError, match=named) as error:
        hf.read_config(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_the_config_survives_writing():
    for config in (PARSED, TINY, QWEN2, QWEN3):
        assert from_hf(json.loads(json.dumps(to_hf(config)))) == config


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"family": "llama"}, "qkv_bias"),
        ({"family": "qwen3"}, "qk_norm"),
        ({"qk_norm": True}, "qwen2"),
    ],
)
def test_a_mix_of_families_has_no_name(wrong, named, tmp_path):
    config = replace(QWEN2, **wrong)
    with pytest.raises(ValueError, match=named):
        hf.save(tmp_path / "out", config, hf._shapes(config))
    assert not (tmp_path / "out").exists()


def test_a_family_has_a_name():
    with pytest.raises(ValueError, match="'qwen'"):
        replace(QWEN2, family="qwen")


# Qwen2.5's and Qwen3's, cut down to what matters: sliding windows are there, but switched off
QWEN2_FILE = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "vocab_size": 5,
    "hidden_size": 6,
    "intermediate_size": 3,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 2,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": 32768,
    "max_window_layers": 1,
}
QWEN3_FILE = QWEN2_FILE | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "layer_types": ["full_attention", "full_attention"],
}


def test_the_qwens_are_read_in_both_layouts():
    for file, want in ((QWEN2_FILE, QWEN2), (QWEN3_FILE, QWEN3)):
        assert from_hf(file) == want
        assert from_hf({k: v for k, v in file.items() if k != "architectures"}) == want
        flat = file | {"rope_theta": 1e6, "rope_scaling": None}
        nested = file | {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
        assert from_hf(flat) == from_hf(nested) == replace(want, rope_theta=1e6)


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        (QWEN2_FILE, {"use_sliding_window": True}, "use_sliding_window"),
        (QWEN2_FILE, {"rope_scaling": {"type": "yarn", "factor": 4.0}}, "yarn"),
        (QWEN2_FILE, {"num_key_value_heads": None}, "num_key_value_heads"),
        (QWEN3_FILE, {"attention_bias": True}, "attention_bias"),
        (QWEN3_FILE, {"head_dim": None}, "head_dim"),
        (QWEN3_FILE, {"model_type": "qwen3_moe"}, "qwen3_moe"),
    ],
)
def test_what_no_qwen_here_has_is_an_error_that_names_it(file, change, named):
    with pytest.raises(ValueError, match=named):
        from_hf(file | change)
