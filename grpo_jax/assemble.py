"""From a checked configuration to the machinery of a run: everything is loaded here, once."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from grpo_jax import tokenizer
from grpo_jax.answers import RolloutSettings
from grpo_jax.evaluate import EvalSettings, Evaluator
from grpo_jax.generate import JaxSampler
from grpo_jax.learner import make_update
from grpo_jax.models import gguf, hf, llama
from grpo_jax.models.config import LlamaConfig
from grpo_jax.optim import OptimSettings, make_optimizer, make_schedule
from grpo_jax.policy import PolicySettings, make_exact_kl, make_logprobs
from grpo_jax.rewards.combine import RewardPart
from grpo_jax.rollout import Collector
from grpo_jax.tasks.base import Task, longest_prompt, within_limit
from grpo_jax.tokenizer import Tokenizer
from grpo_jax.types import Algorithm, Params, TrainingError, TrainState
from grpo_jax.warmstart import WarmstartSettings, warm_params


@dataclass(frozen=True)
class ModelSettings:
    """`model` in the config: a pretrained `path`, or a random model of `shape`."""

    path: str | None  # a Hugging Face folder or a .gguf file (with its tokenizer beside it)
    shape: LlamaConfig | None
    dtype: str  # of the matmuls; parameters, optimizer and losses are float32
    remat: bool  # recompute each layer in the backward pass


@dataclass(frozen=True)
class TrainSettings:
    """`train` in the config."""

    steps: int  # rollouts
    epochs: int  # passes over each rollout
    minibatches: int  # optimizer steps in one pass
    micro_batch_rows: int  # rows in one forward and backward pass, at most
    vocab_chunk: int  # vocabulary entries whose logits exist at one time
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
    warmstart: WarmstartSettings
    rollout: RolloutSettings
    train: TrainSettings
    optim: OptimSettings
    eval: EvalSettings
    checkpoint: CheckpointSettings
    logger: LoggerSettings
    config: dict[str, Any]  # resolved, for logs and checkpoints


@dataclass
class Work:
    """The machinery of one run."""

    task: Task
    sampler: JaxSampler
    collector: Collector
    evaluator: Evaluator
    update: Callable
    reference: Params | None  # the policy as it began; None: no KL, or the state's own moves
    schedule: optax.Schedule
    state: TrainState  # as a run begins; the loop takes it over (updates donate it)


def assemble(run: Run) -> Work:
    """Load the data and the model (or warm-start it), and build every jitted function."""
    words = _load_tokenizer(run.model)
    task = within_limit(run.task(), words, run.rollout.max_prompt_length)
    slots = _prompt_slots(run, task, words)
    model, params = _load_model(run, task, words, slots)
    policy = PolicySettings(
        temperature=run.rollout.temperature,
        micro_batch_rows=run.train.micro_batch_rows,
        vocab_chunk=run.train.vocab_chunk,
    )
    schedule = make_schedule(run.optim, run.train.steps * run.train.updates_per_rollout)
    optimizer = make_optimizer(run.optim, schedule)
    ends = tuple(sorted({*words.eos_ids, *words.stop_ids(task.stop_strings)}))
    sampler = JaxSampler(model, slots, ends, words.pad_id)
    common: dict[str, Any] = {
        "task": task,
        "tokenizer": words,
        "sampler": sampler,
        "parts": list(run.reward),
        "logprobs": make_logprobs(model, policy),
    }
    exact_kl = make_exact_kl(model, policy)
    probe = None
    if run.eval.forced_prefix is not None:
        room = slots + len(words.encode(run.eval.forced_prefix))
        probe = JaxSampler(model, room, ends, words.pad_id)
    # the reference is the policy as it starts; a copy, since updates donate the state
    kl = run.algorithm.kl
    reference = jax.tree.map(jnp.copy, params) if kl.active else None
    moves = kl.active and kl.refresh_every > 0
    return Work(
        task=task,
        sampler=sampler,
        collector=Collector(
            algorithm=run.algorithm,
            settings=run.rollout,
            exact_kl=exact_kl,
            seed=run.seed,
            **common,
        ),
        evaluator=Evaluator(settings=run.eval, rollout=run.rollout, probe_sampler=probe, **common),
        update=make_update(run.algorithm, model, optimizer, policy),
        reference=None if moves else reference,
        schedule=schedule,
        state=TrainState(
            trainable=params,
            opt_state=jax.jit(optimizer.init)(params),
            step=jnp.int32(0),
            key=jax.random.key(run.seed),
            reference=reference if moves else None,
        ),
    )


def _prompt_slots(run: Run, task: Task, words: Tokenizer) -> int:
    """One width for all prompts of the run, so that each program compiles once: no wider than the
    longest needs (in steps of 8 tokens), which is known for finite data only."""
    limit, longest = run.rollout.max_prompt_length, longest_prompt(task, words)
    return limit if longest is None else min(limit, -(-longest // 8) * 8)


def _load_tokenizer(settings: ModelSettings) -> Tokenizer:
    if settings.path is None:
        return tokenizer.char_tokenizer()
    path = Path(settings.path).expanduser()
    if not path.exists():
        raise TrainingError(
            f"model.path={path}: no such file or folder (for SmolLM2, run "
            "`python scripts/fetch_smollm2.py` first)"
        )
    return tokenizer.load(path.parent if path.suffix == ".gguf" else path)


def _load_model(run: Run, task: Task, words: Tokenizer, slots: int) -> tuple[llama.Model, Params]:
    """The model and its first parameters, float32: read, warm-started or random."""
    settings = run.model
    build = partial(llama.build, dtype=settings.dtype, remat=settings.remat)
    if settings.path is not None:
        path = Path(settings.path).expanduser()
        shape, params = gguf.load(path) if path.suffix == ".gguf" else hf.load(path)
        return build(shape), jax.tree.map(jnp.asarray, params)
    if settings.shape is None:
        raise TrainingError("model: neither a path nor a shape")
    model = build(settings.shape)
    if run.warmstart.steps == 0:
        return model, jax.jit(model.init)(jax.random.fold_in(jax.random.key(run.seed), 1))
    params, cached = warm_params(
        run.warmstart,
        model,
        task,
        words,
        prompt_slots=slots,
        seed=run.seed,
        identity={"task": run.config["task"], "model": run.config["model"]},
        cache=run.cache,
        progress=run.logger.progress,
    )
    if cached and run.logger.progress:
        print(f"warm start: seed {run.seed} taken from {run.cache}")
    return model, params
