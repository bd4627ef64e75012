"""Write what a run has learned as a Hugging Face folder, which transformers, vLLM and this project
load (`model=pretrained model.path=OUT`). Adapters (LoRA) are merged into their base.

    python scripts/export_hf.py RUN OUT [--step N] [--dtype float32|bfloat16]

RUN is a run folder with checkpoints; OUT must not exist, or be empty. The tokenizer and
generation_config.json are those of the model that the run began with.
"""

import argparse
import json
import logging
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from tokenizers.processors import TemplateProcessing

from grpo_jax.assemble import Run, restore_policy
from grpo_jax.check import ConfigError
from grpo_jax.config import make_run
from grpo_jax.models import hf, lora
from grpo_jax.screen import say
from grpo_jax.tokenizer import char_tokenizer
from grpo_jax.types import TrainingError

# what a model folder has beside config and weights, as far as it goes with the weights
COMPANIONS = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)


def export(folder: Path, out: Path, step: int | None, dtype: str) -> str:
    """Do it -> what was done, in a line. TrainingError and ConfigError have a text for the user.

    `out` is renamed into place when it is complete.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise TrainingError(f"{out} is there already, and is no empty folder: nothing was written")
    run = _run_of(folder)
    source = _model_folder(run)
    step, model, params = restore_policy(run, step)
    plain = lora.merge(model.config, params, run.lora.scale)
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as scratch:
        part = Path(scratch) / "model"
        if source is None:
            part.mkdir()
            entries = _write_characters(part)
        else:
            entries = _copy_companions(source, part)
        hf.save(part, model.config, plain, dtype, entries)
        os.rename(part, out)
    how = f", adapters of rank {run.lora.rank} merged" if run.lora.active else ""
    return f"wrote {out}: step {step}, {lora.count(plain):,} parameters in {dtype}{how}"


def _run_of(folder: Path) -> Run:
    """The run in a folder, from the resolved configuration that it has written there."""
    path = folder / "config.json"
    if not path.is_file():
        raise TrainingError(f"{folder} is no run folder: it has no config.json")
    config = json.loads(path.read_text(encoding="utf-8"))
    return make_run(OmegaConf.create(config), folder)


def _model_folder(run: Run) -> Path | None:
    """Where the run's model came from; None: it has characters as tokens and began at random."""
    if run.model.path is None:
        return None
    path = Path(run.model.path).expanduser()
    folder = path.parent if path.suffix == ".gguf" else path
    if not folder.is_dir():
        raise TrainingError(f"the run's model.path={path} is gone, and its tokenizer with it")
    return folder


def _copy_companions(source: Path, part: Path) -> dict[str, Any]:
    """Copy the tokenizer and what goes with it -> the entries of the old config.json."""
    part.mkdir()
    for name in COMPANIONS:
        if (source / name).is_file():
            shutil.copyfile(source / name, part / name)
    config = source / "config.json"  # beside a .gguf file there may be none
    entries = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
    entries.pop("auto_map", None)  # names Python files that were never run, and stay behind
    return entries


def _write_characters(part: Path) -> dict[str, Any]:
    """Save the character tokenizer, which then puts BOS in front of plain text by itself -> the
    entries of config.json that name its special tokens."""
    words = char_tokenizer()
    backend = words.backend
    backend.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{backend.bos_token} $A", special_tokens=[(backend.bos_token, words.bos_id)]
    )
    backend.save_pretrained(part)
    eos, pad = words.eos_ids[0], words.pad_id
    return {"bos_token_id": words.bos_id, "eos_token_id": eos, "pad_token_id": pad}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="export_hf", description=(__doc__ or "").partition("\n\n")[0]
    )
    parser.add_argument("run", type=Path, help="a run folder with checkpoints")
    parser.add_argument("out", type=Path, help="the folder to write")
    parser.add_argument("--step", type=int, help="of the checkpoint (default: the newest)")
    parser.add_argument(
        "--dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the weights (default: %(default)s, as they were trained)",
    )
    options = parser.parse_args(arguments)
    logging.getLogger("absl").setLevel(logging.ERROR)  # orbax, which narrates that it only reads
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # where a user's own rewards are; last: it hides no package
    try:
        print(export(options.run, options.out, options.step, options.dtype))
    except (ConfigError, TrainingError) as error:
        say(f"export_hf: {error}", error=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
