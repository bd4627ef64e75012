"""Rollouts kept on disk, with the weights before and after their update (`scripts/replay.py`).

A run with `checkpoint.rollouts_every` leaves in its folder

    rollouts/reference.safetensors  the policy as the run began (with LoRA: none, it is the base)
    rollouts/step_000010/
        arrays.npz          the rollout, its rewards, and what the run made of them
        meta.json           configuration, model shape, counters; prompts and completions as text
        before.safetensors  the weights that sampled (a group that had waited is older)
        after.safetensors   the weights after the step's updates
        reference.safetensors  only where the reference moves (`kl.refresh_every`)

Weights are those that are trained (with LoRA the adapters alone), float32, named by their place in
the parameter tree ("layers/mlp/down"). A step's folder is renamed into place when it is complete,
so what has its name can be read.
"""

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import jax
import numpy as np
from jaxtyping import Bool, Float
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from grpo_jax.answers import Answers
from grpo_jax.checkpoint import shape_of
from grpo_jax.models.config import LlamaConfig
from grpo_jax.rewards.combine import RewardTable
from grpo_jax.rollout import Collection
from grpo_jax.tasks.base import Prompt
from grpo_jax.types import Params, Rollout

FOLDER, REFERENCE = "rollouts", "reference.safetensors"
ARRAYS, META = "arrays.npz", "meta.json"


class RecordingError(ValueError):
    """There is no such recording, or it can't be read. The text says what to do."""


@dataclass(frozen=True)
class Moment:
    """What a recording says beside the data."""

    step: int  # of the run: rollouts, this one included
    updates: int  # optimizer steps tried before this rollout's
    entropy: float  # of the policy on the rollout, nats a token
    entropy_coef: float  # of the run's own entropy bonus at this step
    weights: dict[str, float]  # of the reward parts
    config: dict[str, Any]  # of the run, resolved
    base: str | None = None  # with LoRA: the frozen base's fingerprint (`checkpoint.fingerprint`)


@dataclass(frozen=True)
class Recording:
    """One step of a run. Weights stay on disk until they are asked for."""

    folder: Path
    moment: Moment
    shape: LlamaConfig
    answers: Answers  # those of the batch, in host memory
    old_logp: Float[np.ndarray, "B T"]
    advantage: Float[np.ndarray, "B"]  # the run's own
    keep: Bool[np.ndarray, "B"]  # the run's own

    @property
    def moves(self) -> bool:
        """Whether the reference is of this step (`kl.refresh_every`)."""
        return (self.folder / REFERENCE).is_file()

    def params(self, name: str) -> Params:
        """What the run trains, "before" or "after" the step's updates, or the "reference" of it.
        RecordingError."""
        fixed = name == "reference" and not self.moves
        folder = self.folder.parent if fixed else self.folder
        return load_params(folder / f"{name}.safetensors")


def record(
    folder: Path,
    moment: Moment,
    shape: LlamaConfig,
    data: Collection,
    params: Mapping[str, Params | None],
) -> Path:
    """Write one step of the run in `folder`; an older recording of that step is replaced.

    `params`: "before" and "after" the step's updates, and the "reference" where it moves (else
    None; `keep_reference` writes it once). Returns the step's folder.
    """
    path = step_folder(folder, moment.step)
    part = path.with_name(f".{path.name}.tmp")
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    for name, tree in params.items():
        if tree is not None:
            save_params(part / f"{name}.safetensors", tree)
    with open(part / ARRAYS, "wb") as file:
        np.savez_compressed(file, allow_pickle=False, **_arrays(data))
    answers = data.answers
    texts = {
        "shape": asdict(shape),
        "prompts": [{"text": p.text, "answer": p.answer} for p in answers.prompts],
        "numbers": list(answers.numbers),
        "completions": list(answers.texts),
    }
    (part / META).write_text(json.dumps(asdict(moment) | texts, indent=1), encoding="utf-8")
    shutil.rmtree(path, ignore_errors=True)
    os.replace(part, path)
    return path


def keep_reference(folder: Path, params: Params) -> None:
    """Write the weights that the run in `folder` begins with, unless they are there."""
    path = folder / FOLDER / REFERENCE
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".tmp")
        save_params(part, params)
        os.replace(part, path)


