"""A supervised warm start for the embedded tasks, cached so that the runs of a sweep share it.

Token-mean cross-entropy on demonstrations, in two phases: clean ones first (the skill is learned
later, or not at all, from noisy ones), then noisy ones, so that the policy errs and GRPO has
something to learn.
"""

import hashlib
import inspect
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file
from tqdm import tqdm

from grpo_jax import hosts
from grpo_jax.generate import given_rollout
from grpo_jax.kernels.logprobs import token_logprobs
from grpo_jax.models.llama import Model
from grpo_jax.optim import OptimSettings, make_optimizer, make_schedule
from grpo_jax.policy import PolicySettings, sequence_logprobs
from grpo_jax.screen import say
from grpo_jax.tasks.base import Task, prompt_ids
from grpo_jax.tokenizer import Tokenizer
from grpo_jax.types import Params, Rollout, TrainingError


@dataclass(frozen=True)
class WarmstartSettings:
    """`warmstart` in the config. steps=0 is none."""

    steps: int
    batch: int  # demonstrations per step
    clean_share: float  # share of the steps, the first ones, with clean demonstrations
    max_tokens: int  # a demonstration is cut here
    lr: float
    warmup_steps: int
    decay_share: float  # linear decay over the last share of the steps ...
    final_share: float  # ... to this share of the learning rate
    b2: float  # Adam's second-moment decay
    clip_norm: float


def warm_params(
    settings: WarmstartSettings,
    model: Model,
    task: Task,
    tokenizer: Tokenizer,
    *,
    prompt_slots: int,
    seed: int,
    identity: dict,
    cache: Path,
    progress: bool,
    jit: Callable = jax.jit,
) -> tuple[Params, bool]:
    """(parameters, whether they came from the cache). Training takes tens of seconds.

    `identity` says what else the result depends on (the config of task and model); with the
    settings, the seed and the source of the task it names the cache file.
    """
    key = _cache_key(settings, model, task, identity | {"prompt_slots": prompt_slots}, seed)
    path = cache / "warmstart" / f"{key}.safetensors"
    with hosts.one_first("warm start"):
        kept = _kept(path, model)
        if kept is not None:
            return kept, True
        params = _train(settings, model, task, tokenizer, prompt_slots, seed, progress, jit)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(f".{os.getpid()}.tmp")
            save_file(_flatten(params), part)
            # jobs of a sweep may race: each writes its own file, the same content
            os.replace(part, path)
        except (OSError, SafetensorError) as error:
            say(f"note: the warm start is not kept for the next run: {error}")
        return params, False


def _kept(path: Path, model: Model) -> Params | None:
    """What the cache has for this model; None, and a word, for a file that is something else."""
    if not path.exists():
        return None
    wanted = jax.tree_util.tree_leaves_with_path(jax.eval_shape(model.init, jax.random.key(0)))
    try:
        flat = load_file(path)
        found = {name: (leaf.shape, leaf.dtype) for name, leaf in flat.items()}
        if found == {_place(at): (leaf.shape, leaf.dtype) for at, leaf in wanted}:
            return _unflatten(flat)
        problem: object = "its tensors are not this model's"
    except (OSError, SafetensorError) as error:
        problem = error
    say(f"note: {path} is no warm start, and is made again: {problem}")
    return None


def _train(
    settings: WarmstartSettings,
    model: Model,
    task: Task,
    tokenizer: Tokenizer,
    prompt_slots: int,
    seed: int,
    progress: bool,
    jit: Callable,
) -> Params:
    if task.demonstrate is None:
        raise TrainingError(f"task {task.name!r} has no demonstrations: use warmstart=none")
    schedule = _schedule(settings)
    optimizer = make_optimizer(
        OptimSettings(
            lr=settings.lr,
            schedule="constant",
            warmup_updates=0,
            final_share=1.0,
            b1=0.9,
            b2=settings.b2,
            eps=1e-8,
            weight_decay=0.0,
            clip_norm=settings.clip_norm,
        ),
        schedule,
    )
    learner = PolicySettings(
        temperature=1.0, micro_batch_rows=settings.batch, vocab_chunk=model.config.vocab_size
    )

    @partial(jit, donate_argnums=(0, 1))
    def update(params, opt_state, rollout):
        def loss(params):
            logp, _ = sequence_logprobs(model, learner, params, rollout)
            return -jnp.sum(jnp.where(rollout.mask, logp, 0.0)) / rollout.mask.sum()

        value, grad = jax.value_and_grad(loss)(params)
        steps, opt_state = optimizer.update(grad, opt_state, params)
        return optax.apply_updates(params, steps), opt_state, value

    params = jax.jit(model.init)(jax.random.fold_in(jax.random.key(seed), 1))
    opt_state = optimizer.init(params)
    rng = np.random.Generator(np.random.Philox(key=[seed, 2]))
    bar = tqdm(
        range(settings.steps),
        desc="warm start",
        unit="step",
        dynamic_ncols=True,
        disable=not progress,
    )
    for step in bar:
        clean = step < settings.clean_share * settings.steps
        rollout = _demonstrations(settings, task, tokenizer, prompt_slots, rng, clean)
        params, opt_state, value = update(params, opt_state, rollout)
        if step % 20 == 19:
            bar.set_postfix(loss=f"{float(value):.3f}", refresh=False)
    return params


def _schedule(settings: WarmstartSettings) -> optax.Schedule:
    """Linear warm-up, constant, then linear decay."""
    base = OptimSettings(
        settings.lr, "constant", settings.warmup_steps, 1.0, 0.9, settings.b2, 1e-8, 0.0, 1.0
    )
    start = round(settings.steps * (1 - settings.decay_share))
    decay = optax.linear_schedule(
        settings.lr, settings.lr * settings.final_share, max(settings.steps - start, 1)
    )
    return optax.join_schedules([make_schedule(base, settings.steps), decay], [start])


def _demonstrations(settings, task, tokenizer, prompt_slots, rng, clean: bool) -> Rollout:
    pairs = [task.demonstrate(rng, clean) for _ in range(settings.batch)]
    return given_rollout(
        [prompt_ids(prompt, tokenizer) for prompt, _ in pairs],
        [[*tokenizer.encode(text), tokenizer.eos_ids[0]] for _, text in pairs],
        prompt_slots,
        settings.max_tokens,
        tokenizer.pad_id,
    )


def _cache_key(settings, model: Model, task: Task, identity: dict, seed: int) -> str:
    # the source of what is trained on and of what is trained: no stale cache after an edit
    demonstrate: Any = task.demonstrate
    while isinstance(demonstrate, partial):  # whose own module is functools
        demonstrate = demonstrate.func
    made_by = (_train, demonstrate, Model, sequence_logprobs, make_optimizer, given_rollout)
    modules = {inspect.getmodule(what) for what in (*made_by, Tokenizer, token_logprobs)}
    source = sorted(inspect.getsource(module) for module in modules if module is not None)
    what = [asdict(settings), asdict(model.config), identity, seed, source]
    text = json.dumps(what, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:20]


def _flatten(params: Params) -> dict[str, np.ndarray]:
    leaves, _ = jax.tree_util.tree_flatten_with_path(params)
    return {_place(path): np.asarray(leaf) for path, leaf in leaves}


def _place(path: tuple[Any, ...]) -> str:
    return "/".join(step.key for step in path)


def _unflatten(flat: dict[str, np.ndarray]) -> Params:
    tree: Params = {}
    for name, value in flat.items():
        *parents, last = name.split("/")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[last] = jnp.asarray(value)
    return tree
