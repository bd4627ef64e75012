"""`conf/eval.yaml` in, a checked `Benchmark` out; mistakes are refused before anything loads."""

import json
import typing
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields
from functools import cache, partial
from pathlib import Path
from typing import Any

from grpo_jax.assemble import Run
from grpo_jax.benchmark.sampling import MOST_SAMPLES, BenchmarkSettings
from grpo_jax.benchmark_run import Benchmark
from grpo_jax.check import SEEDS, ConfigError
from grpo_jax.config import compose, make_run, refuse_credentials, resolved
from grpo_jax.tasks import evaluation_sets
from grpo_jax.tasks.base import Task
from grpo_jax.tasks.prompts import STYLES, style_of
from grpo_jax.typed import refuse_unknown, value_of

TASK = "task"  # the name of the task's own held-out problems among `sets`
STYLE = "boxed"
# where nobody chooses: what reads the answers that a style asks for
REWARDS = {"xml": "correct", "r1": "correct", "raw": "last_number"}
REWARD = "latex"  # of all other styles, which ask for a box
# What an evaluation takes of a training configuration; with `run=` it is all but the first two. (An
# experiment is not among them: its choice of a task would lose to that of conf/eval.yaml.)
POLICY = ("model", "warmstart")
USED = (*POLICY, "task", "reward", "rollout", "seed", "cache", "name", "logger")
INSTEAD = {
    "rollout.prompts": "batch_rows",
    "rollout.group_size": "samples",
    "rollout.max_prompt_length": "max_prompt_length",
}


@dataclass(frozen=True)
class Options:
    """The keys of conf/eval.yaml that are not training's; what they mean stands there."""

    run: str | None
    step: int | None
    sets: tuple[str, ...]
    data: str | None
    style: str | None
    shots: int | None
    limit: int | None
    samples: int
    greedy: bool
    pass_k: tuple[int, ...] | None
    max_prompt_length: int | None
    batch_rows: int


def make_benchmark(config: Any, folder: Path, overrides: Sequence[str]) -> Benchmark:
    """A checked evaluation; nothing is loaded or compiled. Raises ConfigError.

    Args:
        config: as composed from conf/eval.yaml (a DictConfig).
        folder: where to write.
        overrides: what the user said, as on the command line: with `run=`, that goes before what
            the run has, and that before the defaults.
    """
    values = resolved(config)
    refuse_credentials(values)
    said = {word.lstrip("+~").partition("=")[0].partition("@")[0] for word in overrides}
    names = [field.name for field in fields(Options)]
    refuse_unknown("", values, {*names, *map(str, _training())})
    hints = typing.get_type_hints(Options)
    options = Options(**{name: value_of(hints[name], values.pop(name), name) for name in names})
    seed = value_of(int, values["seed"], "seed")
    problems = [*_refused(options, said, names)] or [*_problems(options, seed)]
    if problems:
        raise ConfigError("\n".join(problems))
    if options.run is None:
        return _benchmark(options, *_fresh(options, values, said), values, folder)
    return _benchmark(options, *_of_run(options, values, said), values, folder)


def _refused(options: Options, said: set[str], names: list[str]) -> Iterator[str]:
    """Knobs that would do nothing here."""
    for key in sorted(said):
        root = key.partition(".")[0]
        if key in INSTEAD:
            yield f"{key}: an evaluation has {INSTEAD[key]}= for it"
        elif root not in (*USED, *names) or (root == "logger" and key != "logger.progress"):
            yield f"{key}: an evaluation has no use for it"
        elif options.run is not None and root in POLICY:
            yield f"{key} beside run={options.run}: the policy is the run's; give one of the two"


