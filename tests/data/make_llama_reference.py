"""Make the reference logits of tests/models with transformers (torch 2.13, CPU, float32).

    python tests/data/make_llama_reference.py [--smollm2 FOLDER]

Writes tests/data/llama/<kind>/ for tiny random models: config.json and model.safetensors as
transformers writes them (bfloat16 values, or float32 where a kind says so), and
reference.safetensors with tokens, mask and logits. The kinds in HUB have their config.json in the
older layout; the logits are of the folder as it is, read again.
With --smollm2 (a folder that scripts/fetch_smollm2.py wrote) also tests/data/llama/smollm2.json.
Needs torch, transformers, numpy and safetensors; the tests that read its output need no torch.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

HERE = Path(__file__).parent / "llama"
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}
# wavelengths 6, 11, 20, 35, 63, ... positions against the bounds 8 and 32: all three bands occur
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 100.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
KINDS = {
    "tied": {},
    "untied": {"tie_word_embeddings": False, "num_key_value_heads": 4},
    "llama3": {"rope_parameters": LLAMA3, "num_attention_heads": 2, "num_key_value_heads": 1},
    "wide_heads": {"head_dim": 12},
    "llama2": {
        "vocab_size": 48,
        "hidden_size": 16,
        "intermediate_size": 24,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "dtype": "float32",
    },
    "smollm2": {
        "hidden_size": 24,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    },
    "qwen2": {
        "model_type": "qwen2",
        "hidden_size": 24,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "qwen2_untied": {"model_type": "qwen2", "hidden_size": 24, "tie_word_embeddings": False},
    "qwen3": {
        "model_type": "qwen3",
        "hidden_size": 24,
        "head_dim": 10,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
}
# config.json in the flat layout, as Llama 2, SmolLM2 and Qwen2.5 have it on the hub. Llama 2's says
# nothing of theta and head_dim.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "max_position_embeddings",
    "tie_word_embeddings",
)
HUB = {
    "llama2": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "pretraining_tp": 1,
        "rope_scaling": None,
        "torch_dtype": "float32",
    },
    "smollm2": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "hidden_act": "silu",
        "is_llama_config": True,
        "mlp_bias": False,
        "pretraining_tp": 1,
        "rope_interleaved": False,
        "rope_scaling": None,
        "rope_theta": 100000,
        "torch_dtype": "bfloat16",
    },
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "hidden_act": "silu",
        "max_window_layers": 2,
        "rope_theta": 1000000.0,
        "sliding_window": 64,
        "torch_dtype": "bfloat16",
        "use_mrope": False,
        "use_sliding_window": False,
    },
}
PROMPTS = ("2+3=5\n4+4=8\n6+6=", "What is the capital of France?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm2", type=Path)
    arguments = parser.parse_args()
    for seed, kind in enumerate(KINDS):
        make_tiny(kind, np.random.default_rng(seed))
    if arguments.smollm2:
        make_smollm2(arguments.smollm2)


def make_tiny(kind: str, rng: np.random.Generator) -> None:
    folder = HERE / kind
    values = {"model_type": "llama", "dtype": "bfloat16"} | SMALL | KINDS[kind]
    config = AutoConfig.for_model(**values)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    for name, parameter in sorted(model.named_parameters()):
        shape = tuple(parameter.shape)
        draw = rng.standard_normal(shape)
        # large enough that attention is far from uniform and every part matters
        value = 1.0 + 0.3 * draw if len(shape) == 1 else 1.5 * draw / np.sqrt(shape[-1])
        value = 0.5 * draw if name.endswith("bias") else value
        parameter.data = torch.tensor(value, dtype=config.dtype)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    if kind in HUB:
        write_as_the_hub_does(folder / "config.json", config, HUB[kind])
    tokens = rng.integers(0, config.vocab_size, (4, 12))
    mask = np.ones((4, 12), bool)
    mask[1, :5] = mask[2, :9] = False  # left-padded prompts
    mask[3, :3] = mask[3, 10:] = False  # and a completion that ended early
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    logits = run(model, tokens, mask)
    save_file(
        {"tokens": tokens.astype(np.int32), "mask": mask, "logits": logits},
        folder / "reference.safetensors",
    )
    print(f"{folder.name}: logits of std {logits[mask].std():.2f}")


def write_as_the_hub_does(path: Path, config: PreTrainedConfig, entries: dict) -> None:
    sizes = {name: getattr(config, name) for name in SIZES}
    text = json.dumps(dict(sorted((sizes | entries).items())), indent=2)
    path.write_text(text + "\n", encoding="utf-8")


def run(model: PreTrainedModel, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    attention = torch.tensor(mask, dtype=torch.long)
    position = (attention.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        output = model(torch.tensor(tokens), attention_mask=attention, position_ids=position)
    return output.logits.numpy()


def make_smollm2(folder: Path) -> None:
    """64 logits at the last three positions of each prompt, and what greedy decoding adds."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    chat = [{"role": "user", "content": PROMPTS[1]}]
    chat_ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    vocabulary = np.linspace(0, model.config.vocab_size - 1, 64).astype(int)
    prompts = []
    for text, ids in ((PROMPTS[0], tokenizer(PROMPTS[0])["input_ids"]), (PROMPTS[1], chat_ids)):
        logits = run(model, np.array([ids]), np.ones((1, len(ids)), bool))[0, -3:]
        greedy = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=12)
        added = greedy[0, len(ids) :].tolist()
        print(repr(text), "->", repr(tokenizer.decode(added)))
        prompts.append(
            {
                "text": text,
                "ids": ids,
                "logits": [[round(float(x), 5) for x in row[vocabulary]] for row in logits],
                "argmax": logits.argmax(-1).tolist(),
                "max": [round(float(x), 5) for x in logits.max(-1)],
                "greedy": added,
            }
        )
    facts = {"vocabulary": vocabulary.tolist(), "prompts": prompts}
    (HERE / "smollm2.json").write_text(json.dumps(facts) + "\n")


if __name__ == "__main__":
    main()
