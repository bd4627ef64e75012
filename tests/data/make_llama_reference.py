"""Make the reference logits of tests/models with transformers' Llama (torch 2.13, CPU, float32).

    python tests/data/make_llama_reference.py [--smollm2 FOLDER]

Writes tests/data/llama/<kind>/ for tiny random models: config.json and model.safetensors as
transformers writes them (bfloat16 values), and reference.safetensors with tokens, mask and logits.
With --smollm2 (a folder that scripts/fetch_smollm2.py wrote) also tests/data/llama/smollm2.json.
Needs torch, transformers, numpy and safetensors; the tests that read its output need no torch.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

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
}
PROMPTS = ("2+3=5\n4+4=8\n6+6=", "What is the capital of France?")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smollm2", type=Path)
    arguments = parser.parse_args()
    for seed, (kind, changes) in enumerate(KINDS.items()):
        make_tiny(HERE / kind, SMALL | changes, np.random.default_rng(seed))
    if arguments.smollm2:
        make_smollm2(arguments.smollm2)


def make_tiny(folder: Path, values: dict, rng: np.random.Generator) -> None:
    config = LlamaConfig(**values, attn_implementation="eager", dtype="bfloat16")
    model = LlamaForCausalLM(config)
    for _, parameter in sorted(model.named_parameters()):
        shape = tuple(parameter.shape)
        draw = rng.standard_normal(shape)
        # large enough that attention is far from uniform and every part matters
        value = 1.0 + 0.3 * draw if len(shape) == 1 else 1.5 * draw / np.sqrt(shape[-1])
        parameter.data = torch.tensor(value, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink()
    tokens = rng.integers(0, config.vocab_size, (4, 12))
    mask = np.ones((4, 12), bool)
    mask[1, :5] = mask[2, :9] = False  # left-padded prompts
    mask[3, :3] = mask[3, 10:] = False  # and a completion that ended early
    logits = run(model.float(), tokens, mask)
    save_file(
        {"tokens": tokens.astype(np.int32), "mask": mask, "logits": logits},
        folder / "reference.safetensors",
    )
    print(f"{folder.name}: logits of std {logits[mask].std():.2f}")


def run(model: LlamaForCausalLM, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
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
