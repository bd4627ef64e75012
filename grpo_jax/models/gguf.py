"""Weights from a GGUF file (llama.cpp's format), dequantised by the `gguf` package, no torch.

For a Llama, llama.cpp rotates neighbouring channels, Hugging Face channel i with i + h/2; its
converter reorders the rows of the query and key projections accordingly (`permute` in llama.cpp's
convert_hf_to_gguf.py), but leaves Qwen2's and Qwen3's as they are. Loading undoes that, renames the
tensors, and leaves the rest to hf.py.
"""

from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from grpo_jax.models import hf
from grpo_jax.models.config import LlamaConfig
from grpo_jax.models.hf_config import DEFAULT_THETA, TRAITS
from grpo_jax.types import Params

OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
INNER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}


def load(path: str | Path, dtype: str = "float32") -> tuple[LlamaConfig, Params]:
    """A GGUF file -> (config, parameters as numpy arrays of `dtype`, for the caller to place).

    Raises ValueError that names the file and an unknown architecture, RoPE scaling or tensor
    (experts and the `rope_freqs` of Llama 3.1 and later among them).
    """
    return _load(Path(path), _reader(path), dtype)


def to_hf_folder(path: str | Path, folder: str | Path, dtype: str = "float32") -> LlamaConfig:
    """Write `folder`/model.safetensors (of `dtype`) and config.json from a GGUF file.

    The special token ids and the context length go along into config.json; the tokenizer's own
    files are not written.
    """
    reader = _reader(path)
    config, params = _load(Path(path), reader, dtype)
    extra = {
        "max_position_embeddings": _field(reader, f"{config.family}.context_length"),
        "bos_token_id": _field(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _field(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _field(reader, "tokenizer.ggml.padding_token_id"),
    }
    known = {name: value for name, value in extra.items() if value is not None}
    hf.save(folder, config, params, dtype, known)
    return config


def _reader(path: str | Path) -> GGUFReader:
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError, MemoryError) as error:
        # what a torn file, or a header that lies about counts and offsets, leads the reader to
        raise ValueError(f"{path} is no whole GGUF file: {error}") from error


def _load(path: Path, reader: GGUFReader, dtype: str) -> tuple[LlamaConfig, Params]:
    stored = {_hf_name(t.name): t for t in reader.tensors}
    try:
        config = _config(reader, stored)

        def read(name: str) -> np.ndarray:
            tensor = stored[name]
            # GGUF lists the fastest axis first
            shape = tensor.shape[::-1].tolist()
            weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32).reshape(shape)
            if config.family == "llama" and name.endswith("q_proj.weight"):
                return unpermute(weight, config.num_heads)
            if config.family == "llama" and name.endswith("k_proj.weight"):
                return unpermute(weight, config.num_kv_heads)
            return weight

        return config, hf.assemble(config, stored, read, dtype)
    except (ValueError, TypeError, IndexError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from error


def unpermute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * h, D] from llama.cpp's interleaved order to Hugging Face's halves.

    Within a head, row 2i + s of the file (s = 0, 1) becomes row i + s * h/2.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[-1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _hf_name(name: str) -> str:
    """`blk.0.attn_q.weight` -> `model.layers.0.self_attn.q_proj.weight`; unknown names as is."""
    parts = name.split(".")
    if parts[-1] == "weight" and len(parts) == 2 and parts[0] in OUTER:
        return f"{OUTER[parts[0]]}.weight"
    block = len(parts) == 4 and parts[0] == "blk" and parts[2] in INNER
    if block and parts[-1] in ("weight", "bias"):
        return f"model.layers.{parts[1]}.{INNER[parts[2]]}.{parts[-1]}"
    return name


def _config(reader: GGUFReader, stored: dict[str, Any]) -> LlamaConfig:
    family = _field(reader, "general.architecture")
    if family not in TRAITS:
        raise ValueError(f"architecture {family!r}: only {', '.join(TRAITS)} are known")

    def get(name: str) -> Any:
        return _field(reader, f"{family}.{name}")

    def need(name: str) -> Any:
        value = get(name)
        if value is None:
            raise ValueError(f"no metadata entry {family}.{name}")
        return value

    scaling = get("rope.scaling.type") or "none"
    if scaling != "none":
        raise ValueError(f"{family}.rope.scaling.type {scaling!r}: only 'none' is known")
    if "model.embed_tokens.weight" not in stored:
        raise ValueError("no tensor token_embd.weight")
    heads, hidden = need("attention.head_count"), need("embedding_length")
    head_dim = get("attention.key_length") or hidden // heads
    rotated = get("rope.dimension_count") or head_dim
    if rotated != head_dim:
        raise ValueError(
            f"{family}.rope.dimension_count {rotated}: RoPE turns all {head_dim} channels"
        )
    return LlamaConfig(
        vocab_size=int(stored["model.embed_tokens.weight"].shape[1]),
        hidden_size=hidden,
        num_layers=need("block_count"),
        num_heads=heads,
        num_kv_heads=get("attention.head_count_kv") or heads,
        head_dim=head_dim,
        intermediate_size=need("feed_forward_length"),
        rope_theta=get("rope.freq_base") or DEFAULT_THETA,
        rms_norm_eps=need("attention.layer_norm_rms_epsilon"),
        tie_embeddings="lm_head.weight" not in stored,
        family=family,
        qkv_bias=TRAITS[family]["qkv_bias"],
        qk_norm=TRAITS[family]["qk_norm"],
    )


def _field(reader: GGUFReader, name: str) -> Any:
    """The value of one metadata entry, None where the file has none."""
    field = reader.get_field(name)
    return None if field is None else field.contents()
