"""One evaluation, from a checked configuration to `eval.json` (`scripts/eval.py`).

The output folder gets `config.json`, `eval.json` (all numbers), `report.md` (the tables) and
`answers.jsonl` (every answer). While the evaluation is under way it has `batches.jsonl`, a finished
batch a line, from which a killed one goes on. A folder with `eval.json` is complete, and is left as
it is.
"""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
from tqdm import tqdm

from grpo_jax.assemble import Run, load_model, load_task, load_tokenizer, restore_policy
from grpo_jax.benchmark.measure import by_level, measures, summary
from grpo_jax.benchmark.sampling import MOST_PROBLEMS, Bench, BenchmarkSettings
from grpo_jax.benchmark_report import tables
from grpo_jax.folder import claim
from grpo_jax.models import lora
from grpo_jax.models.llama import Model
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.screen import say
from grpo_jax.tasks.agreement import mismatch
from grpo_jax.tasks.base import Task, drop_long
from grpo_jax.tokenizer import Tokenizer
from grpo_jax.types import Params, TrainingError

LIBRARIES = ("grpo_jax", "jax", "jaxlib", "flax", "numpy", "transformers", "math-verify")
BATCHES, ANSWERS, RESULT, REPORT = "batches.jsonl", "answers.jsonl", "eval.json", "report.md"
TOLD_ANSWERS = 3  # of each set, on the screen
MAIN = ("greedy", "mean", "pass", "maj", "length")  # measures of a level; without their @k


@dataclass(frozen=True)
class Benchmark:
    """A checked configuration. Nothing is loaded yet."""

    folder: Path
    policy: Run  # whose model is asked
    step: int | None  # of the policy's checkpoint; None: as the policy begins, a pretrained one say
    sets: dict[str, Callable[[], Task]]  # what they hold out is asked
    reward: tuple[RewardPart, ...]
    settings: BenchmarkSettings
    limit: int | None  # problems of each set
    progress: bool
    config: dict[str, Any]  # what the numbers depend on


def evaluate(benchmark: Benchmark) -> dict[str, Any]:
    """Ask, score, count, write -> what `eval.json` holds. The tables go to the screen.

    Raises TrainingError where the user can do something about it.
    """
    folder, settings = benchmark.folder, benchmark.settings
    claim(folder, benchmark.config)
    if (folder / RESULT).exists():
        say(f"complete already, nothing to do: {folder}")
        result = json.loads((folder / RESULT).read_text(encoding="utf-8"))
        say(tables(result))
        return result
    words = load_tokenizer(benchmark.policy.model)
    tasks = {name: _held(benchmark, name, words) for name in benchmark.sets}
    step, model, params = _policy(benchmark, words)
    bench = Bench(model, params, words, list(benchmark.reward), settings)
    result: dict[str, Any] = {
        "policy": {"model": benchmark.policy.config["model"], "step": step}
        | {"parameters": lora.count(params)},
        "config": benchmark.config,
        "versions": _versions(),
        "sets": {},
    }
    batches = _finished(folder / BATCHES, tasks, settings)
    with _bar(benchmark, tasks, batches) as bar, (folder / BATCHES).open("a") as file:
        for name, task in tasks.items():
            done = {(b["mode"], row["problem"]) for b in batches[name] for row in b["rows"]}
            for batch in _timed(bench.run(name, task, done), bar):
                file.write(json.dumps(batch, allow_nan=False) + "\n")
                file.flush()  # what is finished survives a kill of this process
                batches[name].append(batch)
            _tell(name, task, batches[name])
            result["sets"][name] = _counted(task, batches[name], settings)
    _write(folder / ANSWERS, "".join(_lines(batches)))
    _write(folder / REPORT, f"# Evaluation\n\n{tables(result)}\n")
    _write(folder / RESULT, json.dumps(result, indent=1, allow_nan=False) + "\n")
    (folder / BATCHES).unlink()
    say(tables(result))
    return result


def _policy(benchmark: Benchmark, words: Tokenizer) -> tuple[int | None, Model, Params]:
    run = benchmark.policy
    if benchmark.step is not None:
        return restore_policy(run, benchmark.step)
    task, slots = load_task(run, words) if run.warmstart.steps else (None, 0)
    return None, *load_model(run, task, words, slots)


def _held(benchmark: Benchmark, name: str, words: Tokenizer) -> Task:
    """The problems of a set: the first ones, and none that is too long."""
    try:
        task = benchmark.sets[name]()
    except (ValueError, OSError) as error:
        raise TrainingError(f"sets: {name}: {error}") from error
    heldout, dropped = task.heldout[: benchmark.limit], dict(task.dropped)
    most = benchmark.settings.max_prompt_length
    if most is not None:
        heldout, dropped["heldout_too_long"] = drop_long(heldout, words, most)
    if not 0 < len(heldout) <= MOST_PROBLEMS:
        raise TrainingError(f"sets: {name}: {len(heldout)} problems are left; 1 to {MOST_PROBLEMS}")
    task = replace(task, heldout=heldout, dropped=dropped)
    problem = mismatch(task, benchmark.reward)
    if problem is not None:
        say(f"note: {name}: {problem}")
    return task


