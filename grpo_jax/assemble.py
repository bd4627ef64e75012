"""From a checked configuration to the machinery of a run: everything is loaded here, once."""

import math
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax import checkpoint, tokenizer
from grpo_jax.answers import RolloutSettings, check_columns
from grpo_jax.engine.sampler import (
    WORKER,
    Engine,
    EngineSampler,
    EngineSettings,
    entries_of,
    find_python,
)
from grpo_jax.evaluate import EvalSettings, Evaluator
from grpo_jax.generate import JaxSampler
from grpo_jax.learner import make_update
from grpo_jax.models import attention_kernels, gguf, hf, llama, lora
from grpo_jax.models.config import LlamaConfig
from grpo_jax.models.lora import LoraSettings
from grpo_jax.optim import OptimSettings, make_optimizer, make_schedule
from grpo_jax.policy import PolicySettings, make_exact_kl, make_logprobs, whole
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.rollout import Collector
from grpo_jax.screen import say
from grpo_jax.sharding import ONE_DEVICE, MeshSettings, Placement, place_on, refuse_misfits
from grpo_jax.tasks.base import Task, longest_prompt, within_limit
from grpo_jax.tokenizer import Tokenizer
from grpo_jax.types import Algorithm, Params, TrainingError, TrainState
from grpo_jax.warmstart import WarmstartSettings, warm_params

ADAPTERS = 3  # stream of the run's root key (rollouts have 1, updates 2)


@dataclass(frozen=True)
class ModelSettings:
    """`model` in the config: a pretrained `path`, or a random model of `shape`."""

    path: str | None  # a Hugging Face folder or a .gguf file (with its tokenizer beside it)
    shape: LlamaConfig | None
    dtype: str  # of the matmuls; what is trained, optimizer and losses are float32
    base_dtype: str  # of the frozen base, with LoRA; float32 without
    remat: bool | str  # recompute each layer in the backward pass; "dots": all but most products
    attention: str  # of whole sequences, by name (`attention_kernels.choose`)
    attention_block: int  # query slots whose scores exist at one time, with attention=xla
    unroll_layers: int  # in the sampler, at most; more are looped over
    turn_weights: bool | str  # the sampler's copies, to [out, in]; "auto": where that is quicker
    chat_arguments: dict[str, Any]  # of the tokenizer's chat template


@dataclass(frozen=True)
class TrainSettings:
    """`train` in the config."""

    steps: int  # rollouts
    epochs: int  # passes over each rollout
    minibatches: int  # optimizer steps in one pass
    micro_batch_rows: int  # rows in one forward and backward pass, at most
    vocab_chunk: int  # vocabulary entries whose logits exist at one time
    share_prompts: bool  # compute a group's prompt once in a micro-batch, not once a row
    skip_silent: bool  # no pass over a micro-batch whose rows can't have a gradient
    max_nonfinite: int  # optimizer steps in a row with a NaN or inf, after which the run stops

    @property
    def updates_per_rollout(self) -> int:
        return self.epochs * self.minibatches


@dataclass(frozen=True)
class CheckpointSettings:
    """`checkpoint` in the config."""

    every: int  # steps; 0: none at all
    keep: int  # the newest so many
    resume: str  # auto (from the newest in the run folder, if there is one) or never (refuse it)
    rollouts_every: int  # steps between recorded rollouts (`recording.py`); 0: none


@dataclass(frozen=True)
class LoggerSettings:
    """`logger` in the config."""

    wandb: str  # offline, online or disabled
    project: str
    group: str | None
    tags: tuple[str, ...]
    completions_every: int  # steps between samples in completions.jsonl; 0: only evaluations
    progress: bool  # a bar on standard error


