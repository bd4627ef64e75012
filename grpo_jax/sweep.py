"""What became of a sweep's jobs, read from their folders: the same whichever launcher ran them.

Hydra tells a sweep's first error and no other (facebookresearch/hydra#2284), and calls no callback
at its end once a job has failed. A job that is killed outright tells nobody. What each job wrote
into its own folder is all there is, and enough: `FAILED.json` or `REFUSED.json` with the error,
`DONE.json`, or none of them.
"""

import json
import os
import shlex
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import yaml

DONE, FAILED, UNFINISHED, WAITING = "done", "failed", "not finished", "not begun"


class Begun:
    """Hydra's callback (`hydra.callbacks` in conf/train.yaml) that remembers which sweep this
    process launches: Hydra itself has forgotten it when it returns.

    It has the methods of `hydra.experimental.callback.Callback`, of which two do something: the
    other one ends a command whose output folder can't be written, before Hydra fails at it.
    """

    folder: ClassVar[Path | None] = None  # None: this process launches no sweep
    overrides: ClassVar[tuple[str, ...]] = ()  # with what varies: "seed=0,1"

    def on_multirun_start(self, config: Any, **_: Any) -> None:
        _refuse_unwritable(Path(config.hydra.sweep.dir))
        Begun.folder = Path(config.hydra.sweep.dir)
        Begun.overrides = tuple(config.hydra.overrides.task)

    def on_run_start(self, config: Any, **_: Any) -> None:
        _refuse_unwritable(Path(config.hydra.run.dir))

    def _nothing(self, **_: Any) -> None:
        pass

    on_multirun_end = on_run_end = on_job_start = on_job_end = _nothing


@dataclass(frozen=True)
class Outcome:
    """How one job stands, or one seed of a job that has several (`seeds_per_job`)."""

    name: str  # what the job's overrides have that others' have not
    state: str  # DONE, FAILED, UNFINISHED or WAITING
    error: str  # of a failed one, its first line
    folder: Path | None  # None where it hasn't begun


def outcomes(sweep: Path, planned: Sequence[Sequence[str]] | None) -> list[Outcome]:
    """How each job of a sweep stands.

    `planned`: the overrides of each job, in order; jobs in the folder that are not among them are
    those of another command. None: unknown, and all jobs in the folder count.
    """
    found = {tuple(sorted(_overrides(folder))): folder for folder in _jobs(sweep)}
    if planned is None:
        planned = [_overrides(folder) for folder in found.values()]
    common = set.intersection(*map(set, planned)) if len(planned) > 1 else set()
    stand = []
    for words in planned:
        folder = found.get(tuple(sorted(words)))
        name = " ".join(word for word in words if word not in common) or "(defaults)"
        if folder is None:
            stand.append(Outcome(name, WAITING, "", None))
            continue
        whole = Outcome(name, *_verdict(folder), folder)
        seeds = _seeds(name, folder)
        refused = whole.state == FAILED and all(seed.state != FAILED for seed in seeds)
        stand += [whole] if refused or not seeds else seeds
    return stand


def summary(sweep: Path, jobs: Sequence[Outcome], command: Sequence[str]) -> str:
    """Every job that isn't done, with its error in a line, and the command that goes on.

    `command`: that of this sweep; the folder is added if it doesn't name one.
    """
    counts = {state: 0 for state in (DONE, FAILED, UNFINISHED, WAITING)}
    for job in jobs:
        counts[job.state] += 1
    told = ", ".join(f"{count} {state}" for state, count in counts.items() if count)
    lines = [f"sweep {sweep}: {told}"]
    for job in jobs:
        if job.state == FAILED:
            lines.append(f"  failed: {job.name}: {job.error}")
        elif job.state == UNFINISHED:
            lines.append(f"  not finished (killed, or still at work): {job.name}")
        elif job.state == WAITING:
            lines.append(f"  not begun: {job.name}")
    words = list(command)
    if not any(word.startswith("hydra.sweep.dir=") for word in words):
        words.append(f"hydra.sweep.dir={sweep}")
    lines.append(f"go on, finished jobs skipped: {shlex.join(words)}")
    return "\n".join(lines)


def wait_for_local_jobs(sweep: Path) -> None:
    """Until the jobs have ended that submitit's local launcher started from this process.

    It gives up at the first job that was killed, while others are still at work. They are children
    of this process, and submitit names their folders by their process ids.
    """
    for folder in (sweep / ".submitit").glob("[0-9]*"):
        if folder.name.isdigit():
            with suppress(ChildProcessError):  # of an earlier attempt, or waited for already
                os.waitpid(int(folder.name), 0)


def _refuse_unwritable(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        sys.exit(f"error: can't write in {folder}: {error.strerror or error}")


def _jobs(sweep: Path) -> Iterator[Path]:
    for path, subfolders, _ in os.walk(sweep):
        if ".hydra" in subfolders:
            subfolders.clear()  # seeds of this job, checkpoints
            yield Path(path)


def _overrides(job: Path) -> list[str]:
    path = job / ".hydra" / "overrides.yaml"
    try:
        return [str(word) for word in yaml.safe_load(path.read_text(encoding="utf-8")) or []]
    except (OSError, yaml.YAMLError, TypeError):  # a kill between two files of `.hydra`
        return [job.name]


def _seeds(name: str, job: Path) -> list[Outcome]:
    """Of a job of several seeds, one each; of another job none."""
    folders = sorted(job.glob("seed=*"), key=lambda folder: (len(folder.name), folder.name))
    return [Outcome(f"{name} [{folder.name}]", *_verdict(folder), folder) for folder in folders]


def _verdict(folder: Path) -> tuple[str, str]:
    for name in ("REFUSED.json", "FAILED.json"):
        path = folder / name
        with suppress(FileNotFoundError):
            try:
                error = str(json.loads(path.read_text(encoding="utf-8"))["error"])
            except (ValueError, KeyError, TypeError):
                error = f"{path} does not say why"
            return FAILED, (error.splitlines() or [""])[0]
    return (DONE if (folder / "DONE.json").is_file() else UNFINISHED), ""