def step_folder(folder: Path, step: int) -> Path:
    return folder / FOLDER / f"step_{step:06d}"


def find(path: Path, step: int | None = None) -> Path:
    """The folder of a recording: `path` itself, or in a run folder the one of `step` (None: the
    newest). Raises RecordingError."""
    if (path / META).is_file():
        if step is not None:
            raise RecordingError(f"{path} is one recording already: no step to choose")
        return path
    if not path.is_dir():
        raise RecordingError(f"no such folder: {path}")
    rollouts = path if path.name == FOLDER else path / FOLDER
    places = [p.parent for p in sorted(rollouts.glob(f"step_*/{META}"))]
    found = {int(p.name[5:]): p for p in places if p.name[5:].isdecimal()}
    if not found:
        raise RecordingError(
            f"{path} holds no recorded rollouts: train with checkpoint.rollouts_every=10, say"
        )
    if step is not None and step not in found:
        known = ", ".join(map(str, sorted(found)))
        raise RecordingError(f"{path} has no recording of step {step}; there are {known}")
    return found[max(found) if step is None else step]


def load(folder: Path) -> Recording:
    """Read the recording in a step's folder back. Raises RecordingError."""
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        with open(folder / ARRAYS, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            arrays = dict(file)
        for name in ("before", "after"):
            if not (folder / f"{name}.safetensors").is_file():
                raise FileNotFoundError(f"{name}.safetensors is missing")
        return Recording(
            folder=folder,
            moment=Moment(**{field.name: meta[field.name] for field in fields(Moment)}),
            shape=shape_of(meta["shape"]),
            answers=_answers(meta, arrays),
            old_logp=arrays["old_logp"],
            advantage=arrays["advantage"],
            keep=arrays["keep"],
        )
    except KeyError as error:
        raise RecordingError(f"{folder} is no whole recording: it has no {error}") from error
    except (OSError, EOFError, ValueError, TypeError, BadZipFile) as error:
        raise RecordingError(f"{folder} is no whole recording: {error}") from error


def save_params(path: Path, params: Params) -> None:
    """A nested dict of arrays as float32 safetensors, names joined by "/"."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = [jax.tree_util.keystr(place, simple=True, separator="/") for place, _ in leaves]
    arrays = [np.ascontiguousarray(leaf, np.float32) for _, leaf in leaves]
    save_file(dict(zip(names, arrays, strict=True)), path)


def load_params(path: Path) -> Params:
    """What `save_params` wrote. Raises RecordingError."""
    try:
        flat = load_file(path)
    except (OSError, SafetensorError) as error:
        raise RecordingError(f"{path}: {error}") from error
    tree: Params = {}
    for name, leaf in flat.items():
        *places, last = name.split("/")
        node = tree
        for place in places:
            node = node.setdefault(place, {})
            if not isinstance(node, dict):
                raise RecordingError(f"{path}: {name} lies within another tensor")
        node[last] = leaf
    return tree


def _arrays(data: Collection) -> dict[str, np.ndarray]:
    batch, answers = data.batch, data.answers
    arrays = {f"rollout/{f.name}": getattr(answers.rollout, f.name) for f in fields(Rollout)}
    arrays |= {f"reward/{name}": part for name, part in answers.rewards.parts.items()}
    arrays |= {"total": answers.rewards.total, "old_logp": batch.old_logp}
    arrays |= {"advantage": batch.advantage, "keep": batch.keep}
    if answers.greedy is not None:
        arrays["greedy"] = answers.greedy
    return {name: np.asarray(array) for name, array in arrays.items()}


def _answers(meta: dict[str, Any], arrays: dict[str, np.ndarray]) -> Answers:
    names = [name for name in arrays if name.startswith("reward/")]
    parts = {name.removeprefix("reward/"): arrays[name] for name in names}
    none = dict.fromkeys(parts, 0)
    return Answers(
        prompts=tuple(Prompt(prompt["text"], prompt["answer"]) for prompt in meta["prompts"]),
        rollout=Rollout(**{f.name: arrays[f"rollout/{f.name}"] for f in fields(Rollout)}),
        texts=tuple(meta["completions"]),
        rewards=RewardTable(arrays["total"], parts, unscorable=none, failed=none, errors={}),
        numbers=tuple(meta["numbers"]),
        greedy=arrays.get("greedy"),
    )
