"""A run folder belongs to one configuration: who comes with another is told what differs.

Seeds that share a job have a run folder each.
"""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import yaml

from grpo_jax.types import TrainingError

# what may change between two visits: where things are written, and how long the run is
FREE = ("name", "cache", "logger", "checkpoint", "train.steps")
SHOWN = 5


def claim(folder: Path, config: dict[str, Any]) -> None:
    """Write `config.json`, or compare with the one that is there.

    Raises TrainingError, naming the keys, if the folder holds a run of another configuration: its
    results must not pass for this one's, nor its checkpoints be trained on under other settings.
    """
    path = folder / "config.json"
    if path.exists():
        old, new = flat(json.loads(path.read_text())), flat(json.loads(json.dumps(config)))
        changed = [key for key in sorted({*old, *new}) if old.get(key) != new.get(key)]
        changed = [key for key in changed if not _free(key)]
        if changed:
            what = "\n".join(
                f"  {key}: {old.get(key)!r} there, {new.get(key)!r} now" for key in changed[:SHOWN]
            )
            more = f"\n  and {len(changed) - SHOWN} more" if len(changed) > SHOWN else ""
            raise TrainingError(
                f"{folder} holds a run of another configuration; take another folder "
                f"(hydra.run.dir=FOLDER):\n{what}{more}"
            )
        return
    folder.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".tmp")
    part.write_text(json.dumps(config, indent=1))
    os.replace(part, path)


def seed_folder(job: Path, seed: int) -> Path:
    """`job`/seed=N, with Hydra's record as a run of that seed alone has it: what reads run folders
    needn't know of jobs."""
    folder = job / f"seed={seed}"
    folder.mkdir(exist_ok=True)
    if (job / ".hydra").is_dir():
        shutil.copytree(job / ".hydra", folder / ".hydra", dirs_exist_ok=True)
        own = {"seed": seed, "seeds_per_job": 1}
        config, overrides = (folder / ".hydra" / f"{name}.yaml" for name in ("config", "overrides"))
        config.write_text(yaml.safe_dump(yaml.safe_load(config.read_text()) | own, sort_keys=False))
        words = yaml.safe_load(overrides.read_text())
        words = [word for word in words if word.partition("=")[0].lstrip("+") not in own]
        overrides.write_text(yaml.safe_dump([*words, f"seed={seed}"]))
    return folder


def flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    """Dotted keys -> values; lists count as values."""
    if not isinstance(tree, dict):
        return {prefix: tree}
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        leaves |= flat(value, f"{prefix}.{key}" if prefix else str(key))
    return leaves


def _free(key: str) -> bool:
    return any(key == free or key.startswith(f"{free}.") for free in FREE)
