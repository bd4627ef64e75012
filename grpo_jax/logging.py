"""Where a run's numbers go: `metrics.jsonl` first, Weights & Biases as a sink.

The run folder is the source of truth (`scripts/compare.py` reads nothing else), so every line in it
is valid JSON and every step is in it once, however often the run was killed and resumed. W&B gets
the same numbers on an axis of our own, `train/step`: W&B's own step starts again at 0 when a run is
resumed offline. A kill loses what W&B had not written yet, and what came after the last checkpoint
is done again: so offline, a resumed run begins its W&B folder anew with all rows so far, and the
earlier one goes to `wandb/superseded`, unless it was synced already.
"""

import json
import math
import os
import re
import traceback
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import numpy as np

from grpo_jax import confidential
from grpo_jax.types import RefusedError, TrainingError

WANDB_MODES = ("offline", "online", "disabled")
TABLE_ROWS = 1000  # of the completions, the last ones: W&B truncates a table at 10,000
_SURROGATE = re.compile("[\ud800-\udfff]")


class RunLogger:
    """Writes one run's rows; the run folder's only writer while it is open.

    Args:
        folder: the run folder; made if need be. `DONE.json` and `FAILED.json` of an earlier attempt
            are removed, so that the folder never shows a verdict that isn't this run's.
        wandb_mode: "offline" (no account, no network), "online" or "disabled" (wandb isn't even
            imported).
        project, group, tags: as in W&B; a tag is cut at W&B's limit of 64 characters.
        config: the run's configuration, for W&B. Values of secret environment variables in it are
            blanked out.
        start_step: the first step that this process will log. Rows from it on are an earlier
            attempt's, made after the checkpoint that this one resumes from, and are dropped.

    Raises:
        ValueError: an unknown `wandb_mode`, or a file of rows that is damaged before its last line.
    """

    def __init__(
        self,
        folder: Path,
        *,
        wandb_mode: str,
        project: str,
        group: str | None,
        tags: Sequence[str],
        config: Mapping[str, Any],
        start_step: int = 0,
    ) -> None:
        if wandb_mode not in WANDB_MODES:
            raise ValueError(f"wandb mode {wandb_mode!r} is none of {', '.join(WANDB_MODES)}")
        self.folder = Path(folder).absolute()
        self.folder.mkdir(parents=True, exist_ok=True)
        for verdict in ("DONE.json", "FAILED.json", "REFUSED.json"):
            (self.folder / verdict).unlink(missing_ok=True)
        self._metrics_path = self.folder / "metrics.jsonl"
        self._completions_path = self.folder / "completions.jsonl"
        for path in (self._metrics_path, self._completions_path):
            _drop_rows_from(path, start_step)
        self._last_step = start_step - 1
        self._run: Any = None
        self._sent = -1  # W&B has the rows so far
        if wandb_mode != "disabled":
            self._run = _start_wandb(
                self.folder,
                mode=wandb_mode,
                project=project,
                group=group,
                tags=[tag[:64] for tag in tags],
                config=_plain(config, text=confidential.hidden),
            )
        self._metrics = self._metrics_path.open("a", encoding="utf-8")
        self._completions = self._completions_path.open("a", encoding="utf-8")
        if self._run is not None:
            self._begin_sink(wandb_mode)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Append one row. Metrics are scalars (Python, numpy or jax); None, NaN and ±inf are null.

        Raises:
            ValueError: `step` isn't above the last one: one row a step, so that no reader has to
                decide which of two counts.
            TypeError: a metric that isn't a scalar number.
        """
        if step <= self._last_step:
            raise ValueError(f"step {step} comes after step {self._last_step}: one row a step")
        fetched = jax.device_get(dict(metrics))
        values = {name: _number(name, value) for name, value in fetched.items()}
        _append(self._metrics, _row(step, values))
        self._last_step = int(step)
        self._send(int(step), values)

    def _begin_sink(self, mode: str) -> None:
        """Let W&B have each row once: those it lost, and not those it has (a row that is made again
        is the same one)."""
        if mode == "online":
            self._sent = int(self._run.summary.get("train/step", -1))
        elif not _is_known(self.folder / "wandb"):
            for row in read_rows(self._metrics_path):
                self._send(row.pop("step"), row)

    def _send(self, step: int, values: Mapping[str, float | None]) -> None:
        if self._run is not None and step > self._sent:
            finite = {name: value for name, value in values.items() if value is not None}
            self._run.log({"train/step": step, **finite})

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append sampled answers: any JSON-like columns, such as prompt, completion and reward."""
        for row in rows:
            _append(self._completions, _row(step, _plain(row)))

    def sync(self) -> None:
        """Have what is logged survive even a crash of the machine: before a checkpoint covers it.

        Raises TrainingError: it can't be written.
        """
        for file in (self._metrics, self._completions):
            with _writing(file.name):
                os.fsync(file.fileno())

    def close(self, exit_code: int = 0) -> None:
        """Finish the W&B run (one run a job) and close the files. A second call does nothing.

        Call it whatever happens: a launcher may run the next job in this very process.
        """
        for file in (self._metrics, self._completions):
            with suppress(OSError):  # each row was flushed, or there was an error already
                file.close()
        run, self._run = self._run, None
        if run is None:
            return
        try:
            _log_table(run, read_rows(self._completions_path)[-TABLE_ROWS:], self._last_step)
        finally:
            run.finish(exit_code=exit_code)