@dataclass(frozen=True)
class Run:
    """A checked configuration, turned into what the loop needs. Nothing is loaded yet."""

    seed: int
    folder: Path
    cache: Path
    algorithm: Algorithm
    task: Callable[[], Task]  # reads data when called
    reward: tuple[RewardPart, ...]
    model: ModelSettings
    lora: LoraSettings
    warmstart: WarmstartSettings
    rollout: RolloutSettings
    engine: EngineSettings
    mesh: MeshSettings
    train: TrainSettings
    optim: OptimSettings
    eval: EvalSettings
    checkpoint: CheckpointSettings
    logger: LoggerSettings
    config: dict[str, Any]  # resolved, for logs and checkpoints
    plan: str | None = None  # what to say instead of training (`plan/report.py`)

    @property
    def update_rows(self) -> int:
        """Of one optimizer step."""
        return self.rollout.prompts * self.rollout.group_size // self.train.minibatches


@dataclass
class Work:
    """The machinery of one run."""

    task: Task
    sampler: JaxSampler | EngineSampler
    collector: Collector
    evaluator: Evaluator
    update: Callable
    base: Params | None  # with LoRA: what is not trained (`policy.whole`), never donated or saved
    reference: Params | None  # the policy as it began; None: no KL, or the state's own moves
    schedule: optax.Schedule
    state: TrainState  # as a run begins; the loop takes it over (updates donate it)
    place: Placement  # where all of it lies


def assemble(run: Run, jit: Callable = jax.jit) -> Work:
    """Load the data and the model (or warm-start it), and build every jitted function. `jit` makes
    the programs that take time, as `jax.jit` does (`together.py`)."""
    python = find_python(run.engine) if run.engine.external else None
    place = place_on(run.mesh)
    words = load_tokenizer(run.model)
    task, slots = load_task(run, words)
    model, params = load_model(run, task, words, slots, jit)
    refuse_misfits(place.sizes, run.update_rows, model.config)
    base, trainable = place.put(_split(run, model, params))
    learner = _build(run, model.config, place)
    policy = PolicySettings(
        temperature=run.rollout.temperature,
        micro_batch_rows=run.train.micro_batch_rows,
        vocab_chunk=run.train.vocab_chunk,
        share_prompts=run.train.share_prompts,
        skip_silent=run.train.skip_silent,
    )
    schedule = make_schedule(run.optim, run.train.steps * run.train.updates_per_rollout)
    optimizer = make_optimizer(run.optim, schedule)
    ends = tuple(sorted({*words.eos_ids, *words.stop_ids(task.stop_strings)}))
    make_sampler = _sampling(run, model, slots, ends, words.pad_id, python, jit, place)
    sampler = make_sampler(slots)
    common: dict[str, Any] = {
        "task": task,
        "tokenizer": words,
        "sampler": sampler,
        "parts": list(run.reward),
        "logprobs": make_logprobs(learner, policy, jit, place),
    }
    probe = None
    if run.eval.forced_prefix is not None:
        probe = make_sampler(slots + len(words.encode(run.eval.forced_prefix)))
    fixed, moving = _references(run, base, trainable)
    return Work(
        task=task,
        sampler=sampler,
        collector=Collector(
            algorithm=run.algorithm,
            settings=run.rollout,
            exact_kl=make_exact_kl(learner, policy, jit, place),
            seed=run.seed,
            **common,
        ),
        evaluator=Evaluator(settings=run.eval, rollout=run.rollout, probe_sampler=probe, **common),
        update=make_update(
            run.algorithm, learner, optimizer, policy, run.rollout.group_size, jit, place
        ),
        base=base,
        reference=fixed,
        schedule=schedule,
        state=TrainState(
            trainable=trainable,
            opt_state=place.made(optimizer.init, trainable),
            step=place.share(jnp.int32(0)),
            key=place.share(jax.random.key(run.seed)),
            reference=moving,
        ),
        place=place,
    )


