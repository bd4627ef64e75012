"""Checkpoints in Hugging Face's layout (config.json + safetensors), in and out, no torch.

A folder holds `config.json` and either `model.safetensors` or `model.safetensors.index.json` with
the shards that it names. Hugging Face stores a projection as [out, in] and applies y = x @ W.T;
the parameter tree (llama.py) holds [in, ...out] with the heads unfolded, so every matrix is
transposed on its way. No channel is permuted: these files are already in the rotate-half order.
hf_config.py reads and writes the config.json.
"""

import json
import os
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from grpo_jax.models import llama
from grpo_jax.models.config import LlamaConfig
from grpo_jax.models.hf_config import read_config, to_hf
from grpo_jax.types import Params

# ------------------------------------------------------------------------------------ tensors


class _Place(NamedTuple):
    """Where the tensor of one file entry lies in the parameter tree."""

    shape: tuple[int, ...]  # in the file
    leaf: tuple[str, ...]
    index: tuple[int | slice, ...]  # basic indices: the part of the leaf is a view

    @property
    def transposed(self) -> bool:
        """Projections are; embeddings [V, D], norms and biases lie alike in both."""
        return len(self.shape) == 2 and self.leaf[-1] != "embedding"


def _places(config: LlamaConfig) -> dict[str, _Place]:
    """Every tensor that a checkpoint of this shape holds, by its Hugging Face name."""
    V, D, F, h = config.vocab_size, config.hidden_size, config.intermediate_size, config.head_dim
    K, R = config.num_kv_heads, config.queries_per_kv
    qkv, gate_up = ("layers", "attention", "qkv"), ("layers", "mlp", "gate_up")
    everything = slice(None)
    places = {
        "model.embed_tokens.weight": _Place((V, D), ("embed", "embedding"), ()),
        "model.norm.weight": _Place((D,), ("norm", "scale"), ()),
    }
    if not config.tie_embeddings:
        places["lm_head.weight"] = _Place((V, D), ("head", "embedding"), ())
    for l in range(config.num_layers):
        layer = {
            "input_layernorm": _Place((D,), ("layers", "attention_norm", "scale"), (l,)),
            "self_attn.q_proj": _Place((K * R * h, D), qkv, (l, everything, everything, slice(R))),
            "self_attn.k_proj": _Place((K * h, D), qkv, (l, everything, everything, R)),
            "self_attn.v_proj": _Place((K * h, D), qkv, (l, everything, everything, R + 1)),
            "self_attn.o_proj": _Place((D, K * R * h), ("layers", "attention", "out"), (l,)),
            "post_attention_layernorm": _Place((D,), ("layers", "mlp_norm", "scale"), (l,)),
            "mlp.gate_proj": _Place((F, D), gate_up, (l, everything, 0)),
            "mlp.up_proj": _Place((F, D), gate_up, (l, everything, 1)),
            "mlp.down_proj": _Place((D, F), ("layers", "mlp", "down"), (l,)),
        }
        places |= {f"model.layers.{l}.{name}.weight": place for name, place in layer.items()}
        places |= _family_places(config, l)
    return places


def _family_places(config: LlamaConfig, l: int) -> dict[str, _Place]:
    """What layer `l` has in some families only."""
    K, R, h = config.num_kv_heads, config.queries_per_kv, config.head_dim
    attention, everything = ("layers", "attention"), slice(None)
    bias, prefix = (*attention, "qkv_bias"), f"model.layers.{l}.self_attn"
    places = {}
    if config.qkv_bias:
        places |= {
            f"{prefix}.q_proj.bias": _Place((K * R * h,), bias, (l, everything, slice(R))),
            f"{prefix}.k_proj.bias": _Place((K * h,), bias, (l, everything, R)),
            f"{prefix}.v_proj.bias": _Place((K * h,), bias, (l, everything, R + 1)),
        }
    if config.qk_norm:
        places |= {
            f"{prefix}.{name}.weight": _Place((h,), (*attention, name, "scale"), (l,))
            for name in ("q_norm", "k_norm")
        }
    return places


def _shapes(config: LlamaConfig) -> Params:
    return jax.eval_shape(partial(llama.init, config), jax.random.key(0))


def _leaf(params: Params, path: tuple[str, ...]) -> Any:
    for key in path:
        params = params[key]
    return params


def assemble(
    config: LlamaConfig,
    names: Collection[str],
    read: Callable[[str], np.ndarray],
    dtype: str = "float32",
) -> Params:
    """The parameter tree (numpy leaves of `dtype`) from tensors with Hugging Face names.

    names: all that the source holds; read(name) -> that tensor, float, in the file's shape. It is
    called once a tensor, so that no more than one is held besides the result. Raises ValueError
    naming the tensors that are missing, left over or of another shape.
    """
    places = _places(config)
    _check_names(config, places.keys(), names, read)
    params = jax.tree.map(lambda s: np.empty(s.shape, jnp.dtype(dtype)), _shapes(config))
    for name, place in places.items():
        tensor = read(name)
        if tensor.shape != place.shape:
            raise ValueError(f"{name} has shape {tensor.shape}; the config says {place.shape}")
        if not jnp.issubdtype(tensor.dtype, jnp.floating):
            raise ValueError(f"{name} is {tensor.dtype}: only plain floating-point weights load")
        view = _leaf(params, place.leaf)[place.index]
        view[...] = (tensor.T if place.transposed else tensor).reshape(view.shape)
    return params