class NoLogger(RunLogger):
    """That of a process of a run for which another one writes."""

    def __init__(self) -> None:
        pass

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        pass

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        pass

    def sync(self) -> None:
        pass

    def close(self, exit_code: int = 0) -> None:
        pass


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a `.jsonl` file. A last line that a kill cut short is left out.

    Raises:
        ValueError: a line before the last that isn't JSON.
    """
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = []
    for i, line in enumerate(lines):
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError as error:
            if i < len(lines) - 1:
                raise ValueError(f"{path}, line {i + 1}: {error}") from error
    return rows


def write_done(folder: Path, step: int, final: Mapping[str, Any]) -> None:
    """Say that the run is complete: `DONE.json` with the last step and its metrics.

    Checkpoints are saved in the background: close their manager before.
    """
    numbers = {name: _number(name, value) for name, value in jax.device_get(dict(final)).items()}
    _replace(Path(folder) / "DONE.json", _dump({"step": int(step), "final": numbers}))
    (Path(folder) / "FAILED.json").unlink(missing_ok=True)


def write_failed(folder: Path, exception: BaseException) -> None:
    """Say that the run failed, and why: `FAILED.json`, without the environment's secrets.

    `REFUSED.json` where this attempt never got as far as a `RunLogger` and the folder isn't its to
    judge: a complete run stays complete, and one of other settings or at work is left alone. It is
    no verdict on the run, and goes when the next attempt gets in.
    """
    refused = isinstance(exception, RefusedError) or (Path(folder) / "DONE.json").exists()
    content = {
        "error": "".join(traceback.format_exception_only(exception)).strip(),
        "traceback": "".join(traceback.format_exception(exception)),
    }
    name = "REFUSED.json" if refused else "FAILED.json"
    with suppress(OSError):  # a full disk, say: the exception itself is what counts
        _replace(Path(folder) / name, _dump(_plain(content, text=confidential.hidden)))
    for path in Path(folder).glob(".hydra/*.yaml"):  # Hydra wrote it before anybody looked at it
        said = path.read_text(encoding="utf-8")
        if confidential.hidden(said) != said:
            _replace(path, confidential.hidden(said))


def log_comparison(
    folder: Path,
    *,
    mode: str,
    project: str,
    group: str,
    tables: Mapping[str, tuple[Sequence[str], Sequence[Sequence[Any]]]],
    figures: Mapping[str, Path],
) -> str:
    """Tables (columns, rows) and figures of a sweep's comparison as one W&B run -> its id.

    The same folder has the same run, each time it is compared: the id stays there.
    """
    import wandb

    folder = Path(folder).absolute()
    id_file = folder / "wandb" / "comparison_id"
    known = id_file.read_text().strip() if id_file.exists() else None
    name = f"comparison of {folder.name}"
    place = {"project": project, "group": group, "job_type": "comparison"}
    run = _init_wandb(folder, name, known, mode=mode, **place)
    exit_code = 1
    try:
        id_file.parent.mkdir(exist_ok=True)
        id_file.write_text(run.id)
        logged: dict[str, Any] = {what: wandb.Image(str(path)) for what, path in figures.items()}
        for what, (columns, rows) in tables.items():
            data: list[Any] = _plain([list(row) for row in rows], text=confidential.hidden)
            logged[what] = wandb.Table(columns=list(columns), data=data, allow_mixed_types=True)
        run.log(logged)
        exit_code = 0
    finally:
        run.finish(exit_code=exit_code)
    return run.id


def _start_wandb(folder: Path, **settings: Any) -> Any:
    # A resumed run continues its W&B run rather than opening a second one beside it.
    id_file = folder / "wandb" / "run_id"
    known = id_file.read_text().strip() if id_file.exists() else None
    if known and settings["mode"] == "offline":
        _supersede(folder / "wandb")
    run = _init_wandb(folder, folder.name, known, **settings)
    id_file.parent.mkdir(exist_ok=True)
    id_file.write_text(run.id)
    run.define_metric("train/step")
    run.define_metric("*", step_metric="train/step")
    return run


def _init_wandb(folder: Path, name: str, known: str | None, **settings: Any) -> Any:
    """A run beside those of other threads (together.py); `known`: the id of the one to go on with.
    The console stays with the launcher's log: it isn't captured, and so isn't uploaded."""
    import wandb  # slow to import, and not needed by every run

    # W&B writes all of Slurm's variables down, the login among them
    slurms = [name for name in os.environ if name.startswith("SLURM_")]
    withheld = {name: os.environ.pop(name) for name in slurms if confidential.is_secret(name)}
    try:
        return wandb.init(
            dir=folder,
            name=name[:128],
            id=known,
            resume="allow" if known else None,
            reinit="create_new",
            settings=wandb.Settings(silent=True, console="off"),
            **settings,
        )
    finally:
        os.environ.update(withheld)


