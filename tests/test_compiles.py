"""What a run compiles: no number of a configuration is in a program, and no layer makes it longer.

By the texts of lowered programs, which is what XLA is given and what its cache goes by.
(tests/test_trainer.py has whole runs: nothing after the first step, nothing in a sweep's job 2.)
"""

from functools import cache, partial

import jax
import jax.numpy as jnp
import pytest

from grpo_jax.generate import generate
from grpo_jax.learner import make_update
from grpo_jax.optim import make_optimizer, make_schedule
from grpo_jax.plan.estimate import Programs
from grpo_jax.policy import make_logprobs
from tests.composed import run_of
from tests.fixtures import bigram, make_batch, make_state
from tests.test_trainer import SMALL

pytestmark = pytest.mark.core

ids = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
NUMBERS = (
    *("seed=7", "kl.coef=0.001", "clip.low=0.1", "clip.high=0.5", "train.steps=9"),
    *("optim.lr=1e-4", "optim.schedule=cosine", "optim.warmup_updates=0", "optim.final_share=0.5"),
    *("optim.clip_norm=0.3", "eval.every=2", "name=other"),
)


def update_of(run, model, settings):
    updates = run.train.steps * run.train.updates_per_rollout
    optimizer = make_optimizer(run.optim, make_schedule(run.optim, updates))
    update = make_update(run.algorithm, model, optimizer, settings, run.rollout.group_size)
    return update, optimizer


def update_text(*overrides: str) -> str:
    p = Programs(run_of(*SMALL, *overrides), 1)
    update, _ = update_of(p.run, p.model, p.settings)
    coef = jax.ShapeDtypeStruct((), jnp.float32)
    return update.lower(p.state, p.batch, ids((p.update_rows,)), coef).as_text()


def logprobs_text(*overrides: str) -> str:
    p = Programs(run_of(*SMALL, *overrides), 1)
    logprobs = make_logprobs(p.model, p.settings)
    return logprobs.lower(p.trainable, p.batch.rollout, p.run.rollout.group_size).as_text()


def sampler_text(*overrides: str) -> str:
    p = Programs(run_of(*SMALL, *overrides), 1)
    rollout = p.run.rollout
    prompts = ids((rollout.prompts, rollout.max_prompt_length))
    mask = jax.ShapeDtypeStruct(prompts.shape, jnp.bool_)
    sample = partial(generate, p.model, sampling_params=rollout.sampling, eos_ids=(0,))
    lowered = jax.jit(sample).lower(p.trainable, prompts, mask, ids((p.rows,)), p.state.key)
    return lowered.as_text()


@cache
def short_text(*overrides: str) -> str:
    """That of an update whose model is a table: quick."""
    run = run_of(*SMALL, *overrides)
    update, optimizer = update_of(run, bigram(), Programs(run, 1).settings)
    state = make_state(bigram().init(jax.random.key(0)), optimizer)
    return update.lower(state, make_batch(), ids((4,)), jnp.float32(0)).as_text()


def test_no_number_of_a_run_is_in_the_update():
    assert update_text() == update_text(*NUMBERS)


@pytest.mark.parametrize(
    ("given", "numbers"),
    [
        ((), NUMBERS),
        (("algorithm=dppo",), ("clip.low=0.1", "clip.high=0.2", "clip.cap=9")),
        (("algorithm=deepseek_v32",), ("correction.threshold=0.1", "kl.coef=0.1")),
        (("algorithm=dr_grpo",), ("aggregation.length=7",)),
        (("algorithm=entropy_8020",), ("select.share=0.5",)),
        (("optim.weight_decay=0.1",), ("optim.weight_decay=0.2",)),
    ],
)
def test_no_number_is_in_the_update(given, numbers):
    assert short_text(*given) == short_text(*given, *numbers)


@pytest.mark.parametrize(
    "other", ["clip=dual", "kl.coef=0.0", "aggregation=token_mean", "optim.weight_decay=0.1"]
)
def test_structure_is(other):
    assert short_text() != short_text(other)


@pytest.mark.parametrize("text", [update_text, logprobs_text, sampler_text])
def test_more_layers_are_no_longer_program(text):
    looped = "model.unroll_layers=2"  # of the sampler, which is longer where they are unrolled
    few, many = (text(f"model.shape.num_layers={n}", looped).count("\n") for n in (4, 30))
    assert few == many > 100
