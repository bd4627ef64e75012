"""config.json of a Hugging Face folder <-> LlamaConfig, for Llama, Qwen2 (2.5) and Qwen3.

What the model cannot do is refused by name: whatever is read here is computed as transformers does.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from grpo_jax.models.config import Llama3Scaling, LlamaConfig

# architecture in a config.json -> `LlamaConfig.family`, which is its model_type
ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}
# what sets the families apart
TRAITS = {
    "llama": {"qkv_bias": False, "qk_norm": False},
    "qwen2": {"qkv_bias": True, "qk_norm": False},
    "qwen3": {"qkv_bias": False, "qk_norm": True},
}
# where these are absent, transformers takes Llama's from the other sizes, but 32 key heads for a
# Qwen of any size, and 128 channels for a Qwen3: no real file means that
REQUIRED = {
    "llama": (),
    "qwen2": ("num_key_value_heads",),
    "qwen3": ("num_key_value_heads", "head_dim"),
}
# transformers' configs have these values where a config.json is silent (Llama 2's has no theta)
DEFAULT_THETA = 10000.0
DEFAULT_EPS = 1e-6
LLAMA3_ENTRIES = (
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
)


def read_config(folder: str | Path) -> LlamaConfig:
    """The model's shape from `folder`/config.json.

    Raises FileNotFoundError without that file, and ValueError (with the folder and the culprit)
    for an architecture, RoPE type, activation, bias or window that the model does not have.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: {folder} is no Hugging Face model folder")
    try:
        return from_hf(json.loads(path.read_text(encoding="utf-8")))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def from_hf(values: Mapping[str, Any]) -> LlamaConfig:
    """A config.json's dict -> LlamaConfig; both of transformers' layouts (see `_read_rope`)."""
    family = _family(values)
    _refuse_what_is_not_computed(values, family)
    heads, hidden = _need(values, "num_attention_heads"), _need(values, "hidden_size")
    for name in REQUIRED[family]:
        _need(values, name)
    theta, scaling = _read_rope(values)
    return LlamaConfig(
        vocab_size=_need(values, "vocab_size"),
        hidden_size=hidden,
        num_layers=_need(values, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=values.get("num_key_value_heads") or heads,
        head_dim=values.get("head_dim") or hidden // heads,
        intermediate_size=_need(values, "intermediate_size"),
        rope_theta=theta,
        rope_scaling=scaling,
        rms_norm_eps=values.get("rms_norm_eps", DEFAULT_EPS),
        tie_embeddings=values.get("tie_word_embeddings", False),
        family=family,
        qkv_bias=TRAITS[family]["qkv_bias"],
        qk_norm=TRAITS[family]["qk_norm"],
    )


def to_hf(config: LlamaConfig) -> dict[str, Any]:
    """LlamaConfig -> the entries of a config.json.

    RoPE is written in the older layout (`rope_theta` and `rope_scaling`): transformers 5 reads
    it too, whereas earlier readers do not know `rope_parameters`. Raises ValueError for a mix of
    traits that no family has.
    """
    traits = {"qkv_bias": config.qkv_bias, "qk_norm": config.qk_norm}
    if traits != TRAITS[config.family]:
        raise ValueError(f"family {config.family!r} has {TRAITS[config.family]}, not {traits}")
    s = config.rope_scaling
    scaling = s and {
        "rope_type": "llama3",
        "factor": s.factor,
        "low_freq_factor": s.low_freq_factor,
        "high_freq_factor": s.high_freq_factor,
        "original_max_position_embeddings": s.original_max_position,
    }
    own = {
        "llama": {"attention_bias": False, "mlp_bias": False},
        "qwen2": {"use_sliding_window": False},
        "qwen3": {"use_sliding_window": False, "attention_bias": False},
    }
    names = {family: architecture for architecture, family in ARCHITECTURES.items()}
    return {
        "architectures": [names[config.family]],
        "model_type": config.family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.intermediate_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": config.tie_embeddings,
    } | own[config.family]


def _need(values: Mapping[str, Any], name: str) -> Any:
    if values.get(name) is None:
        raise ValueError(f"no entry {name!r}")
    return values[name]


def _family(values: Mapping[str, Any]) -> str:
    """From `architectures` and `model_type`, which must agree; one of them may be absent."""
    architectures = values.get("architectures") or []
    unknown = [name for name in architectures if name not in ARCHITECTURES]
    if unknown or len(architectures) > 1:
        raise ValueError(
            f"architecture {', '.join(architectures)}: one of {', '.join(ARCHITECTURES)} is known"
        )
    named = [ARCHITECTURES[name] for name in architectures]
    kind = values.get("model_type", named[0] if named else None)
    if kind not in TRAITS:
        raise ValueError(f"model_type {kind!r}: only {', '.join(TRAITS)} are known")
    if named and named != [kind]:
        raise ValueError(f"model_type {kind!r} does not go with architecture {architectures[0]}")
    return kind


def _refuse_what_is_not_computed(values: Mapping[str, Any], family: str) -> None:
    # `attention_bias` also puts a bias on the output projection; Qwen2 has its three without it
    for name in ("attention_bias", "mlp_bias"):
        if values.get(name):
            raise ValueError(f"{name} is true: this {family} has no such biases")
    kinds = sorted(set(values.get("layer_types") or ()) - {"full_attention"})
    if kinds:
        raise ValueError(f"layer_types {', '.join(kinds)}: only 'full_attention' is known")
    if values.get("use_sliding_window"):
        raise ValueError("use_sliding_window is true: all layers attend to everything before")
    if values.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {values['hidden_act']!r}: only 'silu' is known")
    if values.get("quantization_config"):
        raise ValueError("quantization_config: the weights are quantised; only plain ones load")


def _read_rope(values: Mapping[str, Any]) -> tuple[float, Llama3Scaling | None]:
    """(theta, scaling) from `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling`.

    In the second layout the kind may be spelled `type`. An entry given twice must agree.
    """
    outer = ("rope_theta", "partial_rotary_factor")
    flat = {name: values[name] for name in outer if values.get(name) is not None}
    rope: dict[str, Any] = {}
    for part in (values.get("rope_parameters"), values.get("rope_scaling"), flat):
        for key, value in (part or {}).items():
            key = "rope_type" if key == "type" else key
            if rope.setdefault(key, value) != value:
                raise ValueError(f"two values of {key}: {rope[key]!r} and {value!r}")
    theta = float(rope.pop("rope_theta", DEFAULT_THETA))
    kind = rope.pop("rope_type", "default")
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope_type {kind!r}: only 'default' and 'llama3' are known")
    if rope.pop("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError("partial_rotary_factor is not 1: RoPE turns all channels")
    unknown = sorted(set(rope) - set(LLAMA3_ENTRIES if kind == "llama3" else ()))
    if unknown:
        raise ValueError(f"rope_type {kind!r} with {', '.join(unknown)}, which it does not have")
    if kind == "default":
        return theta, None
    factor, low, high, original = (_need(rope, name) for name in LLAMA3_ENTRIES)
    return theta, Llama3Scaling(factor, low, high, original)