def _supersede(folder: Path) -> None:
    """Put W&B's folders of earlier attempts aside, unless their rows are known to the server."""
    if not _is_known(folder):
        for path in sorted(folder.glob("offline-run-*")):
            aside = folder / "superseded"
            aside.mkdir(exist_ok=True)
            path.rename(aside / f"{len(list(aside.iterdir())):03}-{path.name}")


def _is_known(folder: Path) -> bool:
    """Whether an earlier attempt was online, or was synced."""
    return any(any(folder.glob(pattern)) for pattern in ("run-*", "offline-run-*/*.synced"))


def _log_table(run: Any, rows: list[dict[str, Any]], step: int) -> None:
    if not rows:
        return
    import wandb

    columns: list[str | int] = list(dict.fromkeys(name for row in rows for name in row))
    data: list[Iterable[Any]] = [[row.get(name) for name in columns] for row in rows]
    table = wandb.Table(columns=columns, data=data, allow_mixed_types=True)
    run.log({"train/step": step, "completions": table})


def _drop_rows_from(path: Path, start_step: int) -> None:
    if path.exists():
        kept = [row for row in read_rows(path) if row["step"] < start_step]
        _replace(path, "".join(_dump(row) for row in kept))


def _replace(path: Path, text: str) -> None:
    """Write `path` so that a reader, or a kill, meets the old content or the new, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def _append(file: Any, row: dict[str, Any]) -> None:
    with _writing(file.name):
        file.write(_dump(row))
        file.flush()  # what is logged survives a kill of this process


@contextmanager
def _writing(path: Path | str) -> Generator[None]:
    try:
        yield
    except OSError as error:
        raise TrainingError(
            f"{path} can't be written ({error.strerror or error}); the checkpoints so far are "
            "whole. Make room there, and give the same command to go on"
        ) from error


def _dump(row: Mapping[str, Any]) -> str:
    return json.dumps(row, allow_nan=False) + "\n"


def _row(step: int, values: Mapping[str, Any]) -> dict[str, Any]:
    if "step" in values:
        raise ValueError("'step' is the row's own step and can't be a metric or a column")
    return {"step": int(step), **values}


def _number(name: str, value: Any) -> float | None:
    if value is None:
        return None
    number_like = isinstance(value, int | float | np.generic | np.ndarray)
    if isinstance(value, str) or not number_like or np.ndim(value) != 0:
        raise TypeError(f"metric {name!r} is no scalar: {value!r:.60}")
    number = float(value)
    return number if math.isfinite(number) else None


def _plain(value: Any, text: Callable[[str], str] = str) -> Any:
    """`value` in JSON's own types: NaN becomes null, and what JSON has no word for becomes text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, text) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, text) for item in value]
    if isinstance(value, np.generic | np.ndarray | jax.Array):
        return _plain(np.asarray(value).tolist(), text)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, bool | int):
        return value
    # half a code point, which some data sets hold: other readers of JSON stop there
    return text(_SURROGATE.sub("\N{REPLACEMENT CHARACTER}", str(value)))
