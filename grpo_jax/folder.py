"""A run folder belongs to one configuration, and to one process at a time: who comes with another
configuration is told what differs, and who comes second is told who was first.

Seeds that share a job have a run folder each.
"""

import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from grpo_jax import hosts
from grpo_jax.screen import say
from grpo_jax.types import RefusedError, TrainingError

CONFIG, LOCK = "config.json", "run.lock"
# what may change between two visits: where things are written, and how long the run is
ENGINE = ("engine.python", "engine.environment", "engine.start_seconds", "engine.call_seconds")
FREE = ("name", "cache", "logger", "checkpoint", "mesh", "train.steps", *ENGINE)
SHOWN = 5


def claim(folder: Path, config: dict[str, Any]) -> None:
    """Write `config.json`, unless the folder is another configuration's (`refuse_other`).

    Raises TrainingError: nothing can be written there.
    """
    refuse_other(folder, config)
    path, config = folder / CONFIG, _as_json(config)
    if hosts.leads() and _read(path) != config:
        with _writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".tmp")
            with part.open("w", encoding="utf-8") as file:
                json.dump(config, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            os.replace(part, path)


def refuse_other(folder: Path, config: dict[str, Any]) -> None:
    """Raise RefusedError, naming the keys, if the folder holds a run of another configuration: its
    results must not pass for this one's, nor its checkpoints be trained on under other settings.
    Only reads."""
    old = _read(folder / CONFIG)
    changed = [] if old is None else changes(old, config)
    if changed:
        raise RefusedError(
            f"{folder} holds a run of another configuration; take another folder "
            f"(hydra.run.dir=FOLDER):\n{shown(changed)}"
        )


def in_use(job: Path) -> bool:
    """Whether a run, or a seed of a job of several, has claimed the folder. Only reads."""
    return (job / CONFIG).exists() or any(job.glob(f"seed=*/{CONFIG}"))


def changes(old: dict[str, Any], new: dict[str, Any], free: tuple[str, ...] = FREE) -> list[str]:
    """A line for each key that differs and isn't `free` to."""
    before, now = flat(old), flat(_as_json(new))
    keys = [key for key in sorted({*before, *now}) if before.get(key) != now.get(key)]
    return [
        f"{key}: {before.get(key)!r} there, {now.get(key)!r} now"
        for key in keys
        if not any(key == name or key.startswith(f"{name}.") for name in free)
    ]


def shown(lines: list[str]) -> str:
    """The first of them, and how many more there are."""
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "\n".join(f"  {line}" for line in [*lines[:SHOWN], *more])


@contextmanager
def hold(folder: Path) -> Generator[None]:
    """Keep every other process (and thread) out of the folder while this one trains there.

    It is a lock on an open file, which the system takes back however the process ends: after a
    kill, nothing has to be removed by hand. Over NFS it holds between machines only if the server
    has locks and the mount doesn't keep them local (`nolock`, `local_lock`); where a file system
    has none at all, that is said, and the run goes on without. Of a run of several processes, the
    first one holds the folder.

    Raises:
        RefusedError: another process has it; the text says which, and on what machine.
        TrainingError: nothing can be written there.
    """
    if not hosts.leads():
        yield
        return
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK).open("a+", encoding="utf-8")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            who = file.read().strip() or "another process"
            raise RefusedError(
                f"{folder} is in use: {who} trains there. Wait for it, end it, or take another "
                "folder (hydra.run.dir=FOLDER)"
            ) from None
        except OSError as error:
            say(f"WARNING: {folder}: no locks here ({error}), so don't start a second process")
        with _writing(folder):
            file.truncate(0)
            began = time.strftime("%Y-%m-%d %H:%M:%S")
            file.write(f"process {os.getpid()} on {socket.gethostname()}, since {began}\n")
            file.flush()
        yield


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


def _as_json(config: dict[str, Any]) -> dict[str, Any]:
    return json.loads(json.dumps(config))


def _read(path: Path) -> dict[str, Any] | None:
    """What is in `config.json`; None: there is none."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise RefusedError(f"{path} can't be read: {error}") from error


@contextmanager
def _writing(folder: Path) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(f"can't write in {folder}: {error.strerror or error}") from error