def _problems(options: Options, seed: int) -> Iterator[str]:
    if not 0 <= seed < SEEDS:
        yield f"seed={seed}: from 0 to below 2**32 (JAX keeps 32 bits of it)"
    for name, least in (("limit", 1), ("shots", 0), ("max_prompt_length", 1), ("batch_rows", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            yield f"{name}={value}: at least {least}"
    if not 0 <= options.samples <= MOST_SAMPLES:
        yield f"samples={options.samples}: from 0 to {MOST_SAMPLES}"
    if not options.samples and not options.greedy:
        yield "samples=0 greedy=false: nothing is asked"
    for k in options.pass_k or ():
        if not 1 <= k <= options.samples:
            yield f"pass_k={k}: from 1 to samples={options.samples}"
    known = (*evaluation_sets.SETS, TASK)
    for name in options.sets:
        if name not in known:
            yield f"sets: unknown set {name!r}; there are {', '.join(known)}"
    if len(set(options.sets)) < len(options.sets) or not options.sets:
        yield f"sets={list(options.sets)}: at least one, and none twice"
    if options.style is not None and options.style not in STYLES:
        yield f"style={options.style!r}: one of {', '.join(STYLES)}"
    elif options.style is not None and options.shots is not None:
        yield from _wrong_style(options.style, options.shots)
    if options.data is not None and not Path(options.data).expanduser().exists():
        yield f"data={options.data}: no such folder"
    if options.run is None and options.step is not None:
        yield f"step={options.step} is a run's: give run=FOLDER"


def _wrong_style(style: str, shots: int) -> Iterator[str]:
    try:
        style_of(style, shots)
    except ValueError as error:
        yield str(error)


# -------------------------------------------------------------------------------------- policy


def _fresh(options: Options, values: dict[str, Any], said: set[str]) -> tuple[Run, int | None, Run]:
    """(policy, step, what is asked): a pretrained model, or one as its training would begin."""
    path = value_of(str | None, values["model"].get("path"), "model.path")
    if path is not None:
        values["warmstart"]["steps"] = 0  # that was for the task's own model
        if not Path(path).expanduser().exists():
            raise ConfigError(
                f"model.path={path}: no such file or folder (for SmolLM2, run "
                "`python scripts/fetch_smollm2.py` first)"
            )
    elif values["warmstart"]["steps"] == 0:
        raise ConfigError("model.path=FOLDER or run=FOLDER: there is no policy to evaluate")
    chosen = _roots(said) & {"reward", "task"}
    if not chosen and TASK not in options.sets:
        reward = REWARDS.get(options.style or STYLE, REWARD)
        values["reward"] = resolved(compose(f"reward={reward}"))["reward"]
    run = _made(values, Path())
    return run, None, run


def _of_run(
    options: Options, values: dict[str, Any], said: set[str]
) -> tuple[Run, int | None, Run]:
    """(policy, step, what is asked): a run's checkpoint, and the run's own task, reward and lengths
    where nothing else was said. A task that was said brings its reward and lengths, as in training.
    """
    folder = Path(options.run or "").expanduser()
    own = _config_of(folder)
    own |= {key: values[key] for key in ("cache", "logger")}
    policy = _made(own, folder.resolve())
    asked, roots = dict(own), _roots(said)
    if "task" in roots:
        asked |= {section: values[section] for section in ("task", "reward", "rollout")}
    if "reward" in roots:
        asked["reward"] = values["reward"]
    if "rollout" in said:  # the group
        asked["rollout"] = values["rollout"]
    elif "rollout" in roots:
        names = [key.partition(".")[2] for key in said if key.startswith("rollout.")]
        asked["rollout"] = asked["rollout"] | {name: values["rollout"][name] for name in names}
    return policy, _step(folder / "checkpoints", options.step), _made(asked, folder.resolve())


def _config_of(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    if not path.is_file():
        what = "no run folder (no config.json)" if folder.is_dir() else "no such folder"
        raise ConfigError(f"run={folder}: {what}")
    return json.loads(path.read_text(encoding="utf-8"))


def _step(checkpoints: Path, asked: int | None) -> int:
    """The checkpoint to take. One that is being written has another kind of name."""
    steps = sorted(int(path.name) for path in checkpoints.glob("*") if path.name.isdigit())
    if not steps:
        raise ConfigError(f"run={checkpoints.parent}: it has no checkpoint (checkpoint.every=0?)")
    if asked is not None and asked not in steps:
        known = ", ".join(map(str, steps))
        raise ConfigError(f"step={asked}: {checkpoints.parent} has no such checkpoint, but {known}")
    return steps[-1] if asked is None else asked


def _made(values: dict[str, Any], folder: Path) -> Run:
    made = deepcopy(_training())
    for key in map(str, made):
        if key in values:
            made[key] = values[key]
    return make_run(made, folder)


@cache
def _training() -> Any:
    """The defaults of training: composing takes a fifth of a second."""
    return compose()


def _roots(said: set[str]) -> set[str]:
    return {key.partition(".")[0] for key in said}


# ------------------------------------------------------------------------------------ benchmark


def _benchmark(
    options: Options,
    policy: Run,
    step: int | None,
    asked: Run,
    values: dict[str, Any],
    folder: Path,
) -> Benchmark:
    rollout = asked.rollout
    settings = BenchmarkSettings(
        samples=options.samples,
        greedy=options.greedy,
        pass_k=tuple(sorted(set(options.pass_k or _powers(options.samples)))),
        max_prompt_length=options.max_prompt_length,
        max_completion_length=rollout.max_completion_length,
        temperature=rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        batch_rows=options.batch_rows,
        seed=values["seed"],
        slots=rollout.slots,
    )
    task = asked.config["task"] if options.run is not None else {}
    style = options.style or task.get("style") or STYLE
    shots = task.get("shots", 0) if options.shots is None else options.shots
    if options.shots is None and style in STYLES:
        shots = max(shots, STYLES[style].fewest)
    problems = [*_wrong_style(style, shots)] if set(options.sets) != {TASK} else []
    if problems:
        raise ConfigError("\n".join(problems))
    sets: dict[str, Callable[[], Task]] = {}
    for name in options.sets:
        load = partial(
            evaluation_sets.load,
            name,
            path=None if options.data is None else str(Path(options.data).expanduser()),
            style=style,
            shots=shots,
            limit=options.limit,
        )
        sets[name] = asked.task if name == TASK else load
    config = asdict(settings) | {"pass_k": list(settings.pass_k)}
    del config["batch_rows"], config["slots"]  # they change no result
    config |= {"sets": list(options.sets), "data": options.data, "limit": options.limit}
    config |= {"style": style, "shots": shots, "reward": asked.config["reward"]}
    config |= {"task": asked.config["task"] if TASK in options.sets else None}
    config |= {"model": policy.config["model"], "step": step}
    config |= {"run": None if options.run is None else str(policy.folder)}
    return Benchmark(
        folder=folder,
        policy=policy,
        step=step,
        sets=sets,
        reward=asked.reward,
        settings=settings,
        limit=options.limit,
        progress=policy.logger.progress,
        config=config,
    )


def _powers(samples: int) -> list[int]:
    """1, 2, 4, ... and `samples` itself."""
    powers = [2**i for i in range(samples.bit_length()) if 2**i <= samples]
    return [*powers, *([samples] if samples else [])]