def _check_names(
    config: LlamaConfig, expected: Collection[str], names: Collection[str], read: Callable
) -> None:
    missing = sorted(set(expected) - set(names))
    # old Llama files also hold the RoPE frequencies, which the config determines
    surplus = sorted(n for n in set(names) - set(expected) if not n.endswith("rotary_emb.inv_freq"))
    if surplus == ["lm_head.weight"] and config.tie_embeddings and not missing:
        # some writers store the tied head a second time; a different one would be lost silently
        if np.array_equal(read("lm_head.weight"), read("model.embed_tokens.weight")):
            return
        raise ValueError("tie_word_embeddings is true, but lm_head.weight is not the embedding")
    problems = []
    if missing:
        problems.append(f"missing {_some(missing)}")
    if "lm_head.weight" in missing:
        problems.append("tie_word_embeddings is false, so the head needs its own weight")
    if surplus:
        problems.append(f"unexpected {_some(surplus)}")
    if problems:
        raise ValueError("tensors do not match the config: " + "; ".join(problems))


def _some(names: list[str], limit: int = 5) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def tensors(config: LlamaConfig, params: Params, dtype: str = "float32") -> dict[str, np.ndarray]:
    """The inverse of `assemble`: Hugging Face names -> numpy arrays of `dtype`.

    Raises ValueError when `params` is not the tree of `config`.
    """
    want, have = _shapes(config), jax.tree.map(np.shape, params)
    if jax.tree.map(lambda s: s.shape, want) != have:
        raise ValueError(f"the parameters {have} are not those of {config}")
    host = jax.tree.map(np.asarray, params)
    result = {}
    for name, place in _places(config).items():
        tensor = _leaf(host, place.leaf)[place.index]
        if place.transposed:
            tensor = tensor.reshape(place.shape[::-1]).T
        else:
            tensor = tensor.reshape(place.shape)
        result[name] = np.ascontiguousarray(tensor.astype(jnp.dtype(dtype)))
    return result


# ------------------------------------------------------------------------------------- folders


def load(folder: str | Path, dtype: str = "float32") -> tuple[LlamaConfig, Params]:
    """A model folder -> (config, parameters as numpy arrays of `dtype`, for the caller to place).

    Raises FileNotFoundError for a missing file and ValueError for tensors that do not fit the
    config, naming them. float16 and bfloat16 files widen to float32 exactly.
    """
    config = read_config(folder)
    with ExitStack() as stack:
        where = {}
        for path in _weight_files(Path(folder)):
            try:
                file = stack.enter_context(safe_open(path, framework="numpy"))
            except SafetensorError as error:
                raise ValueError(f"{path}: {error}") from error
            where |= dict.fromkeys(file.keys(), file)
        try:
            return config, assemble(config, where, lambda name: where[name].get_tensor(name), dtype)
        except (ValueError, TypeError, SafetensorError) as error:
            raise ValueError(f"{folder}: {error}") from error


def _weight_files(folder: Path) -> list[Path]:
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        raise FileNotFoundError(f"{folder} has neither {single.name} nor {index.name}")
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is no index of shards: {error!r}") from error
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise ValueError(f"{index} names what is not a file beside it: {_some(outside)}")
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise FileNotFoundError(f"{index} names shards that are not there: {_some(absent)}")
    return [folder / name for name in names]


def save(
    folder: str | Path,
    config: LlamaConfig,
    params: Params,
    dtype: str = "float32",
    extra: Mapping[str, Any] | None = None,
) -> None:
    """Write `folder`/model.safetensors and config.json, readable by `load` and by transformers.

    extra: further entries of config.json that other readers want (max_position_embeddings,
    bos_token_id, ...); a whole config.json will do, the model's own entries win. Each file appears
    at once, under its name, or not at all. float32 -> `dtype` rounds to nearest even.
    """
    # `rope_parameters` would say twice what `to_hf` writes
    rest = {k: v for k, v in (extra or {}).items() if k not in ("rope_parameters", "dtype")}
    entries = rest | to_hf(config) | {"torch_dtype": str(jnp.dtype(dtype))}
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / "model.safetensors.part"
    # readers of other frameworks refuse a file without this mark; it names the axis order only
    save_file(tensors(config, params, dtype), part, metadata={"format": "pt"})
    os.replace(part, folder / "model.safetensors")
    part = folder / "config.json.part"
    part.write_text(json.dumps(entries, indent=2) + "\n", encoding="utf-8")
    os.replace(part, folder / "config.json")