def _sampling(
    run: Run,
    model: llama.Model,
    slots: int,
    ends: tuple[int, ...],
    pad_id: int,
    python: str | None,
    jit: Callable,
    place: Placement,
) -> Callable[[int], JaxSampler | EngineSampler]:
    """Prompt slots -> a sampler for them: the built-in one, or where there is a `python` to run it,
    one of the external engine that they share. That starts with its first weights."""
    if python is None:
        return lambda room: JaxSampler(model, room, ends, pad_id, run.rollout.slots, jit, place)
    engine = Engine(
        run.engine,
        model,
        folder=run.folder,
        dtype=run.model.dtype,
        context=slots + run.rollout.max_completion_length,
        entries=entries_of(run.model.path),
        lora_scale=run.lora.scale,
        command=(python, str(WORKER)),
    )
    return lambda room: EngineSampler(engine, room, ends, pad_id)


def restore_policy(run: Run, step: int | None = None) -> tuple[int, llama.Model, Params]:
    """(step, model, parameters): the policy in a checkpoint of the run's folder, the newest or that
    of `step`. Adapters (LoRA) are joined to their base, which is loaded again.

    Raises TrainingError: no such checkpoint, or the base is no longer what it was.
    """
    step, trainable, meta = checkpoint.load_params(run.folder / "checkpoints", step)
    model = _build(run, checkpoint.shape_of(meta["shape"]))
    base = load_base(run, meta["base"]) if run.lora.active else None
    return step, model, whole(base, trainable)


def load_base(run: Run, mark: str | None) -> Params:
    """The frozen base of a run with LoRA, loaded or made again.

    Raises TrainingError unless it has the fingerprint `mark` (`checkpoint.fingerprint`).
    """
    words = load_tokenizer(run.model)
    task, slots = load_task(run, words) if run.warmstart.steps else (None, 0)
    _, base = load_model(run, task, words, slots)
    checkpoint.refuse_other_base(mark, checkpoint.fingerprint(base))
    return base


def load_task(run: Run, words: Tokenizer) -> tuple[Task, int]:
    """The task, without prompts that are too long, and the width of its prompts in tokens. Raises
    TrainingError where a reward needs a column that the data has not."""
    task = within_limit(run.task(), words, run.rollout.max_prompt_length)
    check_columns(run.reward, task)
    return task, _prompt_slots(run, task, words)


