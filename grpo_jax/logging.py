"""Where a run's numbers go: `metrics.jsonl` first, Weights & Biases as a sink.

The run folder is the source of truth (`scripts/compare.py` reads nothing else), so every line in it
is valid JSON and every step is in it once, however often the run was killed and resumed. W&B gets
the same numbers on an axis of our own, `train/step`: W&B's own step starts again at 0 when a run is
resumed offline.
"""

import json
import math
import os
import re
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

WANDB_MODES = ("offline", "online", "disabled")
TABLE_ROWS = 1000  # of the completions, the last ones: W&B truncates a table at 10,000
_SECRET_NAME = re.compile(r"(KEY|TOKEN|SECRET|PASSWORD|PASSWD|CREDENTIALS?)$", re.IGNORECASE)
_URL_LOGIN = re.compile(r"(\w+://)[^/\s@]+@")


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
        for verdict in ("DONE.json", "FAILED.json"):
            (self.folder / verdict).unlink(missing_ok=True)
        self._metrics_path = self.folder / "metrics.jsonl"
        self._completions_path = self.folder / "completions.jsonl"
        for path in (self._metrics_path, self._completions_path):
            _drop_rows_from(path, start_step)
        self._last_step = start_step - 1
        self._run: Any = None
        if wandb_mode != "disabled":
            self._run = _start_wandb(
                self.folder,
                resumed=start_step > 0,
                mode=wandb_mode,
                project=project,
                group=group,
                tags=[tag[:64] for tag in tags],
                config=_plain(config, text=_without_secrets),
            )
        self._metrics = self._metrics_path.open("a", encoding="utf-8")
        self._completions = self._completions_path.open("a", encoding="utf-8")

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
        if self._run is not None:
            finite = {name: value for name, value in values.items() if value is not None}
            self._run.log({"train/step": int(step), **finite})

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append sampled answers: any JSON-like columns, such as prompt, completion and reward."""
        for row in rows:
            _append(self._completions, _row(step, _plain(row)))

    def close(self, exit_code: int = 0) -> None:
        """Finish the W&B run (one run a job) and close the files. A second call does nothing.

        Call it whatever happens: a launcher may run the next job in this very process.
        """
        self._metrics.close()
        self._completions.close()
        run, self._run = self._run, None
        if run is None:
            return
        try:
            _log_table(run, read_rows(self._completions_path)[-TABLE_ROWS:], self._last_step)
        finally:
            run.finish(exit_code=exit_code)


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

    A complete run stays complete: where there is a `DONE.json`, this attempt never got as far as a
    `RunLogger` (a refused configuration, say), and nothing is written.
    """
    if (Path(folder) / "DONE.json").exists():
        return
    content = {
        "error": "".join(traceback.format_exception_only(exception)).strip(),
        "traceback": "".join(traceback.format_exception(exception)),
    }
    _replace(Path(folder) / "FAILED.json", _dump(_plain(content, text=_without_secrets)))


def _start_wandb(folder: Path, *, resumed: bool, **settings: Any) -> Any:
    import wandb  # slow to import, and not needed by every run

    # A resumed run continues its W&B run rather than opening a second one beside it.
    id_file = folder / "wandb" / "run_id"
    known = id_file.read_text().strip() if resumed and id_file.exists() else None
    run = wandb.init(
        dir=folder,
        name=folder.name[:128],
        id=known,
        resume="allow" if known else None,
        reinit="create_new",  # beside the runs of other threads (together.py)
        # The console stays with the launcher's log: it isn't captured, and so isn't uploaded.
        settings=wandb.Settings(silent=True, console="off"),
        **settings,
    )
    id_file.parent.mkdir(exist_ok=True)
    id_file.write_text(run.id)
    run.define_metric("train/step")
    run.define_metric("*", step_metric="train/step")
    return run


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
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def _append(file: Any, row: dict[str, Any]) -> None:
    file.write(_dump(row))
    file.flush()  # what is logged survives a kill of this process


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
    return text(str(value))


def _without_secrets(text: str) -> str:
    """`text` without logins in URLs and without the values of secret environment variables.

    Those are told by their names. Values below 8 characters stay: blanking them would hide
    ordinary words and protect nothing.
    """
    text = _URL_LOGIN.sub(r"\1[hidden]@", text)
    secrets = [value for name, value in os.environ.items() if _SECRET_NAME.search(name)]
    for secret in sorted(secrets, key=len, reverse=True):  # one may contain another
        if len(secret) >= 8:
            text = text.replace(secret, "[hidden]")
    return text