# ------------------------------------------------------------------------------------- batches


def _finished(
    path: Path, tasks: dict[str, Task], settings: BenchmarkSettings
) -> dict[str, list[dict[str, Any]]]:
    """The batches of an evaluation that was killed, by set. Those of a problem that not all samples
    are there of are dropped, from the file too."""
    kept: dict[str, list[dict[str, Any]]] = {name: [] for name in tasks}
    if not path.exists():
        return kept
    for line in path.read_text(encoding="utf-8").splitlines():
        with suppress(json.JSONDecodeError):  # a last line that the kill cut short
            batch = json.loads(line)
            kept[batch["set"]].append(batch)
    for name, found in kept.items():
        there: dict[tuple[str, int], set[int]] = {}
        for batch in found:
            for row in batch["rows"]:
                there.setdefault((batch["mode"], row["problem"]), set()).add(row["sample"])
        whole = {key for key, samples in there.items() if len(samples) == settings.modes[key[0]][0]}
        kept[name] = [
            batch
            for batch in found
            if all((batch["mode"], row["problem"]) in whole for row in batch["rows"])
        ]
    _write(path, "".join(json.dumps(b) + "\n" for found in kept.values() for b in found))
    return kept


def _bar(
    benchmark: Benchmark, tasks: dict[str, Task], batches: dict[str, list[dict[str, Any]]]
) -> tqdm:
    each = sum(count for count, _ in benchmark.settings.modes.values())
    return tqdm(
        total=each * sum(len(task.heldout) for task in tasks.values()),
        initial=sum(len(batch["rows"]) for found in batches.values() for batch in found),
        desc="eval",
        unit="answer",
        disable=not benchmark.progress,
        dynamic_ncols=True,
    )


def _timed(batches: Iterator[dict[str, Any]], bar: tqdm) -> Iterator[dict[str, Any]]:
    """Each batch with `seconds` since the one before; a step of the bar."""
    began = time.perf_counter()
    for batch in batches:
        now = time.perf_counter()
        seconds, began = now - began, now
        tokens = sum(row["length"] for row in batch["rows"])
        shown = {"set": batch["set"], "mode": batch["mode"], "tok/s": f"{tokens / seconds:.0f}"}
        bar.set_postfix(shown, refresh=False)
        bar.update(len(batch["rows"]))
        yield batch | {"seconds": round(seconds, 3)}


def _rows(batches: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    found = [{"mode": batch["mode"], **row} for batch in batches for row in batch["rows"]]
    return sorted(found, key=lambda row: (row["mode"], row["problem"], row["sample"]))


def _lines(batches: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    for name, found in batches.items():
        for row in _rows(found):
            yield json.dumps({"set": name, **row}, allow_nan=False) + "\n"


# ------------------------------------------------------------------------------------- results


def _counted(
    task: Task, batches: Sequence[dict[str, Any]], settings: BenchmarkSettings
) -> dict[str, Any]:
    rows = _rows(batches)
    levels = {}
    for level, some in by_level(rows).items():
        found = measures(some, settings.pass_k)
        main = {name: m for name, m in found.items() if name.partition("@")[0] in MAIN}
        count = len({row["problem"] for row in some})
        levels[level] = {"problems": count, "metrics": summary(main)}
    errors: dict[str, str] = {}
    for batch in batches:
        errors = batch["errors"] | errors  # the first of each part
    return {
        "problems": len(task.heldout),
        "dropped": task.dropped,
        "answers": len(rows),
        "tokens": sum(row["length"] for row in rows),
        "seconds": round(sum(batch["seconds"] for batch in batches), 1),
        "unscorable": _sum(batches, "unscorable"),
        "failed": _sum(batches, "failed"),
        "errors": errors,
        "metrics": summary(measures(rows, settings.pass_k)),
        "levels": levels,
    }


def _sum(batches: Sequence[dict[str, Any]], name: str) -> dict[str, int]:
    return {part: sum(batch[name][part] for batch in batches) for part in batches[0][name]}


def _tell(name: str, task: Task, batches: Sequence[dict[str, Any]]) -> None:
    """A few answers; by repr, since what a model writes may hold control characters."""
    for row in [row for row in _rows(batches) if row["sample"] == 0][:TOLD_ANSWERS]:
        prompt, text = task.heldout[row["problem"]].text[-40:], row["completion"][-80:]
        say(f"{name}: {prompt!r} -> {text!r} (gold {row['answer']!r}, correct {row['correct']})")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "device": jax.devices()[0].device_kind}
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):  # an extra that isn't there
            found[library] = version(library)
    return found


def _write(path: Path, text: str) -> None:
    """A reader, or a kill, meets the old content or the new."""
    part = path.with_name(f"{path.name}.tmp")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