def _prompt_slots(run: Run, task: Task, words: Tokenizer) -> int:
    """One width for all prompts of the run, so that each program compiles once: no wider than the
    longest needs (in steps of 8 tokens), which is known for finite data only."""
    limit, longest = run.rollout.max_prompt_length, longest_prompt(task, words)
    return limit if longest is None else min(limit, -(-longest // 8) * 8)


def load_tokenizer(settings: ModelSettings) -> Tokenizer:
    """That of the model's folder, or the character tokenizer. Raises TrainingError."""
    if settings.path is None:
        return tokenizer.char_tokenizer()
    path = Path(settings.path).expanduser()
    if not path.exists():
        raise TrainingError(
            f"model.path={path}: no such file or folder (for SmolLM2, run "
            "`python scripts/fetch_smollm2.py` first)"
        )
    try:
        folder = path.parent if path.suffix == ".gguf" else path
        return tokenizer.load(folder, settings.chat_arguments)
    except (FileNotFoundError, ValueError) as error:
        raise TrainingError(f"the tokenizer of model.path={path}: {error}") from error


def _build(run: Run, shape: LlamaConfig, place: Placement = ONE_DEVICE) -> llama.Model:
    return build_model(run.model, shape, run.lora.scale, gather=place.gather)


def build_model(
    settings: ModelSettings, shape: LlamaConfig, lora_scale: float = 1.0, **where: Any
) -> llama.Model:
    """The functions of a model of that shape, as the settings say they compute. `where`: `gather`
    and `backend` of `llama.build`."""
    return llama.build(
        shape,
        dtype=settings.dtype,
        remat=settings.remat,
        lora_scale=lora_scale,
        attention=attention_kernels.choose(settings.attention, settings.attention_block),
        unroll_layers=settings.unroll_layers,
        turn_weights=settings.turn_weights,
        **where,
    )


def _split(run: Run, model: llama.Model, params: Params) -> tuple[Params | None, Params]:
    """(frozen base, what is trained): all parameters, or with LoRA fresh adapters beside them."""
    checkpoint.refuse_different(params)
    if not run.lora.active:
        return None, params
    key = jax.random.fold_in(jax.random.key(run.seed), ADAPTERS)
    return params, jax.jit(partial(lora.init, model.config, run.lora))(key)


def _refuse_other_shape(expected: LlamaConfig | None, found: LlamaConfig, path: Path) -> None:
    """Raise TrainingError, naming a field, if weights are of another shape than the configuration
    says: another model than was planned for."""

    def same(a: Any, b: Any) -> bool:
        # a GGUF file rounds its numbers to float32
        return math.isclose(a, b, rel_tol=1e-6) if isinstance(a, float) else a == b

    for field in fields(found) if expected is not None else ():
        said, is_there = getattr(expected, field.name), getattr(found, field.name)
        if not same(said, is_there):
            raise TrainingError(
                f"model.shape.{field.name}={said}, and {path} has {is_there}: another model? "
                "(model.shape=null takes the folder's)"
            )


def _references(
    run: Run, base: Params | None, trainable: Params
) -> tuple[Params | None, Params | None]:
    """(beside the state, within it, where it moves): the policy as it starts. With LoRA that is the
    base itself; else a copy, since updates donate the state."""
    kl = run.algorithm.kl
    if not kl.active:
        return None, None
    if kl.refresh_every:
        return None, jax.tree.map(jnp.copy, trainable)
    return jax.tree.map(jnp.copy, trainable) if base is None else base, None


def _read(settings: ModelSettings, path: Path) -> tuple[LlamaConfig, Params]:
    """The weights at `model.path`. TrainingError, with what is wrong with the files."""
    load = gguf.load if path.suffix == ".gguf" else hf.load
    try:
        if path.suffix != ".gguf":  # before gigabytes are read
            _refuse_other_shape(settings.shape, hf.read_config(path), path)
        shape, params = load(path, settings.base_dtype)
    except (OSError, ValueError) as error:
        raise TrainingError(f"model.path={path}: {error}") from error
    _refuse_other_shape(settings.shape, shape, path)
    return shape, params


def load_model(
    run: Run, task: Task | None, words: Tokenizer, slots: int, jit: Callable = jax.jit
) -> tuple[llama.Model, Params]:
    """The model and its first parameters, of `model.base_dtype`: read, warm-started or random. The
    task is for the warm start, and so is `jit`."""
    settings, build = run.model, partial(_build, run)

    def placed(params: Params) -> Params:
        return jax.tree.map(partial(jnp.asarray, dtype=settings.base_dtype), params)

    if settings.path is not None:
        shape, params = _read(settings, Path(settings.path).expanduser())
        return build(shape), placed(params)
    if settings.shape is None:
        raise TrainingError("model: neither a path nor a shape")
    model = build(settings.shape)
    if run.warmstart.steps == 0:
        return model, placed(jax.jit(model.init)(jax.random.fold_in(jax.random.key(run.seed), 1)))
    assert task is not None
    # it is trained in float32 whatever the base's dtype is, and runs with and without LoRA share it
    trained = {key: value for key, value in run.config["model"].items() if key != "base_dtype"}
    params, cached = warm_params(
        run.warmstart,
        model,
        task,
        words,
        prompt_slots=slots,
        seed=run.seed,
        identity={"task": run.config["task"], "model": trained},
        cache=run.cache,
        progress=run.logger.progress,
        jit=jit,
    )
    if cached and run.logger.progress:
        say(f"warm start: seed {run.seed} taken from {run.cache}")
    return model, placed(params)
